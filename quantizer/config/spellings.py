"""Older and newer spellings of the hierarchical form's words, turned into its own, with a note for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantizer.config.algorithm_settings import ALIASES
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document import Document, Span, pointer_to
from quantizer.config.wording import quoted

Path = tuple[str | int, ...]

OBSERVERS = (
    "PerTensorMinMaxObserver",
    "PerChannelMinMaxObserver",
    "PerGroupMinMaxObserver",
    "PerTensorPercentileObserver",
    "PerTensorMSEObserver",
    "PerBlockMXObserver",
    "PerBlockBFPObserver",
    "PlaceholderObserver",
)

KEYS: Mapping[str, str] = {"dynamic": "is_dynamic", "axis": "ch_axis"}
"""Other spellings of a spec's keys."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "observer_cls": {
        **{name.removesuffix("Observer"): name for name in OBSERVERS},
        "min_max": "PerTensorMinMaxObserver",
        "percentile": "PerTensorPercentileObserver",
        "MSE": "PerTensorMSEObserver",
    },
    "scale_type": {"power_of_2": "pof2", "poweroftwo": "pof2", "float32": "float"},
    "round_method": {"std_round": "round"},
    "target_device": {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "ipu": "IPU"},
    "dtype": {"float8_e4m3": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "fp4_e2m1": "fp4"},
    "name": ALIASES,
}
"""Other spellings of a key's values."""

TYPES: Mapping[str, str] = {
    "Conv2D": "Conv2d",
    "Conv3D": "Conv3d",
    "Conv2DTranspose": "ConvTranspose2d",
    "Dense": "Linear",
}
"""Layer types in the words of other frameworks. (`Conv1D` is a class of its own in transformers, so it stays.)"""

_SPECS = frozenset({"input_tensors", "output_tensors", "weight", "bias"})


def other_spelling(key: str, path: Sequence[str | int]) -> str:
    """The form's word for a key of the block at `path`; the key itself, if it is no other spelling.

    >>> other_spelling("dynamic", ("global_quant_config", "weight")), other_spelling("dynamic", ())
    ('is_dynamic', 'dynamic')
    """
    table = KEYS if path and path[-1] in _SPECS else TYPES if tuple(path) == ("layer_type_quant_config",) else {}
    return table.get(key, key)


def canonical(document: Document) -> tuple[Document, tuple[Diagnostic, ...]]:
    """The document in the form's own words, every value still at its place, and a note for each word replaced."""
    rewriting = _Rewriting(document)
    value = rewriting.copy(document.value, (), ())
    rewritten = Document(document.source, value, rewriting.values, rewriting.keys, rewriting.dotted)
    return rewritten, tuple(rewriting.notes)


@dataclass
class _Rewriting:
    """One pass over a document; what it finds out about places goes into the new document."""

    document: Document
    values: dict[str, Span] = field(default_factory=dict)
    keys: dict[str, Span] = field(default_factory=dict)
    dotted: dict[str, str] = field(default_factory=dict)
    notes: list[Diagnostic] = field(default_factory=list)

    def copy(self, value: Any, old: Path, new: Path) -> Any:
        """A copy of the value at the path `old`, which is at the path `new` afterwards."""
        before, after = pointer_to(*old), pointer_to(*new)
        self.values[after] = self.document.values[before]
        if before in self.document.keys:
            self.keys[after] = self.document.keys[before]
        if before in self.document.dotted:
            self.dotted[after] = self.document.dotted[before]
        if isinstance(value, dict):
            return {word: self.copy(value[key], (*old, key), (*new, word)) for key, word in self._words(value, old)}
        if isinstance(value, list):
            return [self.copy(item, (*old, at), (*new, at)) for at, item in enumerate(value)]
        return self._value(value, old, after)

    def _words(self, members: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str]]:
        """Each key, and the word for it; a key whose own word is there too is left as it is."""
        for key in members:
            word = other_spelling(key, path)
            if word != key and word not in members:
                self._note(key, word, pointer_to(*path, key), key=True)
                yield key, word
            else:
                yield key, key

    def _value(self, value: Any, path: Path, after: str) -> Any:
        key = path[-1] if path else ""
        word = VALUES.get(str(key), {}).get(value, value) if isinstance(value, str) else value
        if word != value:
            self._note(value, word, pointer_to(*path))
        return word

    def _note(self, spelling: str, word: str, pointer: str, *, key: bool = False) -> None:
        text = f"{quoted(spelling)} is read as {quoted(word)}"
        self.notes.append(
            Diagnostic("QZ116", text, self.document.place(pointer, key=key), "note", help=f"write {quoted(word)}")
        )
