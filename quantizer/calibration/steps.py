"""Calibration from top to bottom: what makes of a model, a config and data all that test mode
needs.

The shell, Python and quantization in place run these steps. Writing, testing and exporting come
after them.
"""

import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantizer.algorithms import bias_correction
from quantizer.algorithms.activation_store import ActivationStore
from quantizer.algorithms.dpu_alignment import Move, align
from quantizer.algorithms.sequential_runner import SequentialRunner
from quantizer.calibration import absorption, level_channels, observing, rank_shards
from quantizer.calibration.events import Snapshot
from quantizer.calibration.finetuning import finetune_weights
from quantizer.calibration.job import Job
from quantizer.calibration.joins import decide_joins
from quantizer.calibration.run_algorithms import report, run_algorithms
from quantizer.calibration.snapshots import checked_statistics, other_run, telling_damage
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.diagnostics import ConfigError
from quantizer.config.model import Settings
from quantizer.distributed import ALONE
from quantizer.graph.ir import Graph
from quantizer.graph.parameters import placed
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch
from quantizer.storage.allocator import GROWTH, give_back


@dataclass(frozen=True)
class Step:
    """Reads what the steps before it have put into the job, and adds its own; `when` says
    whether it runs.
    """

    run: Callable[[Job], None]
    when: Callable[[Job], bool] = lambda job: True


def run_passes(job: Job) -> None:
    """Bring the graph into the form that is planned."""
    job.target.prepare(job.config, absorption.refused(job.absorption or {}))


def make_plan(job: Job) -> None:
    """Decide for every tensor how it is quantized.

    Raises:
        ConfigError: a selector matches nothing, or values conflict once merged.
    """
    job.plan = job.target.plan(job.config)
    findings = (*job.findings, *job.plan.diagnostics)
    if any(finding.severity == "error" for finding in findings):
        raise ConfigError(findings)
    for finding in findings:
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        where = f"{finding.place}: " if finding.place else ""
        job.events.message(
            level,
            f"{where}{finding.message}{f' ({finding.help})' if finding.help else ''}",
            finding,
        )
    for level, text in job.target.remarks(job.config, job.plan):
        job.events.message(level, text)
    job.confirm(job)


def check_absorption(job: Job) -> None:
    """Decide on the first batches which layers absorb high biases, and plan again if any may
    not.

    Of several ranks the first decides. Without data batch norms are believed.
    """
    record = absorption.NOTHING
    if job.ranks.is_first and not job.batches.stands_in:
        record = absorption.decide(job.target.original, job.config.settings, job.read())
    job.absorption = job.ranks.broadcast(record, "the check of absorbed biases")
    refused = absorption.refused(job.absorption)
    if refused:
        for sentence in absorption.refusals(job.absorption):
            job.events.message(logging.INFO, sentence)
        job.target.prepare(job.config, refused)
        job.plan = job.target.plan(job.config)


def level_far_channels(job: Job) -> None:
    """Level channels that one scale cannot serve, as the first batches show them, and plan
    again if there are any.

    Of several ranks the first decides. The DPU has one scale for all weights of a layer, so
    nothing is levelled there.
    """
    if job.levels is None:
        levels: dict[str, list[int]] = {}
        if job.ranks.is_first and not job.batches.stands_in:
            levels = level_channels.decide(job.plan, job.read())
        job.levels = job.ranks.broadcast(levels, "the ranges of channels")
    if not job.levels:
        return
    job.adjustment = level_channels.adjustment(job.plan.graph, job.levels)
    job.target.adjust(job.adjustment)
    job.plan = job.target.plan(job.config)
    job.events.message(logging.INFO, level_channels.sentence(job.levels))


def plan_again(job: Job) -> None:
    """Decide anew on the graph that algorithms have changed; what there is to say was said
    before.
    """
    job.plan = job.target.plan(job.config)


def start_observers(job: Job) -> None:
    """Give every tensor that needs a scale an observer; those of weights and biases see their
    values now.
    """
    job.calibration = observing.start(job.plan)


def observe(job: Job) -> None:
    """Run the float model over the data; resumed, over those that a stopped run has left.
    Observers see its values.
    """
    calibration, batches = job.calibration, job.batches
    seen: Any = None
    if restored := job.restored("calibration"):
        with telling_damage("the checkpoint of calibration"):
            calibration.load_state_dict(
                checked_statistics(restored.tensors, "the checkpoint of calibration")
            )
            calibration.batches, seen = (
                operator.index(restored.state["batches"]),
                restored.state["data"],
            )
            if (
                calibration.batches < 0
                or restored.tensors.keys() != calibration.state_dict().keys()
            ):
                raise ValueError("it lacks tensors, or has others")
    done = calibration.batches

    def snapshot() -> Snapshot:
        tensors = {name: tensor.clone() for name, tensor in calibration.state_dict().items()}
        return Snapshot(tensors, {"batches": calibration.batches, "data": seen})

    def unseen() -> Iterator[Batch]:
        """A stopped run's batches are read again, too, and must be the same."""
        nonlocal seen
        count = 0
        for count, batch in enumerate(job.read(), 1):
            if count > done:
                yield batch
                # Several ranks exchange what they have seen now and then
                if calibration.batches == count:
                    seen = batches.seen
                stage.advance()
            elif count == done and batches.seen != seen:
                raise other_run("the data differ")
        if count < done:
            raise other_run("the data differ")

    saved: dict[str, Any] = {"saved_as": "calibration", "snapshot": snapshot}
    with (
        job.stage("calib", batches.total, done=done, **saved) as stage,
        job.target.observed() as model,
    ):
        if job.ranks.is_alone:
            observing.run(calibration, model, unseen())
        else:
            rank_shards.observe(calibration, model, unseen(), job.ranks)
            observing.require_batches(calibration)
            batches.require_same(job.ranks)
        seen = batches.seen
        if job.fast_finetune:
            stage.advance(stage.done, at_boundary=True)
    unreached = job.target.unreached()
    for layer in dict.fromkeys(
        tensor.layer for tensor in job.plan.tensors.values() if tensor.is_calibrated
    ):
        if layer in unreached:
            text = (
                f"{layer} was not reached by the calibration data: its activations stay float"
            )
            job.events.message(logging.WARNING, text)
    job.calibration = calibration.without(unreached)


def take_up(job: Job) -> None:
    """Merge what calibrations before have seen, instead of reading data."""
    for part in job.statistics:
        other = job.calibration.fresh()
        other.load_state_dict(
            {
                name: each
                for name, each in part.state.items()
                if _owner(name) in other.calibrated
            }
        )
        other.batches = part.batches
        job.calibration.merge(other)


def _owner(name: str) -> Key:
    layer, role, _ = name.rsplit("|", 2)
    return layer, role


def find_scales(job: Job) -> None:
    """Scales and zero points, of what was observed or what algorithms have found."""
    if (
        job.algorithms_need_data
        and not job.calibration.batches
        and job.batches.fingerprint is not None
    ):
        job.calibration.batches = job.batches.fingerprint["batches"]
    decide_joins(job)
    job.solution = replace(
        observing.solution(job.calibration),
        joins=job.joins,
        absorption=job.absorption or absorption.NOTHING,
        levels=job.levels or {},
    )
    if job.adjustment:
        job.solution = job.target.solved(job.solution, job.adjustment)
    if job.adjustment and job.config.algorithms:
        algorithms = report(job.config.algorithms, job.adjustment)
        job.solution = replace(job.solution, algorithms=algorithms)


def align_to_dpu(job: Job) -> None:
    """Move power-of-two scales to those that the DPU has shifts for."""
    job.solution, moves = aligned(job.solution, job.plan.graph, job.plan.settings)
    for move in moves:
        job.events.message(logging.INFO, f"note: {move}")


def aligned(
    found: Solution, graph: Graph, settings: Settings
) -> tuple[Solution, tuple[Move, ...]]:
    """The solution at aligned positions, with a note at each tensor that was moved, and the
    moves.
    """
    positions, moves = align(
        graph,
        found.positions,
        change_concat_input_fix=settings.change_concat_input_fix,
        change_pool_input_fix=settings.change_pool_input_fix,
    )
    tensors, notes = dict(found.tensors), dict(found.notes)
    for move in moves:
        key = (move.layer, move.role)
        scale = torch.full_like(found.tensors[key].scale, 2.0 ** -positions[key])
        tensors[key] = replace(found.tensors[key], scale=scale)
        notes[key] = (
            *notes.get(key, ()),
            f"position {move.before} -> {move.after}: {move.why}",
        )
    return replace(found, tensors=tensors, notes=notes), moves


def correct_biases(job: Job) -> None:
    """Give each quantized layer the mean output back that it has in float.

    Raises:
        DataError: a correction is not finite, or the data are not the same when they are read
            again.
    """
    data = job.read_again("bias correction", "set include_bias_corr to false")
    graph, as_codes = job.plan.graph, job.plan.settings.target_device == "DPU"
    network = placed(quantized_network(graph, job.solution), graph.device)
    runner = SequentialRunner(network, data, ActivationStore(job.memory), job.ranks)
    with job.stage("bias correction", len(graph.nodes), "layers") as stage:
        means, advance = job.calibration.means, stage.advance
        found = bias_correction.correct_biases(
            runner, means, as_codes=as_codes, after_layer=advance
        )
    sizes = {layer: float(correction.abs().max()) for layer, correction in found.items()}
    largest = max(sizes, key=sizes.__getitem__)
    text = (
        f"biases of {len(found)} layers corrected, by at most {sizes[largest]:.3g} in {largest}"
    )
    job.events.message(logging.INFO, text)
    job.solution = replace(job.solution, corrections=found)


def finetune(job: Job) -> None:
    """Fast finetuning, which one rank does on all batches while the others wait for what it
    finds.
    """
    ranks = job.ranks
    if ranks.is_first:
        job.ranks = ALONE
        finetune_weights(job)
        job.ranks = ranks
    job.solution, job.is_finetuned = ranks.broadcast(
        (job.solution, job.is_finetuned), "fast finetuning"
    )


def finish(job: Job) -> None:
    """Make codes of the quantized parameters: what is stored, run and exported from now on; or
    change the modules.
    """
    job.solution = job.target.finished(job.solution)


STEPS: tuple[Step, ...] = (
    Step(run_passes),
    Step(make_plan),
    Step(
        check_absorption,
        when=lambda job: job.config.settings.include_cle and job.absorption is None,
    ),
    Step(
        level_far_channels,
        when=lambda job: job.target.is_traced and job.plan.settings.target_device != "DPU",
    ),
    Step(run_algorithms, when=lambda job: bool(job.config.algorithms)),
    Step(plan_again, when=lambda job: bool(job.config.algorithms)),
    Step(start_observers),
    Step(take_up, when=lambda job: bool(job.statistics)),
    Step(
        observe,
        when=lambda job: (
            (job.plan.needs_data or bool(job.fast_finetune)) and not job.statistics
        ),
    ),
    Step(find_scales),
    Step(align_to_dpu, when=lambda job: job.plan.settings.target_device == "DPU"),
    Step(finetune, when=lambda job: bool(job.fast_finetune)),
    Step(correct_biases, when=lambda job: bool(job.calibration.means)),
    Step(finish),
)


def run(job: Job) -> Solution:
    """Run all steps; what they found on the way stays in the job.

    Raises:
        ConfigError, UsageError, ModelError, DataError, ResultError: as the steps say. What a
            stopped run needs to go on is saved where the job has checkpoints.
    """
    for step in STEPS:
        if step.when(job):
            step.run(job)
            give_back(GROWTH)
    return job.solution
