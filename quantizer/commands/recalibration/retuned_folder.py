"""Compute the scales of activations for another range method, without the model and without
data.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quantizer.calibration.observing import DISTRIBUTION
from quantizer.commands.recalibration.calibrated_folder import CalibratedFolder, ObserverStates
from quantizer.commands.recalibration.range_words import Paths, SpecChange, by_layer, in_place
from quantizer.config.document.document import Text
from quantizer.config.document.edited import edited_text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.form import form_of
from quantizer.config.forms.hierarchical_spec import observer_word, usual_statistic
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.load import check_document
from quantizer.config.model import QuantizationSpec, ResolvedConfig, Role
from quantizer.config.roles import base_role
from quantizer.config.wording import first_names
from quantizer.errors import ResultError, UsageError
from quantizer.observers import Observer
from quantizer.observers.converted import restated
from quantizer.plan.model import Key, TensorSpecs
from quantizer.results.write import scale_positions

_AGAIN = "calibrate again with the config that <--dry_run> -o FILE writes"
_HISTOGRAM = "histogram"
"""Stands for the role in the key of a histogram. Calibration stores one of a value whose
observer has none, in addition to the ranges of batches.
"""


@dataclass(frozen=True)
class Change:
    """New settings of the ranges of activations. A field that is None stays as it is."""

    method: str | None = None
    percentage: float | None = None
    statistic: str | None = None

    def apply(self, spec: QuantizationSpec, form: str) -> QuantizationSpec:
        """Return a spec with the change, as a config of a form would state it.

        Args:
            spec: the spec before.
            form: of the config, layered or hierarchical.

        Raises:
            UsageError: the form cannot state it.
        """
        method = self.method or spec.method
        fields: JsonObject = {"method": method}
        if form == "hierarchical":
            if observer_word(replace(spec, method=method)) is None:
                raise UsageError(
                    f"the hierarchical form has no observer for {method} {spec.qscheme}"
                )
            fields["statistic"] = usual_statistic(method)
            if method != spec.method:
                fields["percentage"] = QuantizationSpec().percentage
        elif self.statistic:
            fields["statistic"] = self.statistic
        if self.percentage is not None and method == "percentile":
            fields["percentage"] = self.percentage
        return replace(spec, **fields)


def retune_activations(
    folder: CalibratedFolder,
    change: Change,
    layers: Collection[str] | None = None,
    name: str = "",
) -> RetunedFolder:
    """Return the activations of some layers, or of all, with new settings of their ranges.

    Args:
        folder: the results.
        change: the new settings.
        layers: the layers; None for all.
        name: of the file that gets the changed config; empty for that of the config before.

    Raises:
        UsageError: nothing changes, or the form of the config cannot state the change.
        ResultError: tensors that share a scale now would not share it any more, or the other
        way round.
        ConfigError: the config would not be valid.
    """
    form = form_of(folder.document.value)
    if change.percentage is not None and change.method not in (None, "percentile"):
        raise UsageError(
            f"<--percentage> is for the percentile method, not for {change.method}"
        )
    if form == "hierarchical" and change.statistic:
        raise UsageError(
            "<--statistic> is for the layered form: here the observers of activations decide it"
        )
    changed: dict[Key, SpecChange] = {}
    for key in folder.activations:
        if layers is not None and key[0] not in layers:
            continue
        before = folder.specs[key]
        after = change.apply(before, form)
        if after != before:
            changed[key] = SpecChange(before, after, folder.planned[key]["origins"])
    if not changed:
        raise UsageError("nothing changes: the activations have these settings already")
    _require_same_sharing(folder, changed)
    value, paths = _changed_config(folder, changed, is_for_all=layers is None)
    return RetunedFolder(folder, changed, value, paths, name)


class RetunedFolder:
    """A result folder with new settings of ranges. Scales are computed when they are needed.

    Args:
        folder: the results.
        tensors: the specs of the changed tensors, before and after.
        value: the new config as JSON.
        paths: the place of each changed field in the new config.
        name: of the new config; empty for that of the config before.

    Attributes:
        tensors: the specs of the changed tensors, before and after.
        text: the text of the new config.
        config: the new config.
    """

    def __init__(
        self,
        folder: CalibratedFolder,
        tensors: Mapping[Key, SpecChange],
        value: JsonMapping,
        paths: Paths,
        name: str,
    ) -> None:
        self._folder = folder
        self.tensors = tensors
        self._paths = paths
        self._before = folder.document
        if self._before.source.text:
            name = name or self._before.source.name
        self.text = edited_text(self._before, value)
        self._after = parse_document(Text(name or "config.json", self.text))
        self.config: ResolvedConfig = check_document(self._after).require()

    @cached_property
    def entries(self) -> tuple[dict[Key, JsonObject], ObserverStates]:
        """Return the new entries of quant_info.json, and the states of all observers.

        Both equal those of a calibration with the new config.

        Raises:
            ResultError: the statistics do not have what the new settings need, which is named.
        """
        folder = self._folder
        states = folder.statistics()
        entries: dict[Key, JsonObject] = {}
        missing: dict[str, list[str]] = {}
        sources_of_ranges: set[str] = set()
        for (source, spec), keys in _shared_observers(folder, folder.specs).items():
            # These activations share one observer, whose state has the key of one of them
            owner = next(key for key in keys if key in states)
            if owner in self.tensors:
                after = self.tensors[owner].after
                histogram = states.get((source, _HISTOGRAM))
                distribution = None
                if histogram is not None:
                    distribution = _observer(DISTRIBUTION, histogram)
                try:
                    observer = restated(_observer(spec, states[owner]), after, distribution)
                except (LookupError, ValueError) as error:
                    layer, role = owner
                    missing.setdefault(str(error), []).append(f"{role} of {layer}")
                    continue
                for layer, role in keys:
                    entry = folder.entries[layer][role]
                    entries[layer, role] = _entry(entry, after, observer)
                # A calibration with the new config would store a histogram in addition
                if histogram is None and not observer.has_histogram:
                    states[source, _HISTOGRAM] = states[owner]
                states[owner] = observer.state_dict()
            if "counts" not in states[owner]:
                sources_of_ranges.add(source)
        for why, names in missing.items():
            raise ResultError(f"{why}: {first_names(names, 3)}", help=_AGAIN)
        # Where all observers have a histogram, calibration stores none in addition
        for source, role in list(states):
            if role == _HISTOGRAM and source not in sources_of_ranges:
                del states[source, role]
        return entries, states

    def planned(self) -> dict[Key, JsonObject]:
        """Return the tensors of plan.json, with the new specs and with origins in the new
        text.
        """
        entries: dict[Key, JsonObject] = {}
        for key, planned in self._folder.planned.items():
            origins: dict[str, str] = {}
            for field, origin in planned["origins"].items():
                origins[field] = self._origin(key, field, origin)
            entry = {**planned, "origins": origins}
            if key in self.tensors:
                entry["spec"] = self.tensors[key].after.to_json()
            entries[key] = entry
        return entries

    def _origin(self, key: Key, field: str, origin: str) -> str:
        """Return the origin of a field of a spec in the new text.

        Args:
            key: the tensor.
            field: the field of its spec.
            origin: its origin in the old text.
        """
        layer, role = key
        # The most specific place comes first; None stands for all fields of the tensor
        for field_key in (
            (layer, role, field),
            (layer, base_role(role), field),
            (layer, role, None),
        ):
            if field_key not in self._paths:
                continue
            path = self._paths[field_key]
            if path is None:
                return "default"
            return str(self._after.place(*path))
        return self._moved(origin)

    def _moved(self, origin: str) -> str:
        """Return the origin in the new text of a value that did not change."""
        path = self._before.paths_at.get(origin)
        if path is None:
            return origin
        if path[:1] == ("layer_quantize_config",) and len(path) > 1:
            # New entries may come before this one, so it is found by its selector
            selectors = [_selector(entry) for entry in self._after.at(path[0])]
            selector = _selector(self._before.at(*path[:2]))
            if selector not in selectors:
                return origin
            path = (path[0], selectors.index(selector), *path[2:])
        return str(self._after.place(*path) or origin)


def _shared_observers(
    folder: CalibratedFolder, specs: TensorSpecs
) -> dict[tuple[str, QuantizationSpec], list[Key]]:
    """Return the activations that share an observer, by the observed layer and the spec."""
    groups: dict[tuple[str, QuantizationSpec], list[Key]] = {}
    for key in folder.activations:
        # The layer whose output is quantized under this key
        source = str(folder.planned[key].get("source", key[0]))
        group = (source, specs[key])
        groups.setdefault(group, []).append(key)
    return groups


def _require_same_sharing(folder: CalibratedFolder, changed: Mapping[Key, SpecChange]) -> None:
    """Check that the same activations share an observer after a change as before.

    Raises:
        ResultError: naming the activations.
    """
    specs = dict(folder.specs)
    for key, tensor in changed.items():
        specs[key] = tensor.after
    before = _shared_observers(folder, folder.specs).values()
    for (source, _), keys in _shared_observers(folder, specs).items():
        if keys not in before:
            names = [f"{role} of {layer}" for layer, role in sorted(keys)]
            raise ResultError(
                f"the value of {source} would be quantized once instead of twice, "
                f"or twice instead of once: {first_names(names, 3)}",
                help=_AGAIN,
            )


def _changed_config(
    folder: CalibratedFolder, changed: Mapping[Key, SpecChange], *, is_for_all: bool
) -> tuple[JsonObject, Paths]:
    """Return the new config and the place of each changed field in it.

    If all activations change, fields are changed where the old config states them. Otherwise
    each changed layer gets an entry of its own.

    Args:
        folder: the results.
        changed: the changed tensors.
        is_for_all: whether all activations change.
    """
    if is_for_all:
        others: list[tuple[str, Mapping[str, str]]] = []
        for key in folder.quantized:
            if key not in changed:
                others.append((key[1], folder.planned[key]["origins"]))
        config = in_place(folder.document, changed, others)
        if config is not None:
            return config
    layers: dict[str, dict[Role, QuantizationSpec]] = {}
    for key, tensor in changed.items():
        # The layers whose tensors share one scale
        for name in (*folder.planned[key].get("shared_with", ()), key[0]):
            specs = layers.setdefault(name, {})
            if not specs:
                for (layer, role), spec in folder.specs.items():
                    if layer == name:
                        specs[base_role(role)] = spec
            specs[base_role(key[1])] = tensor.after
    return by_layer(folder.document.value, layers, changed)


def _selector(entry: JsonMapping) -> tuple[object, object]:
    """Return the two fields that select the layers of a layer entry."""
    return entry.get("layer_type"), entry.get("layer_name")


def _observer(spec: QuantizationSpec, state: Mapping[str, Tensor]) -> Observer:
    """Return an observer in a stored state."""
    observer = Observer(spec)
    observer.load_state_dict(state)
    return observer


def _entry(entry: JsonMapping, spec: QuantizationSpec, observer: Observer) -> JsonObject:
    """Return an entry of quant_info.json with the scale of an observer."""
    qparams = observer.qparams()
    shape = torch.tensor(entry["scale"]).shape
    scale = qparams.scale.view(shape)
    new = {**entry, "spec": spec.to_json(), "scale": scale.tolist()}
    if "zero_point" in entry:
        new["zero_point"] = qparams.zero_point.view(shape).tolist()
    if "position" in entry:
        new["position"] = scale_positions(scale)
    return new
