"""The checkpoint of unfinished algorithms: what they have found so far, and what it belongs to.

Each save writes only the tensors that are new; the JSON, written last, lists the files that count.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment, Key, Remark, Rounded
from quantizer.config.model import QuantizationSpec
from quantizer.engine import fingerprint
from quantizer.engine.checkpoint import AGAIN, EVERY_S
from quantizer.engine.insertions import described, insertion
from quantizer.engine.result_files import read_json, read_tensors, write_json, write_tensors
from quantizer.engine.run_algorithms import Start, Step, settings_json
from quantizer.errors import ResultError
from quantizer.graph.ir import Graph
from quantizer.numerics.qparams import QParams

INFO = "checkpoint.algorithms.json"
_FIELDS = {"key", "index", "done", "files", "found", "before"}


class AdjustCheckpoint:
    """checkpoint.algorithms.json and numbered .safetensors files of one folder.

    `specs` are the plan's; `data` tells the fingerprint of the calibration data, once a pass over them is complete.
    """

    def __init__(
        self,
        folder: Path,
        graph: Graph,
        todo: Sequence[Step],
        specs: Mapping[Key, QuantizationSpec],
        run: Mapping[str, Any],
        data: Callable[[], Mapping[str, Any] | None],
    ) -> None:
        self._folder, self._todo, self._data = folder, todo, data
        self._key: dict[str, Any] = {
            "weights": fingerprint.combined(fingerprint.weights(graph)),
            "layers": fingerprint.combined(fingerprint.layers(graph)),
            "algorithms": fingerprint.values([settings_json(step.settings) for step in todo]),
            "specs": fingerprint.values([[*key, spec.to_json()] for key, spec in sorted(specs.items())]),
            **run,
        }
        self._stored: dict[str, Tensor] = {}  # as they were when they were written: a changed value is another object
        self._places: dict[str, tuple[int, str]] = {}  # file and device
        self._files: list[str] = []
        self._state, self._news = Start(), False
        self._before = self._described(Adjustment())
        self._saved = time.monotonic()

    def group_done(self, index: int, found: Adjustment, done: int) -> None:
        """Note what is found so far; save at the end of a block, or when much time has gone by."""
        self._note(Start(index, done, found, self._state.before))
        groups = self._todo[index].structure.groups
        ends_block = not 0 < done < len(groups) or groups[done - 1].block != groups[done].block
        if ends_block or groups[done].block is None or time.monotonic() - self._saved >= EVERY_S:
            self.save()

    def step_done(self, index: int, found: Adjustment) -> None:
        """Save what all algorithms before this one have found."""
        self._note(Start(index, 0, found, found))
        self._write_new(found)
        self._before = self._described(found)
        self.save()

    def exists(self) -> bool:
        """Whether there is anything to restore."""
        return (self._folder / INFO).exists()

    def has_news(self) -> bool:
        """Whether something was found since the start."""
        return self._news

    def words(self, start: Start) -> str:
        """`3 of 8 groups of gptq`."""
        if start.index == len(self._todo):
            return f"all of {self._todo[-1].name}"
        step = self._todo[start.index]
        return f"{start.done} of {len(step.structure.groups)} groups of {step.name}"

    def _note(self, state: Start) -> None:
        self._state, self._news = state, True

    def save(self) -> Start:
        """Save now; returns what."""
        self._write_new(self._state.found)
        content = {
            "key": {**self._key, "data": self._data()},
            "index": self._state.index,
            "done": self._state.done,
            "files": self._files,
            "found": self._described(self._state.found),
            "before": self._before,
        }
        write_json(self._folder / INFO, content)
        self._saved = time.monotonic()
        return self._state

    def _write_new(self, found: Adjustment) -> None:
        new = {name: tensor for name, tensor in _tensors(found) if self._stored.get(name) is not tensor}
        if new:
            number = len(self._files)
            self._files.append(write_tensors(self._path(number), new))
            self._stored |= new
            self._places |= {name: (number, str(tensor.device)) for name, tensor in new.items()}

    def _described(self, found: Adjustment) -> dict[str, Any]:
        """All of it but the tensors, and where those were written."""
        return {
            "tensors": {name: self._places[name] for name, _ in _tensors(found)},
            "errors": {name: [row.before, row.after] for name, row in found.rounded.items()},
            "insertions": [described(row) for row in found.insertions],
            "remarks": [asdict(remark) for remark in found.remarks],
        }

    def restore(self) -> Start:
        """What an interrupted run had found; nothing if there is no checkpoint.

        Raises:
            ResultError: it is damaged, or belongs to another run.
        """
        path = self._folder / INFO
        if not self.exists():
            return Start()
        info = read_json(path)
        if not isinstance(info, dict) or not set(info) >= _FIELDS:
            raise ResultError(f"{path} is damaged", help=AGAIN)
        read = {} if info["key"].get("data") is None else {"data": self._data()}
        for name, value in {**self._key, **read}.items():
            if info["key"].get(name) != value:
                raise ResultError(f"the algorithms' checkpoint belongs to another run: {name} differs", help=AGAIN)
        parts = [self._read(number, digest) for number, digest in enumerate(info["files"])]
        self._files = list(info["files"])
        self._places = {name: (number, device) for name, (number, device) in info["found"]["tensors"].items()}
        self._stored = {name: parts[number][name].to(device) for name, (number, device) in self._places.items()}
        self._before, found = info["before"], _adjustment(self._stored, info["found"])
        before = {name: parts[number][name].to(device) for name, (number, device) in self._before["tensors"].items()}
        self._state = Start(info["index"], info["done"], found, _adjustment(before, self._before))
        return self._state

    def _read(self, number: int, digest: str) -> dict[str, Tensor]:
        path = self._path(number)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise ResultError(f"{path} is damaged", help=AGAIN)
        return read_tensors(path)

    def _path(self, number: int) -> Path:
        return self._folder / f"checkpoint.algorithms.{number:04}.safetensors"


def _tensors(found: Adjustment) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by `<what>|<layer>|<part>`."""
    for layer, own in found.parameters.items():
        yield from ((f"parameters|{layer}|{key}", tensor) for key, tensor in own.items())
    for row in found.insertions:
        yield f"insertions|{row.name}|weight", row.weight
    for layer, settled in found.rounded.items():
        yield f"rounded|{layer}|weight", settled.weight
        yield f"rounded|{layer}|scale", settled.qparams.scale
        yield f"rounded|{layer}|zero_point", settled.qparams.zero_point
    for layer, grid in found.grids.items():
        yield f"grids|{layer}|scale", grid.scale
        yield f"grids|{layer}|zero_point", grid.zero_point


def _adjustment(tensors: Mapping[str, Tensor], info: Mapping[str, Any]) -> Adjustment:
    """The inverse of `_tensors`, with what the JSON has besides."""
    parts: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        what, layer, part = name.split("|")
        parts.setdefault(what, {}).setdefault(layer, {})[part] = tensor
    weights = {name: own["weight"] for name, own in parts.get("insertions", {}).items()}
    rounded = {
        name: Rounded(own["weight"], QParams(own["scale"], own["zero_point"]), *info["errors"][name])
        for name, own in parts.get("rounded", {}).items()
    }
    insertions = tuple(insertion(row, weights[row["name"]]) for row in info["insertions"])
    grids = {name: QParams(own["scale"], own["zero_point"]) for name, own in parts.get("grids", {}).items()}
    remarks = tuple(Remark(**remark) for remark in info["remarks"])
    return Adjustment(parts.get("parameters", {}), insertions, rounded, grids, remarks)
