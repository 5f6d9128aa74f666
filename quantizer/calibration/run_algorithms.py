"""The step of the calibration that runs the config's algorithms, one after the other.

Each algorithm is a function that its settings name.
"""

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration import fingerprint
from quantizer.calibration.events import RunStage, Snapshot
from quantizer.calibration.fits_model import (
    check_insertions,
    parameter_fault,
    parameter_faults,
    qparams_fault,
)
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.calibration.snapshots import (
    other_run,
    register_dataclasses,
    reporting_damage,
    share_snapshot,
    snapshot_of,
    value_of,
)
from quantizer.calibration.target import AlgorithmScope
from quantizer.config.algorithms import ALGORITHMS, Algorithm, algorithm_entry
from quantizer.config.wording import counted, first_names
from quantizer.graph.edits import Insertion, with_insertions
from quantizer.graph.ir import Graph
from quantizer.graph.structure.definitions import Structure
from quantizer.graph.structure.find import find_structure
from quantizer.layerwise.adjustment import (
    Adjustment,
    Remark,
    RoundedWeight,
    Run,
    Task,
    apply_adjustment,
)
from quantizer.nn.network import Network
from quantizer.numerics.qparams import QParams
from quantizer.plan.model import TensorSpecs
from quantizer.plugins import loaded
from quantizer.sources.batches import Batch
from quantizer.storage.files import damaged

_TOLERANCE = 1e-3
"""Outputs of a rescaled float network may differ by this share of the largest; more draws a
warning.
"""


@dataclass(frozen=True)
class Progress:
    """How far the algorithms of a config are.

    Args:
        index: of the algorithm that runs, or is next.
        done: how many of its groups are in `found`.
        found: by all so far.
        before: what that algorithm started from.
    """

    index: int = 0
    done: int = 0
    found: Adjustment = field(default_factory=Adjustment)
    before: Adjustment = field(default_factory=Adjustment)


_CHECKPOINT = "the checkpoint of algorithms"
register_dataclasses(Progress, Adjustment, Insertion, RoundedWeight, QParams, Remark)


def run_algorithms(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Run all algorithms of the config, in order; a resumed run continues where it stopped.

    Raises:
        ConfigError: an algorithm's entry names what is not in the model.
        DataError: a value in the network is not finite, or the data are not the same when they
            are read again.
    """
    algorithms = request.config.algorithms
    scope = state.target.scope(state.plan, request.first_batch())
    # Wrong names are reported before more data are read
    structures = [find_structure(scope.graph, algorithm.names) for algorithm in algorithms]
    progress = _restored(request, scope.graph)
    with reporting_damage(_CHECKPOINT):
        for stored in (progress.found, progress.before):
            check_adjustment(stored, scope.graph, scope.specs, _CHECKPOINT)
    for index in range(progress.index, len(algorithms)):
        algorithm = algorithms[index]
        before = progress.before
        structure = scope.fitting(algorithm, structures[index])
        adjustment = _run(request, scope, structure, progress)
        progress = Progress(index + 1, 0, adjustment, adjustment)
        for level, line in _summary_lines(algorithm, before, adjustment):
            request.events.message(level, line)
    adjustment = progress.found
    if adjustment.parameters or adjustment.insertions:
        level, line = _difference_line(scope.graph, adjustment, request.first_batch())
        request.events.message(level, line)
    target = scope.target.adjusted(adjustment)
    return replace(
        state,
        target=target,
        plan=target.plan(request.config),
        adjustment=state.adjustment.followed_by(adjustment),
    )


def _read_again(request: CalibrationRequest, graph: Graph) -> Iterator[Batch]:
    remedy = "calibrate with batches that stay the same"
    return request.read_again("the algorithms", remedy, graph)


def _restored(request: CalibrationRequest, graph: Graph) -> Progress:
    """Return where a stopped run was.

    The data are read once to check that they are the same.

    Raises:
        ResultError: the checkpoint is damaged, or of another run.
    """
    snapshot = request.shared_snapshot("algorithms")
    if snapshot is None:
        return Progress()
    data = snapshot.state.get("data")
    if data is not None:
        for _ in _read_again(request, graph):
            pass
        if request.batches.fingerprint != data:
            raise other_run("the data differ")
    progress = value_of(snapshot, Progress)
    names = [algorithm.name for algorithm in request.config.algorithms]
    if not 0 <= progress.index <= len(names) or progress.done < 0:
        raise other_run("it is not of these algorithms")
    place = f"{progress.index} of {len(names)}"
    if progress.done:
        name = [*names, "the last one"][progress.index]
        place = f"{counted(progress.done, 'group')} of {name}"
    request.events.message(logging.INFO, f"the algorithms resume after {place}")
    return progress


def _run(
    request: CalibrationRequest, scope: AlgorithmScope, structure: Structure, start: Progress
) -> Adjustment:
    """Run one algorithm, and return what all algorithms have found so far.

    Progress is counted in groups of layers. The end of each block of the network is a
    checkpoint.

    Args:
        request: has the algorithms.
        scope: what they work on.
        structure: the part of the network that this algorithm changes.
        start: says which algorithm runs, and where it starts.
    """
    algorithm = request.config.algorithms[start.index]
    groups = structure.groups
    progress = start

    def snapshot() -> Snapshot:
        # The fingerprint is None until a pass over the data is complete
        return snapshot_of(progress, request.batches.fingerprint)

    def after_group(adjustment: Adjustment, done: int) -> None:
        nonlocal progress
        progress = replace(start, done=done, found=adjustment)
        ends_block = not 0 < done < len(groups) or groups[done - 1].block != groups[done].block
        stage.advance(done, at_boundary=ends_block or groups[done].block is None)

    stage = RunStage(
        request.events,
        algorithm.name,
        len(groups),
        "groups",
        done=start.done,
        saved_as="algorithms",
        snapshot=snapshot,
        needs_same_data=True,
    )
    with stage:
        task = Task(
            scope.graph,
            scope.specs,
            structure,
            batches=partial(_read_again, request, scope.graph),
            after_group=after_group,
            done=start.done,
            before=start.before,
            ranks=request.ranks,
            memory=request.memory,
        )
        run = load_run(algorithm.name)
        adjustment = _agreed(request, run(task, algorithm.settings, start.found))
        progress = Progress(start.index + 1, 0, adjustment, adjustment)
        stage.advance(len(groups), at_boundary=True)
    return adjustment


def _agreed(request: CalibrationRequest, adjustment: Adjustment) -> Adjustment:
    """Return what this rank has found if all ranks have found the same, else what the first
    has: other machines may compute otherwise.
    """
    ranks = request.ranks
    if ranks.is_alone:
        return adjustment
    request.batches.require_same(ranks)
    snapshot = snapshot_of(adjustment)
    tensors = {
        name: fingerprint.tensor_digest(tensor) for name, tensor in snapshot.tensors.items()
    }
    digest = fingerprint.value_digest([tensors, snapshot.state])
    digests = ranks.gather(digest, "the end of an algorithm")
    if len(set(digests)) == 1:
        return adjustment
    return value_of(share_snapshot(snapshot, ranks, "what an algorithm has found"), Adjustment)


def load_run(name: str) -> Run:
    """Return the function of an algorithm, which its settings name."""
    run: Run = loaded(ALGORITHMS[name].run)
    return run


def algorithms_report(
    algorithms: Sequence[Algorithm], adjustment: Adjustment
) -> dict[str, Any]:
    """Return the contents of algorithms.json: what ran, and what it did to each layer.

    Errors are shares of the energy of a layer's outputs.
    """
    rounded = {}
    for name, layer in adjustment.rounded.items():
        rounded[name] = {
            "error_rtn": layer.before,
            "error": layer.after,
            "is_rtn": not layer.after < layer.before,
        }
    inserted = [
        {"layer": row.name, "reads": row.source, "readers": list(row.readers)}
        for row in adjustment.insertions
    ]
    parameters = adjustment.parameters
    remarks = adjustment.remarks
    return {
        "algorithms": [algorithm_entry(algorithm.settings) for algorithm in algorithms],
        "rounded": rounded,
        "rescaled": {name: sorted(values) for name, values in parameters.items()},
        "inserted": inserted,
        "remarks": [{"layer": remark.layer, "text": remark.text} for remark in remarks],
    }


def _summary_lines(
    algorithm: Algorithm, before: Adjustment, after: Adjustment
) -> Iterator[tuple[int, str]]:
    """Yield what an algorithm did, then each of its notes once, with levels of `logging`."""
    parts = [*_effects(algorithm, before, after)]
    yield logging.INFO, f"{algorithm.name}: {'; '.join(parts) or 'nothing to quantize'}"
    texts: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for remark in after.remarks[len(before.remarks) :]:
        texts[remark.text, remark.is_warning].append(remark.layer)
    for (text, is_warning), layers in texts.items():
        level = logging.WARNING if is_warning else logging.INFO
        yield level, f"{first_names(layers, 1)}: {text}"


def _effects(algorithm: Algorithm, before: Adjustment, after: Adjustment) -> Iterator[str]:
    """Yield what an algorithm did, in parts of a sentence."""
    if algorithm.stage == "rescale":
        rescaled = 0
        for name, values in after.parameters.items():
            rescaled += before.parameters.get(name) is not values
        inserted = len(after.insertions) - len(before.insertions)
        yield f"{counted(rescaled, 'layer')} rescaled, {counted(inserted, 'layer')} inserted"
    count = 0
    shares = []
    for name, layer in after.rounded.items():
        if before.rounded.get(name) is layer:
            continue
        count += 1
        if layer.after < layer.before:
            shares.append(layer.after / layer.before)
    if not count:
        return
    yield f"{counted(count, 'layer')} quantized"
    if shares:
        median = statistics.median(shares)
        yield f"median output error {median:.0%} of round-to-nearest"
    plain = count - len(shares)
    if plain:
        verb = "keeps" if plain == 1 else "keep"
        yield f"{plain} {verb} round-to-nearest"


def _difference_line(graph: Graph, adjustment: Adjustment, batch: Batch) -> tuple[int, str]:
    """Return how far the outputs of the adjusted float network are from the model's, with a
    level of `logging`.
    """
    wanted = _outputs(graph, batch)
    outputs = _outputs(apply_adjustment(graph, adjustment), batch)
    share = 0.0
    for target, output in zip(wanted, outputs, strict=True):
        if target.numel():
            largest = target.abs().max().clamp_min(torch.finfo(target.dtype).tiny)
            share = max(share, float((target - output).abs().max() / largest))
    text = f"the rescaled float network's outputs differ by {share:.1e} of the largest"
    if share <= _TOLERANCE:
        return logging.INFO, text
    warning = (
        "its dtype is too coarse for these factors, so compare test mode's metrics with those "
        "of float mode"
    )
    return logging.WARNING, f"{text}: {warning}"


@torch.no_grad()
def _outputs(graph: Graph, batch: Batch) -> Sequence[Tensor]:
    """Return the floating-point outputs of a float network."""
    return Network(graph).start(batch.args, batch.kwargs).advance().float_outputs()


def check_adjustment(
    adjustment: Adjustment, graph: Graph, specs: TensorSpecs, what: str
) -> None:
    """Refuse what algorithms have found, as a checkpoint has it, if it does not fit the model.

    Raises:
        ResultError: naming the layer.
    """
    check_insertions(adjustment.insertions, graph, what)
    graph = with_insertions(graph, adjustment.insertions)
    for layer, _, reason in parameter_faults(graph, adjustment.parameters):
        raise damaged(what, layer, reason)
    qparams = list(adjustment.qparams.items())
    for layer, rounded in adjustment.rounded.items():
        fault = parameter_fault(graph, layer, "weight", rounded.weight)
        if fault:
            raise damaged(what, layer, fault)
        if not math.isfinite(rounded.before) or not math.isfinite(rounded.after):
            raise damaged(what, "the errors of layers", "they are not finite")
        qparams.append((layer, rounded.qparams))
    for layer, values in qparams:
        spec = specs.get((layer, "weights"))
        if spec is None:
            raise damaged(what, layer, "its weights are not quantized")
        node = graph.by_name.get(layer)
        shape: tuple[int, ...] = ()
        if node is not None and "weight" in node.params:
            shape = tuple(graph.weight(node).shape)
        fault = qparams_fault(spec, shape, values)
        if fault:
            raise damaged(what, layer, fault)
