"""What algorithms have found so far as tensors and JSON, and back: for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment, Remark, Rounded
from quantizer.engine.events import Snapshot
from quantizer.engine.insertions import described, insertion
from quantizer.numerics.qparams import QParams


@dataclass(frozen=True)
class AlgorithmProgress:
    """How far the algorithms of a config are.

    Args:
        index: of the algorithm that runs, or is next.
        done: how many of its groups are in `found`.
        found: by all so far.
        before: what that algorithm was given when it began.
    """

    index: int = 0
    done: int = 0
    found: Adjustment = field(default_factory=Adjustment)
    before: Adjustment = field(default_factory=Adjustment)


def snapshot_of(progress: AlgorithmProgress, data: Mapping[str, Any] | None) -> Snapshot:
    """All of it; `data` is the fingerprint of the calibration data, once a pass over them is complete."""
    parts = {"found": progress.found, "before": progress.before}
    tensors = {f"{part}|{name}": tensor for part, each in parts.items() for name, tensor in _tensors(each)}
    described_parts = {part: _described(each) for part, each in parts.items()}
    return Snapshot(tensors, {"index": progress.index, "done": progress.done, "data": data, **described_parts})


def progress_of(snapshot: Snapshot) -> AlgorithmProgress:
    """The inverse of `snapshot_of`."""
    found, before = (_adjustment(snapshot, part) for part in ("found", "before"))
    return AlgorithmProgress(snapshot.state["index"], snapshot.state["done"], found, before)


def _described(found: Adjustment) -> dict[str, Any]:
    """All but the tensors."""
    return {
        "errors": {name: [row.before, row.after] for name, row in found.rounded.items()},
        "insertions": [described(row) for row in found.insertions],
        "remarks": [asdict(remark) for remark in found.remarks],
    }


def _tensors(found: Adjustment) -> Iterator[tuple[str, Tensor]]:
    """Each tensor by `<what>|<layer>|<part>`."""
    for layer, own in found.parameters.items():
        yield from ((f"parameters|{layer}|{key}", tensor) for key, tensor in own.items())
    for row in found.insertions:
        yield f"insertions|{row.name}|weight", row.weight
    for layer, rounded in found.rounded.items():
        yield f"rounded|{layer}|weight", rounded.weight
        yield f"rounded|{layer}|scale", rounded.qparams.scale
        yield f"rounded|{layer}|zero_point", rounded.qparams.zero_point
    for layer, qparams in found.qparams.items():
        yield f"qparams|{layer}|scale", qparams.scale
        yield f"qparams|{layer}|zero_point", qparams.zero_point


def _adjustment(snapshot: Snapshot, part: str) -> Adjustment:
    info = snapshot.state[part]
    tensors: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, tensor in snapshot.tensors.items():
        owner, what, layer, key = name.split("|")
        if owner == part:
            tensors.setdefault(what, {}).setdefault(layer, {})[key] = tensor
    weights = {name: own["weight"] for name, own in tensors.get("insertions", {}).items()}
    rounded = {
        name: Rounded(own["weight"], QParams(own["scale"], own["zero_point"]), *info["errors"][name])
        for name, own in tensors.get("rounded", {}).items()
    }
    insertions = tuple(insertion(row, weights[row["name"]]) for row in info["insertions"])
    qparams = {name: QParams(own["scale"], own["zero_point"]) for name, own in tensors.get("qparams", {}).items()}
    remarks = tuple(Remark(**remark) for remark in info["remarks"])
    return Adjustment(tensors.get("parameters", {}), insertions, rounded, qparams, remarks)
