"""The step of the pipeline that runs the config's algorithms, one after the other: the only
loop over them.

Each is a function that its settings name.
"""

import importlib
import logging
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from quantizer.algorithms.adjustment import Adjustment, Remark, Rounded, Run, Task, adjusted
from quantizer.calibration import fingerprint
from quantizer.calibration.events import Snapshot
from quantizer.calibration.fits_model import check_adjustment
from quantizer.calibration.job import Job
from quantizer.calibration.observing import check_finite
from quantizer.calibration.snapshots import (
    other_run,
    register,
    shared,
    snapshot_of,
    telling_damage,
    value_of,
)
from quantizer.calibration.target import AlgorithmScope
from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.forms.algorithm_words import written
from quantizer.config.model import Algorithm
from quantizer.config.wording import shortened
from quantizer.errors import ModelError
from quantizer.graph.edits import Insertion
from quantizer.graph.find_structure import find_structure
from quantizer.graph.ir import Graph
from quantizer.graph.structure import Structure
from quantizer.nn.network import Network
from quantizer.numerics.qparams import QParams
from quantizer.observers import NonFiniteError
from quantizer.sources.batches import Batch

KEPT = 1e-3
"""Outputs of an adjusted float network may differ by this share of the largest; more means that
it is another one.
"""


@dataclass(frozen=True)
class Progress:
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


CHECKPOINT = "the checkpoint of algorithms"
register(Progress, Adjustment, Insertion, Rounded, QParams, Remark)


def run_algorithms(job: Job) -> None:
    """All algorithms of the config, in order; resumed, from where a stopped run was.

    Raises:
        ConfigError: an algorithm's entry names what is not in the model.
        ModelError: NaN or infinity in a weight, which would spread to layers before it.
        DataError: a value in the network is not finite, or the data are not the same when they
            are read again.
    """
    algorithms, scope = job.config.algorithms, job.target.scope(job.plan, job.first_batch())
    _check_weights(scope.graph)
    # Before more data are read
    structures = [find_structure(scope.graph, each.names) for each in algorithms]
    progress = _restored(job)
    with telling_damage(CHECKPOINT):
        for found in (progress.found, progress.before):
            check_adjustment(found, scope.graph, scope.specs, CHECKPOINT)
    for algorithm, structure in zip(
        algorithms[progress.index :], structures[progress.index :], strict=True
    ):
        before = progress.before
        progress = _run(job, scope, algorithm, scope.fitting(algorithm, structure), progress)
        for level, line in _summary_lines(algorithm, before, progress.found):
            job.events.message(level, line)
    found = progress.found
    if found.parameters or found.insertions:
        job.events.message(*_difference_line(scope.graph, found, job.first_batch()))
    job.target.adjust(found)
    job.adjustment = (job.adjustment or Adjustment()).followed_by(found)


def _read_again(job: Job) -> Iterator[Batch]:
    return job.read_again("the algorithms", "calibrate with batches that stay the same")


def _restored(job: Job) -> Progress:
    """Where a stopped run was; the data are read once to see that they are the same."""
    snapshot = job.restored("algorithms")
    if snapshot is None:
        return Progress()
    if (data := snapshot.state.get("data")) is not None:
        for _ in _read_again(job):
            pass
        if job.batches.fingerprint != data:
            raise other_run("the data differ")
    start, names = value_of(snapshot, Progress), [each.name for each in job.config.algorithms]
    if not 0 <= start.index <= len(names) or start.done < 0:
        raise other_run("it is not of these algorithms")
    name = [*names, "the last one"][start.index]
    where = f"{start.done} groups of {name}" if start.done else f"{start.index} of {len(names)}"
    job.events.message(logging.INFO, f"the algorithms go on after {where}")
    return start


def _run(
    job: Job, scope: AlgorithmScope, algorithm: Algorithm, structure: Structure, start: Progress
) -> Progress:
    """One algorithm, whose groups are the units of its progress; each block of the network ends
    in a checkpoint.
    """
    progress, groups = start, structure.groups

    def snapshot() -> Snapshot:
        # Of a pass over the data, once one is complete
        return snapshot_of(progress, job.batches.fingerprint)

    def after_group(found: Adjustment, done: int) -> None:
        nonlocal progress
        progress = replace(start, done=done, found=found)
        ends_block = not 0 < done < len(groups) or groups[done - 1].block != groups[done].block
        stage.advance(done, at_boundary=ends_block or groups[done].block is None)

    saved: dict[str, Any] = {
        "saved_as": "algorithms",
        "snapshot": snapshot,
        "needs_same_data": True,
    }
    with job.stage(algorithm.name, len(groups), "groups", done=start.done, **saved) as stage:
        batches = partial(_read_again, job)
        task = Task(
            scope.graph,
            scope.specs,
            structure,
            batches,
            after_group,
            start.done,
            start.before,
            job.ranks,
            job.memory,
        )
        found = _agreed(job, load_run(algorithm.name)(task, algorithm.settings, start.found))
        progress = Progress(start.index + 1, 0, found, found)
        stage.advance(len(groups), at_boundary=True)
    return progress


def _agreed(job: Job, found: Adjustment) -> Adjustment:
    """What rank 0 has found, where machines that compute otherwise have found something
    else.
    """
    if job.ranks.is_alone:
        return found
    job.batches.require_same(job.ranks)
    snapshot = snapshot_of(found)
    tensors = {
        name: fingerprint.tensor_digest(tensor) for name, tensor in snapshot.tensors.items()
    }
    digests = job.ranks.gather(
        fingerprint.digest([tensors, snapshot.state]), "the end of an algorithm"
    )
    if len(set(digests)) == 1:
        return found
    return value_of(shared(snapshot, job.ranks, "what an algorithm has found"), Adjustment)


def load_run(name: str) -> Run:
    """The function of an algorithm, which its settings name; its module is imported now."""
    module, _, function = ALGORITHMS[name].run.partition(":")
    run: Run = getattr(importlib.import_module(module), function)
    return run


def report(algorithms: Sequence[Algorithm], found: Adjustment) -> dict[str, Any]:
    """algorithms.json: what ran, and what it did to each layer; errors as shares of the energy
    of a layer's outputs.
    """
    layers = {
        name: {
            "error_rtn": layer.before,
            "error": layer.after,
            "is_rtn": not layer.after < layer.before,
        }
        for name, layer in found.rounded.items()
    }
    return {
        "algorithms": [written(each.settings) for each in algorithms],
        "rounded": layers,
        "rescaled": {name: sorted(own) for name, own in found.parameters.items()},
        "inserted": [
            {"layer": i.name, "reads": i.source, "readers": list(i.readers)}
            for i in found.insertions
        ],
        "remarks": [{"layer": remark.layer, "text": remark.text} for remark in found.remarks],
    }


def _check_weights(graph: Graph) -> None:
    for node in graph.nodes:
        if node.row.is_linear_or_convolution and "weight" in node.params:
            try:
                check_finite(graph.tensors[node.params["weight"]])
            except NonFiniteError as error:
                raise ModelError(
                    f"weights of {node.name}: {error}", help="check the checkpoint"
                ) from error


def _summary_lines(
    algorithm: Algorithm, before: Adjustment, after: Adjustment
) -> Iterator[tuple[int, str]]:
    """What an algorithm did, and what it remarked, each text once: lines with their logging
    levels.
    """
    yield (
        logging.INFO,
        f"{algorithm.name}: "
        f"{'; '.join(_done(algorithm, before, after)) or 'nothing to quantize'}",
    )
    texts: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for remark in after.remarks[len(before.remarks) :]:
        texts[remark.text, remark.is_warning].append(remark.layer)
    for (text, is_warning), layers in texts.items():
        yield logging.WARNING if is_warning else logging.INFO, f"{shortened(layers, 1)}: {text}"


def _done(algorithm: Algorithm, before: Adjustment, after: Adjustment) -> Iterator[str]:
    """What an algorithm did, in parts of a sentence."""
    if algorithm.stage == "rescale":
        changed = [
            name
            for name, own in after.parameters.items()
            if before.parameters.get(name) is not own
        ]
        inserted = len(after.insertions) - len(before.insertions)
        yield f"{_layers(len(changed))} rescaled, {_layers(inserted)} inserted"
    rounded = [
        layer for name, layer in after.rounded.items() if before.rounded.get(name) is not layer
    ]
    if rounded:
        better = [layer.after / layer.before for layer in rounded if layer.after < layer.before]
        left = (
            f"; median output error {statistics.median(better):.0%} of round-to-nearest"
            if better
            else ""
        )
        plain = len(rounded) - len(better)
        kept = (
            f"; {plain} {'keeps' if plain == 1 else 'keep'} round-to-nearest" if plain else ""
        )
        yield f"{_layers(len(rounded))} quantized{left}{kept}"


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _difference_line(graph: Graph, found: Adjustment, batch: Batch) -> tuple[int, str]:
    """How far the outputs of the adjusted float network are from the model's, with a logging
    level.
    """
    with torch.no_grad():
        want = Network(graph).start(batch.args, batch.kwargs).advance().float_outputs()
        have = (
            Network(adjusted(graph, found))
            .start(batch.args, batch.kwargs)
            .advance()
            .float_outputs()
        )
    pairs = [(x, y) for x, y in zip(want, have, strict=True) if x.numel()]
    shares = [
        (x - y).abs().max() / x.abs().max().clamp_min(torch.finfo(x.dtype).tiny)
        for x, y in pairs
    ]
    share = max([0.0, *map(float, shares)])
    text = f"the rescaled float network's outputs differ by {share:.1e} of the largest"
    if share <= KEPT:
        return logging.INFO, text
    why = (
        "its numbers have too few digits for these factors, so compare test mode's metrics "
        "with those of float mode"
    )
    return logging.WARNING, f"{text}: {why}"
