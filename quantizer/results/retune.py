"""New scales of activations from what calibration has kept, without the model and without
data.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.observing import DISTRIBUTION
from quantizer.config.document.document import Document, Text, pointer_to
from quantizer.config.document.read import parse_document
from quantizer.config.forms.form import form_of
from quantizer.config.forms.hierarchical_spec import observer_word, usual_statistic
from quantizer.config.forms.range_words import Paths, Restated, by_layer, in_place
from quantizer.config.load import check_document
from quantizer.config.model import Config, QuantizationSpec, Role
from quantizer.config.roles import base_role
from quantizer.config.wording import first_names
from quantizer.errors import ResultError, UsageError
from quantizer.observers import Observer
from quantizer.plan.model import Key
from quantizer.results.calibrated_folder import CalibratedFolder, Json

AGAIN = "calibrate again with the config that --dry_run -o FILE writes"
Statistics = dict[tuple[str, str], dict[str, Tensor]]


@dataclass(frozen=True)
class Change:
    """What is said anew of how ranges are found; None leaves it."""

    method: str | None = None
    percentage: float | None = None
    statistic: str | None = None

    def of(self, spec: QuantizationSpec, form: str) -> QuantizationSpec:
        """A spec with it, as a config of this form would have it.

        Raises:
            UsageError: the form has no word for it.
        """
        method = self.method or spec.method
        known: Json = {"method": method}
        if form == "hierarchical":
            if observer_word(replace(spec, **known)) is None:
                raise UsageError(
                    f"the hierarchical form has no observer for {method} {spec.qscheme}"
                )
            known["statistic"] = usual_statistic(method)
            known["percentage"] = (
                spec.percentage if method == spec.method else QuantizationSpec().percentage
            )
        elif self.statistic:
            known["statistic"] = self.statistic
        if self.percentage is not None and method == "percentile":
            known["percentage"] = self.percentage
        return replace(spec, **known)


def retuned(
    folder: CalibratedFolder, change: Change, layers: Collection[str] | None = None
) -> Retuned:
    """What another way to find ranges does to the activations of these layers, or of all.

    Raises:
        UsageError: nothing changes, or the form has no such word.
        ResultError: which tensors share a quantization would change.
        ConfigError: the config would not be valid.
    """
    document = folder.document
    form = form_of(document.value)
    if change.percentage is not None and change.method not in (None, "percentile"):
        raise UsageError(f"--percentage is for the percentile method, not for {change.method}")
    if form == "hierarchical" and change.statistic:
        raise UsageError(
            "--statistic is for the layered form: here the observers of activations decide it"
        )
    keys = [key for key in folder.activations if layers is None or key[0] in layers]
    after = {key: change.of(folder.specs[key], form) for key in keys}
    changed = {
        key: Restated(folder.specs[key], spec, folder.planned[key]["origins"])
        for key, spec in after.items()
        if spec != folder.specs[key]
    }
    if not changed:
        raise UsageError("nothing changes: the activations have these settings already")
    _require_alike(folder, changed)
    return Retuned(folder, changed, *_document(folder, document, changed, whole=layers is None))


class Retuned:
    """Tensors before and after, and the config that says so.

    Attributes:
        tensors: before and after.
        text: of the new config.
    """

    def __init__(
        self,
        folder: CalibratedFolder,
        tensors: Mapping[Key, Restated],
        value: Mapping[str, Any],
        paths: Paths,
    ) -> None:
        self._folder, self.tensors, self._paths = folder, tensors, paths
        self._before = folder.document
        name = self._before.source.name if self._before.source.text else "config.json"
        self.text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        self._after = parse_document(Text(name, self.text))
        self.config: Config = check_document(self._after).require()

    @cached_property
    def entries(self) -> tuple[dict[Key, Json], Statistics]:
        """The new entries of quant_info.json, and all statistics: exactly what a calibration
        with this config finds.

        Raises:
            ResultError: what was kept does not say it; what is missing is named.
        """
        kept, folder = self._folder.statistics(), self._folder
        groups: dict[tuple[str, QuantizationSpec], list[Key]] = {}
        for key in folder.activations:
            groups.setdefault((folder.source(key), folder.specs[key]), []).append(key)
        entries, missing = dict[Key, Json](), dict[str, list[str]]()
        for (source, spec), keys in groups.items():
            owner = next(key for key in keys if key in kept)
            if owner not in self.tensors:
                continue
            after = self.tensors[owner].after
            try:
                observer = _observer(spec, kept[owner]).restated(
                    after, _beside(kept.get((source, "histogram")))
                )
            except (LookupError, ValueError) as error:
                missing.setdefault(str(error), []).append(f"{owner[1]} of {owner[0]}")
                continue
            entries |= {
                key: _entry(folder.entries[key[0]][key[1]], after, observer) for key in keys
            }
            if (source, "histogram") not in kept and not observer.has_histogram:
                kept[source, "histogram"] = kept[owner]
            kept[owner] = observer.state_dict()
        for why, names in missing.items():
            raise ResultError(f"{why}: {first_names(names, 3)}", help=AGAIN)
        ranged = {
            source for (source, _), keys in groups.items() if "counts" not in _first(kept, keys)
        }
        return entries, {
            key: own for key, own in kept.items() if key[1] != "histogram" or key[0] in ranged
        }

    def write(self, place: Path) -> None:
        """Write the result folder; test mode runs it as that of a calibration with this config.

        Raises:
            ResultError: what was kept does not say it, or the folder cannot be written.
        """
        entries, statistics = self.entries
        self._folder.write(place, entries, self._planned(), statistics, self.config)

    def _planned(self) -> dict[Key, Json]:
        """The entries of plan.json, all their places in the new text."""
        found: dict[Key, Json] = {}
        for key, planned in self._folder.planned.items():
            origins = {
                field: self._origin(key, field, origin)
                for field, origin in planned["origins"].items()
            }
            found[key] = {**planned, "origins": origins}
            if key in self.tensors:
                found[key]["spec"] = self.tensors[key].after.to_json()
        return found

    def _origin(self, tensor: Key, field: str, origin: str) -> str:
        """Where the new text says a field, whose place in the old one is `origin`."""
        layer, role = tensor
        said = ((layer, role, field), (layer, base_role(role), field), (layer, role, None))
        for key in said:
            if key in self._paths:
                path = self._paths[key]
                return "default" if path is None else str(self._after.place(pointer_to(*path)))
        return self._moved(origin)

    def _moved(self, origin: str) -> str:
        """Where the value of a place of the old text is in the new one."""
        path = self._before.paths_at.get(origin)
        if path is None:
            return origin
        if path[:1] == ("layer_quantize_config",) and len(path) > 1:
            names = [_selector(entry) for entry in self._after.at(path[0])]
            name = _selector(self._before.at(*path[:2]))
            if name not in names:
                return origin
            path = (path[0], names.index(name), *path[2:])
        pointer = pointer_to(*path)
        return str(self._after.place(pointer)) if pointer in self._after else origin


def _require_alike(folder: CalibratedFolder, changed: Mapping[Key, Restated]) -> None:
    """Refuse changes after which other tensors would be quantized together than now.

    Raises:
        ResultError: so it is.
    """
    before, after = dict[Any, set[Key]](), dict[Any, set[Key]]()
    for key in folder.activations:
        spec = folder.specs[key]
        before.setdefault((folder.source(key), spec), set()).add(key)
        after.setdefault(
            (folder.source(key), changed[key].after if key in changed else spec), set()
        ).add(key)
    for (source, _), keys in after.items():
        if keys not in before.values():
            what = (
                f"the value of {source} would be quantized once where it is quantized twice, "
                "or the other way round"
            )
            raise ResultError(
                f"{what}: "
                f"{first_names([f'{role} of {layer}' for layer, role in sorted(keys)], 3)}",
                help=AGAIN,
            )


def _document(
    folder: CalibratedFolder,
    document: Document,
    changed: Mapping[Key, Restated],
    *,
    whole: bool,
) -> tuple[dict[str, Any], Paths]:
    """The config that says so: at the levels that say it now if all activations change, else
    layer by layer.
    """
    others = [
        (role, folder.planned[layer, role]["origins"])
        for layer, role in folder.quantized
        if (layer, role) not in changed
    ]
    found = in_place(document, changed, others) if whole else None
    if found is not None:
        return found
    layers: dict[str, dict[Role, QuantizationSpec]] = {}
    for key, tensor in changed.items():
        for name in folder.members(key):
            own = {
                base_role(role): spec
                for (layer, role), spec in folder.specs.items()
                if layer == name
            }
            layers.setdefault(name, own)[base_role(key[1])] = tensor.after
    return by_layer(document.value, layers, changed)


def _selector(entry: Json) -> tuple[Any, Any]:
    """What a layer entry is for."""
    return entry.get("layer_type"), entry.get("layer_name")


def _first(kept: Statistics, keys: Iterable[Key]) -> dict[str, Tensor]:
    """What is kept of tensors that have one observer in common: the first of them has it."""
    return next(kept[key] for key in keys if key in kept)


def _observer(spec: QuantizationSpec, state: Mapping[str, Tensor]) -> Observer:
    observer = Observer(spec)
    observer.load_state_dict(state)
    return observer


def _beside(state: Mapping[str, Tensor] | None) -> Observer | None:
    return None if state is None else _observer(DISTRIBUTION, state)


def _entry(entry: Json, spec: QuantizationSpec, observer: Observer) -> Json:
    """An entry of quant_info.json with another scale."""
    qparams = observer.qparams()
    shape = torch.tensor(entry["scale"]).shape
    changed = entry | {"spec": spec.to_json(), "scale": qparams.scale.view(shape).tolist()}
    if "zero_point" in entry:
        changed["zero_point"] = qparams.zero_point.view(shape).tolist()
    if "position" in entry:
        changed["position"] = (
            (-torch.log2(qparams.scale.view(shape))).round().to(torch.int32).tolist()
        )
    return changed
