"""From a path to a checked `Config`: the door of this room. Raises nothing but what `LoadResult.require` says."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quantizer.config import hierarchical
from quantizer.config.check import check_meaning
from quantizer.config.check_algorithms import check_algorithms
from quantizer.config.check_levels import check_levels
from quantizer.config.diagnostics import ConfigError, Diagnostic, in_order
from quantizer.config.document import Document, Text
from quantizer.config.form import Form, form_of
from quantizer.config.layered import translate
from quantizer.config.model import ROLES, Config
from quantizer.config.read import read_document
from quantizer.config.schema import check_structure
from quantizer.config.spellings import canonical

MANY = 200
"""From so many structural errors on, what the file means is not looked at: most of it is not there."""


@dataclass(frozen=True)
class LoadResult:
    """What a file gave: the config if it can be used, and every finding; `sources` has the text for excerpts."""

    config: Config | None
    diagnostics: tuple[Diagnostic, ...]
    sources: Mapping[str, str]
    document: Document | None = None

    def require(self) -> Config:
        """The config; `ConfigError` (exit code 2) with all findings if there is none."""
        if self.config is None:
            raise ConfigError(self.diagnostics, self.sources)
        return self.config


def load_config(path: str | os.PathLike[str]) -> LoadResult:
    """Read and check the file at `path`. Never raises for what is in the file: all of that is in `diagnostics`."""
    try:
        document = read_document(path)
    except ConfigError as error:
        return LoadResult(None, error.diagnostics, error.sources)
    return check_document(document)


def check_document(document: Document) -> LoadResult:
    """Check a parsed document; the part of it that is sound is checked for conflicts even if another part is not."""
    form = form_of(document)
    known, notes = canonical(document) if form == "hierarchical" else (document, ())
    structure = [*notes, *check_structure(known)]
    sources = {document.source.name: document.source.text}
    if len(structure) > MANY:
        return LoadResult(None, in_order(structure), sources, document)
    wrong = {found.place.pointer for found in structure if found.place and found.code not in _NO_VALUE}
    config, meaning = _READERS[form](known, wrong)
    diagnostics = in_order([*structure, *meaning])
    usable = not any(found.severity == "error" for found in diagnostics)
    return LoadResult(config if usable else None, diagnostics, sources, document)


def _layered(document: Document, wrong: Collection[str]) -> Reading:
    layered = translate(document, wrong)
    config = layered.config()
    return config, (*check_meaning(layered), *check_algorithms(layered.algorithms, config))


def _hierarchical(document: Document, wrong: Collection[str]) -> Reading:
    levels = hierarchical.translate(document, wrong)
    config = levels.config()
    return config, (*check_levels(levels), *check_algorithms(levels.algorithms, config))


Reading = tuple[Config, tuple[Diagnostic, ...]]
_READERS: Mapping[Form, Callable[[Document, Collection[str]], Reading]] = {
    "layered": _layered,
    "hierarchical": _hierarchical,
}
_NO_VALUE = ("QZ105", "QZ106", "QZ116")
"""Findings that leave the value at their place as it is."""


def default_config() -> Config:
    """The config that holds when no file is given: DPU, power-of-two scales. The file check does not apply to it.

    Source: Vitis AI, quantization configuration, table "Default Configurations", with `half_up` for activations as the
    restrictions of the same page ask.
    """
    document = Document(Text("<built-in default>", ""), DEFAULT, values={}, keys={})
    return translate(document).config()


DEFAULT: dict[str, Any] = {
    "convert_relu6_to_relu": False,
    "convert_silu_to_hswish": False,
    "include_cle": True,
    "keep_first_last_layer_accuracy": False,
    "keep_add_layer_accuracy": False,
    "include_bias_corr": True,
    "target_device": "DPU",
    "quantizable_data_type": list(ROLES),
    "overall_quantize_config": {
        "bit_width": 8,
        "method": "diffs",
        "round_mode": "std_round",
        "symmetry": True,
        "per_channel": False,
        "signed": True,
        "narrow_range": False,
        "scale_type": "poweroftwo",
        "calib_statistic_method": "modal",
    },
    "tensor_quantize_config": {"activation": {"round_mode": "half_up"}},
}
