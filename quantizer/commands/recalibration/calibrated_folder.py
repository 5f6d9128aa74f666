"""Give the activations of a result folder other scales, without the model and without data."""

import re
from collections.abc import Container, Mapping
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from quantizer.calibration import fingerprint
from quantizer.calibration.joins import decide_joins_again
from quantizer.config.document.document import Document, Text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import QuantizationSpec, ResolvedConfig
from quantizer.config.roles import is_parameter
from quantizer.errors import ResultError
from quantizer.nn.load import WEIGHTS_FILE
from quantizer.plan.model import Key
from quantizer.results.folder import (
    PLAN_FILE,
    RESOLVED_CONFIG_FILE,
    STATISTICS_FILE,
    read_info,
    stored_joins,
    why_statistics_insufficient,
)
from quantizer.results.write import config_file, joins_entry, replace_results, write_info
from quantizer.storage.files import (
    deferred_shards,
    read_json,
    tensor_files_and_index,
    write_bytes,
    write_json,
    write_shards,
    write_tensors,
)

ObserverStates = dict[Key, dict[str, Tensor]]
_Entries = dict[str, dict[str, JsonObject]]
"""Entries of quant_info.json, by layer and role."""


class CalibratedFolder:
    """A result folder whose scales of activations can be computed from its statistics.

    Attributes:
        opened: its open files.
        header: of quant_info.json.
        plan: the content of plan.json.
        entries: the tensors of quant_info.json, by layer and role. Those that joins leave
            unquantized are included.
        specs: the spec of each of these tensors.
        planned: the tensors of plan.json, by layer and role in the order of execution.

    Raises:
        ResultError: the folder is incomplete or damaged, or its results depend on more than
            statistics.
    """

    def __init__(self, place: Path) -> None:
        self.opened = read_info(place)
        self.header = self.opened.header
        self.plan = self.opened.plan
        reasons = [*why_statistics_insufficient(self.header, "retune")]
        if self.header["settings"]["target_device"] == "DPU":
            why = "scales for the DPU are aligned with each other, layer by layer"
            reasons.insert(0, (why, ""))
        for why, key in reasons:
            remedy = "calibrate again with the other config"
            if key:
                name = self.plan.get("config", {}).get("name", "the config")
                remedy += f'; what is calibrated with "{key}": false in {name} can be retuned'
            raise ResultError(f"{place} cannot be retuned: {why}", help=remedy)
        self.entries: _Entries = {}
        left = [join["left"] for join in self.header["joins"].values()]
        for entries in (self.opened.entries, *left):
            for layer, roles in entries.items():
                self.entries.setdefault(layer, {}).update(roles)
        self.specs = _specs(self.entries)
        self.planned: dict[Key, JsonObject] = {}
        for row in self.plan["layers"]:
            for role, tensor in _observed_tensors(row).items():
                self.planned[row["name"], role] = tensor

    @property
    def activations(self) -> list[Key]:
        """Return the activations whose scale was computed from data, in the order of
        execution.
        """
        specs = self.specs
        return [
            key for key in self.quantized if specs[key].is_scaled and not specs[key].is_dynamic
        ]

    @property
    def quantized(self) -> list[Key]:
        """Return all quantized activations, in the order of execution."""
        return [key for key in self.planned if key in self.specs and not is_parameter(key[1])]

    @cached_property
    def document(self) -> Document:
        """Return the user's config file, or the resolved config if there was no file."""
        file = self.plan.get("config")
        if file:
            return parse_document(Text(file["name"], file["text"]))
        resolved = read_json(self.opened.files[RESOLVED_CONFIG_FILE])
        origins = [tensor["origins"].values() for tensor in self.planned.values()]
        stated = (origin for origin in chain(*origins) if origin != "default")
        # Such as "config" of "config:12:5"
        name = re.match(r"\w+", next(stated, ""))
        return Document.of(resolved, name[0] if name else "config")

    def statistics(self) -> ObserverStates:
        """Return the states of the observers of the calibration, by layer and role."""
        states: ObserverStates = {}
        for key, tensor in self.opened.statistics().items():
            layer, role, name = key.rsplit("|", 2)
            states.setdefault((layer, role), {})[name] = tensor
        return states

    def write(
        self,
        place: Path,
        config: ResolvedConfig,
        *,
        entries: Mapping[Key, JsonObject],
        planned: Mapping[Key, JsonObject],
        statistics: ObserverStates,
    ) -> None:
        """Write the results of this calibration with other scales. The old results stay until
        all files are written.

        Args:
            place: the folder to write.
            config: the config with the change.
            entries: the changed entries of quant_info.json.
            planned: the changed entries of plan.json.
            statistics: the states of all observers.

        Raises:
            ResultError: the folder cannot be written.
        """
        info: _Entries = {layer: dict(roles) for layer, roles in self.entries.items()}
        for (layer, role), entry in entries.items():
            info[layer][role] = entry
        header = dict(self.header)
        specs = _specs(info)
        header["config"] = fingerprint.settings_digest(header["settings"], specs)
        header["joins"], left = self._decide_joins(info)
        for layer, role in left:
            del info[layer][role]
            if not info[layer]:
                del info[layer]
        # Which layers the rules of the new config match cannot be found without the model
        plan = {name: value for name, value in self.plan.items() if name != "rules"}
        plan["config"] = config_file(config)
        plan["layers"] = [_replanned(row, planned, left) for row in plan["layers"]]
        with replace_results(place) as new:
            header["files"] = self._write_files(new, entries, statistics)
            write_json(new / PLAN_FILE, plan)
            write_json(new / RESOLVED_CONFIG_FILE, resolved_document(config))
            write_info(new, header, info)

    def _write_files(
        self, new: Path, entries: Mapping[Key, JsonObject], statistics: ObserverStates
    ) -> dict[str, str]:
        """Write weights with new scales and statistics, copy the other files, and return the
        sha256 of each.
        """
        tensors: dict[str, Tensor] = {**deferred_shards(WEIGHTS_FILE, self.opened.files)}
        for (_, role), entry in entries.items():
            for part in ("scale", "zero_point"):
                name = f"{entry['module']}.quantizers.{role}.{part}"
                if name in tensors and part in entry:
                    dtype = tensors[name].dtype
                    tensors[name] = torch.tensor(entry[part], dtype=dtype)
        files = write_shards(new / WEIGHTS_FILE, tensors)
        flat: dict[str, Tensor] = {}
        for (layer, role), state in statistics.items():
            for name, tensor in state.items():
                flat[f"{layer}|{role}|{name}"] = tensor
        files[STATISTICS_FILE] = write_tensors(new / STATISTICS_FILE, flat)
        old_files = self.header["files"]
        replaced = {*files, *tensor_files_and_index(WEIGHTS_FILE, old_files)}
        for name in old_files.keys() - replaced:
            write_bytes(new / name, self.opened.files[name].parts())
            files[name] = old_files[name]
        return files

    def _decide_joins(self, entries: _Entries) -> tuple[dict[str, JsonObject], set[Key]]:
        """Decide again how joins are quantized, as this depends on the scales.

        Returns:
            The entries of joins in the header, and all tensors that joins leave unquantized.
        """
        # The width of the range that all codes of an activation cover
        widths: dict[Key, float] = {}
        for layer, roles in entries.items():
            for role, entry in roles.items():
                spec = entry["spec"]
                if is_parameter(role) or spec["dtype"] != "int" or "scale" not in entry:
                    continue
                ends = [entry.get("observed_min", 0), entry.get("observed_max", 0)]
                if torch.tensor(ends).any():
                    scale = torch.tensor(entry["scale"]).max()
                    widths[layer, role] = float(scale) * 2.0 ** spec["bit_width"]
        joins: dict[str, JsonObject] = {}
        all_left: set[Key] = set()
        decisions = decide_joins_again(stored_joins(self.header), widths)
        for name, decision in decisions.items():
            left: _Entries = {}
            for layer, role in decision.left:
                left.setdefault(layer, {})[role] = entries[layer][role]
            joins[name] = joins_entry(decision, left)
            all_left.update(decision.left)
        return joins, all_left


def _specs(entries: _Entries) -> dict[Key, QuantizationSpec]:
    specs = {}
    for layer, roles in entries.items():
        for role, entry in roles.items():
            specs[layer, role] = QuantizationSpec(**entry["spec"])
    return specs


def _observed_tensors(row: JsonMapping) -> JsonObject:
    """Return the tensors of a layer in plan.json by role. Those that joins leave unquantized
    are included.
    """
    return {**row.get("tensors", {}), **row.get("left_by_joins", {})}


def _replanned(
    row: JsonMapping, planned: Mapping[Key, JsonObject], left: Container[Key]
) -> JsonObject:
    """Return a layer of plan.json with changed tensors.

    Args:
        row: the layer.
        planned: the changed tensors.
        left: the tensors that joins leave unquantized now. plan.json lists them apart.
    """
    new: JsonObject = dict(row)
    new.pop("tensors", None)
    new.pop("left_by_joins", None)
    for role, tensor in _observed_tensors(row).items():
        key = (row["name"], role)
        kind = "left_by_joins" if key in left else "tensors"
        new.setdefault(kind, {})[role] = planned.get(key, tensor)
        if role == "activation" and kind == "tensors":
            new.pop("activation_is_float", None)
    return new
