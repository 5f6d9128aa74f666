"""A result folder as it lies there, without the model: what it says of activations, and how it
gets other scales.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration import fingerprint
from quantizer.calibration.joins import decide_joins_again
from quantizer.config.document.document import Document, Text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.model import Config, QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.errors import ResultError
from quantizer.nn.load import WEIGHTS_FILE
from quantizer.plan.model import Key
from quantizer.results.folder import PLAN, RESOLVED, STATISTICS, read_info, stored_joins
from quantizer.results.write import joins_entry, replaced_results, write_info
from quantizer.storage.files import read_json, write_bytes, write_json, write_tensors
from quantizer.storage.tensor_shards import deferred_shards, shard_files, write_shards

Json = dict[str, Any]


class CalibratedFolder:
    """A result folder, and what it says of activations whose scales are found on data.

    Raises:
        ResultError: it is incomplete, damaged, or something in it depends on the scales of
            activations.
    """

    def __init__(self, place: Path) -> None:
        self.opened = read_info(place)
        self.plan, self.header = self.opened.plan, self.opened.header
        self.joins = stored_joins(self.header)
        self.entries: dict[str, dict[str, Json]] = {}
        for entries in (
            self.opened.entries,
            *(join["left"] for join in self.header["joins"].values()),
        ):
            for layer, roles in entries.items():
                self.entries.setdefault(layer, {}).update(roles)
        for why in self._dependent():
            raise ResultError(
                f"{place} cannot be retuned: {why}",
                help="calibrate again with the other config",
            )
        self.specs = {
            (layer, role): QuantizationSpec(**entry["spec"])
            for layer, roles in self.entries.items()
            for role, entry in roles.items()
        }
        self.planned: dict[Key, Json] = {
            (row["name"], role): tensor
            for row in self.plan["layers"]
            for role, tensor in {
                **row.get("tensors", {}),
                **row.get("left_by_joins", {}),
            }.items()
        }

    @property
    def activations(self) -> list[Key]:
        """Those with a scale that was found on data, in the order of execution."""
        return [
            key
            for key in self.quantized
            if self.specs[key].is_scaled and not self.specs[key].is_dynamic
        ]

    @property
    def quantized(self) -> list[Key]:
        """All quantized activations."""
        return [key for key in self.planned if key in self.specs and not is_parameter(key[1])]

    @property
    def document(self) -> Document:
        """The config that it was calibrated with, as far as there is a file; else as it took
        effect.
        """
        if file := self.plan.get("config"):
            return parse_document(Text(file["name"], file["text"]))
        said = (
            place
            for tensor in self.planned.values()
            for place in tensor["origins"].values()
            if place != "default"
        )
        name = re.match(r"\w+", next(said, "config"))
        return Document.of(
            read_json(self.opened.files[RESOLVED]), name[0] if name else "config"
        )

    def source(self, key: Key) -> str:
        """The layer whose value is quantized."""
        return str(self.planned[key].get("source", key[0]))

    def members(self, key: Key) -> list[str]:
        """The layers that share the quantization of a tensor, its own last."""
        return [*self.planned[key].get("shared_with", ()), key[0]]

    def _dependent(self) -> Iterator[str]:
        if self.header["settings"]["target_device"] == "DPU":
            yield "scales for the DPU are aligned with each other, layer by layer"
        if self.header["settings"]["include_bias_corr"]:
            yield (
                "bias correction needs the outputs of the quantized network, whose scales "
                "change"
            )
        if self.header.get("fast_finetune"):
            yield (
                "fast finetuning needs the values that layers read, and statistics do not "
                "hold them"
            )
        if not self.header["batches"]:
            yield "it was quantized without data, so there is nothing to retune"

    def statistics(self) -> dict[tuple[str, str], dict[str, Tensor]]:
        """What calibration has kept, by layer and role."""
        found: dict[tuple[str, str], dict[str, Tensor]] = {}
        for key, tensor in self.opened.statistics().items():
            layer, role, name = key.rsplit("|", 2)
            found.setdefault((layer, role), {})[name] = tensor
        return found

    def write(
        self,
        place: Path,
        entries: Mapping[Key, Json],
        planned: Mapping[Key, Json],
        statistics: Mapping[tuple[str, str], Mapping[str, Tensor]],
        config: Config,
    ) -> None:
        """Write the same calibration with other entries of quant_info.json and plan.json for
        single tensors; what is there stays until all is written.
        """
        header = {**self.header, "files": dict(self.header["files"])}
        tensors: dict[str, Tensor] = dict(deferred_shards(WEIGHTS_FILE, self.opened.files))
        info: dict[str, dict[str, Json]] = {
            layer: dict(roles) for layer, roles in self.entries.items()
        }
        for (layer, role), entry in entries.items():
            info[layer][role] = entry
            for part in ("scale", "zero_point"):
                name = f"{entry['module']}.quantizers.{role}.{part}"
                if name in tensors and part in entry:
                    tensors[name] = torch.tensor(entry[part], dtype=tensors[name].dtype)
        flat = {
            f"{layer}|{role}|{name}": each
            for (layer, role), own in statistics.items()
            for name, each in own.items()
        }
        specs = {
            (layer, role): QuantizationSpec(**each["spec"])
            for layer, own in info.items()
            for role, each in own.items()
        }
        header["config"] = fingerprint.settings_digest(header["settings"], specs)
        header["joins"], left = self._joins(info)
        info = {
            layer: {role: entry for role, entry in roles.items() if (layer, role) not in left}
            for layer, roles in info.items()
        }
        for row in self.plan["layers"]:
            _replan(row, planned, left)
        # Whom they reach, the model says
        plan = {name: value for name, value in self.plan.items() if name != "rules"}
        plan["config"] = {"name": Path(config.source).name, "text": config.text}
        with replaced_results(place) as new:
            written = {
                **write_shards(new / WEIGHTS_FILE, tensors),
                STATISTICS: write_tensors(new / STATISTICS, flat),
            }
            old_weights = shard_files(WEIGHTS_FILE, header["files"])
            others = header["files"].keys() - {*old_weights, *written}
            for name in others:
                write_bytes(new / name, self.opened.files[name].parts())
            header["files"] = {name: header["files"][name] for name in others} | written
            write_json(new / PLAN, plan)
            write_json(new / RESOLVED, resolved_document(config))
            write_info(new, header, {layer: roles for layer, roles in info.items() if roles})

    def _joins(
        self, entries: Mapping[str, Mapping[str, Json]]
    ) -> tuple[dict[str, Json], set[Key]]:
        """What quant_info.json says of joins with these entries, and the tensors that they do
        without.
        """
        widths: dict[Key, float] = {}
        for layer, roles in entries.items():
            for role, entry in roles.items():
                if not is_parameter(role) and _is_ranged(entry):
                    scales = torch.tensor(entry["scale"])
                    widths[layer, role] = (
                        float(scales.max()) * 2.0 ** entry["spec"]["bit_width"]
                    )
        rows: dict[str, Json] = {}
        without: set[Key] = set()
        for name, decision in decide_joins_again(self.joins, widths).items():
            left: dict[str, dict[str, Json]] = {}
            for layer, role in decision.left:
                left.setdefault(layer, {})[role] = dict(entries[layer][role])
            rows[name] = joins_entry(decision, left)
            without.update(decision.left)
        return rows, without


def _is_ranged(entry: Json) -> bool:
    """Whether a tensor of quant_info.json has a range of integers, and is not all zero."""
    ends = [entry.get("observed_min", 0), entry.get("observed_max", 0)]
    return (
        entry["spec"]["dtype"] == "int" and "scale" in entry and bool(torch.tensor(ends).any())
    )


def _replan(row: Json, planned: Mapping[Key, Json], left: Container[Key]) -> None:
    """Put the tensors of a row of plan.json where they belong now: quantized, or left by
    joins.
    """
    known = {**row.pop("tensors", {}), **row.pop("left_by_joins", {})}
    for role, tensor in known.items():
        key = (row["name"], role)
        kind = "left_by_joins" if key in left else "tensors"
        row.setdefault(kind, {})[role] = planned.get(key, tensor)
        if role == "activation" and kind == "tensors":
            row.pop("activation_is_float", None)
