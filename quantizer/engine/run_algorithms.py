"""Runs the algorithms of a config over a graph, one after the other. Each is a function that its row names."""

from __future__ import annotations

import importlib
import json
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.algorithms.adjustment import Adjustment, Run, adjusted
from quantizer.config.algorithms import Algorithm
from quantizer.config.wording import shortened
from quantizer.engine.calibrate import check_finite
from quantizer.errors import ModelError, UsageError
from quantizer.graph.find_structure import find_structure
from quantizer.graph.ir import Graph
from quantizer.graph.structure import Structure
from quantizer.nn.network import Network
from quantizer.observers import NonFiniteError
from quantizer.sources.batches import Batch

RUNS: dict[str, str] = {
    "smoothquant": "quantizer.algorithms.smoothquant:smoothquant",
    "rotation": "quantizer.algorithms.rotation:rotation",
    "awq": "quantizer.algorithms.awq:awq",
    "gptq": "quantizer.algorithms.gptq:gptq",
    "gptaq": "quantizer.algorithms.gptaq:gptaq",
    "qronos": "quantizer.algorithms.qronos:qronos",
}
"""The `Run` of each algorithm, by its name in `config.algorithms`; imported when it is asked for."""
KEPT = 1e-3
"""Outputs of an adjusted float network may differ by this share of the largest; more means that it is another one."""


@dataclass(frozen=True)
class Step:
    """One algorithm of a config, ready to run: `run(Task(…, structure, …), settings, found)`."""

    settings: Algorithm
    structure: Structure
    run: Run

    @property
    def name(self) -> str:
        """As in the config."""
        return self.settings.name


@dataclass(frozen=True)
class Start:
    """Where to begin: with the algorithm of this index, `done` groups of which are in `found`, and not in `before`."""

    index: int = 0
    done: int = 0
    found: Adjustment = field(default_factory=Adjustment)
    before: Adjustment = field(default_factory=Adjustment)


def settings_json(settings: Algorithm) -> dict[str, Any]:
    """An algorithm's name and settings, without the places that the file has them at."""
    fields = asdict(settings)
    names = {key: value for key, value in fields.pop("names").items() if key != "places" and value is not None}
    if scaling := names.get("scaling"):
        names["scaling"] = [{key: value for key, value in entry.items() if key != "place"} for entry in scaling]
    kept = {key: value for key, value in fields.items() if key not in ("label", "place")}
    said: dict[str, Any] = {"name": settings.name, **kept} | ({"names": names} if names else {})
    read_back: dict[str, Any] = json.loads(json.dumps(said))
    return read_back


def report(todo: Sequence[Step], found: Adjustment) -> dict[str, Any]:
    """algorithms.json: what ran, and what it did to each layer; errors as shares of the energy of a layer's outputs."""
    layers = {
        name: {"error_plain": layer.before, "error": layer.after, "plain": not layer.after < layer.before}
        for name, layer in found.rounded.items()
    }
    inserted = [{"layer": row.name, "reads": row.source, "readers": list(row.readers)} for row in found.insertions]
    return {
        "algorithms": [settings_json(step.settings) for step in todo],
        "rounded": layers,
        "rescaled": {name: sorted(own) for name, own in found.parameters.items()},
        "inserted": inserted,
        "remarks": [{"layer": remark.layer, "text": remark.text} for remark in found.remarks],
    }


def load_run(name: str) -> Run:
    """The function of an algorithm.

    Raises:
        UsageError: there is none.
    """
    if name not in RUNS:
        raise UsageError(f"the algorithm {name} cannot run in this version", help=f"it has {', '.join(RUNS)}")
    module, _, function = RUNS[name].partition(":")
    run: Run = getattr(importlib.import_module(module), function)
    return run


def steps(graph: Graph, algorithms: Sequence[Algorithm]) -> tuple[Step, ...]:
    """What each algorithm works on, found before any data is read.

    Raises:
        ConfigError: an algorithm's entry names what is not in the graph.
        ModelError: NaN or infinity in a weight, which would spread to layers before it.
        UsageError: an algorithm that is not there.
    """
    _check_weights(graph)
    runs = [load_run(settings.name) for settings in algorithms]
    return tuple(
        Step(settings, find_structure(graph, settings.names), run)
        for settings, run in zip(algorithms, runs, strict=True)
    )


def _check_weights(graph: Graph) -> None:
    for node in graph.nodes:
        if node.row.is_linear_or_convolution and "weight" in node.params:
            try:
                check_finite(graph.tensors[node.params["weight"]])
            except NonFiniteError as error:
                raise ModelError(f"weights of {node.name}: {error}", help="check the checkpoint") from error


def difference(graph: Graph, found: Adjustment, batch: Batch) -> float:
    """How far the outputs of the adjusted float network are from the model's, as a share of the largest; 0 if equal."""
    with torch.no_grad():
        want = pytree.tree_leaves(Network(graph)(*batch.args, **batch.kwargs))
        have = pytree.tree_leaves(Network(adjusted(graph, found))(*batch.args, **batch.kwargs))
    shares = [0.0]
    for x, y in zip(want, have, strict=True):
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel():
            shares.append(float((x - y).abs().max() / x.abs().max().clamp_min(torch.finfo(x.dtype).tiny)))
    return max(shares)


def summary(step: Step, before: Adjustment, after: Adjustment) -> str:
    """One line on what an algorithm did."""
    parts = []
    rounded = {name: layer for name, layer in after.rounded.items() if before.rounded.get(name) is not layer}
    changed = [name for name, own in after.parameters.items() if before.parameters.get(name) is not own]
    inserted = len(after.insertions) - len(before.insertions)
    if step.settings.stage == "rescale":
        parts.append(f"{_layers(len(changed))} rescaled, {_layers(inserted)} inserted")
    if rounded:
        better = [layer.after / layer.before for layer in rounded.values() if layer.after < layer.before]
        left = f", the median layer keeps {statistics.median(better):.0%} of plain rounding's error" if better else ""
        plain = len(rounded) - len(better)
        kept = f", {plain} {'keeps' if plain == 1 else 'keep'} plain rounding" if plain else ""
        parts.append(f"{_layers(len(rounded))} settled{left}{kept}")
    return f"{step.name}: {'; '.join(parts) or 'nothing to settle'}"


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def told(step: Step, before: Adjustment, after: Adjustment) -> Iterator[tuple[int, str]]:
    """What an algorithm did, and what it remarked, each text once: lines with their logging levels."""
    yield logging.INFO, summary(step, before, after)
    texts: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for remark in after.remarks[len(before.remarks) :]:
        texts[remark.text, remark.is_warning].append(remark.layer)
    for (text, is_warning), layers in texts.items():
        yield logging.WARNING if is_warning else logging.INFO, f"{shortened(layers, 1)}: {text}"


def told_difference(share: float) -> Iterator[tuple[int, str]]:
    """How well the float function was kept, as `difference` found."""
    text = f"the rescaled float network's outputs differ by {share:.1e} of the largest"
    if share <= KEPT:
        yield logging.INFO, text
        return
    why = "its numbers have too few digits for these factors, so compare test mode's metrics with those of float mode"
    yield logging.WARNING, f"{text}: {why}"
