"""Calibration from top to bottom: what makes of a model, a config and data all that test mode needs.

The shell, Python and quantization in place run these steps. Writing, testing and exporting come after them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from quantizer.algorithms import bias_correction
from quantizer.algorithms.dpu_alignment import Move, align
from quantizer.algorithms.sequential_runner import SequentialRunner
from quantizer.config.diagnostics import ConfigError
from quantizer.config.model import Settings
from quantizer.engine import calibrate
from quantizer.engine.attach import quantized_network
from quantizer.engine.checkpoint import other_run
from quantizer.engine.events import Snapshot
from quantizer.engine.finetune import finetune_weights
from quantizer.engine.job import Job
from quantizer.engine.run_algorithms import run_algorithms
from quantizer.engine.solution import Solution
from quantizer.graph.ir import Graph
from quantizer.sources.batches import Batch


@dataclass(frozen=True)
class Step:
    """Reads what the steps before it have put into the job, and adds its own; `when` says whether it runs."""

    run: Callable[[Job], None]
    when: Callable[[Job], bool] = lambda job: True


def run_passes(job: Job) -> None:
    """Bring the graph into the form that is planned."""
    job.target.prepare(job.config)


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
        job.events.message(level, f"{where}{finding.message}{f' ({finding.help})' if finding.help else ''}", finding)
    for level, text in job.target.remarks(job.config, job.plan):
        job.events.message(level, text)
    job.confirm(job)


def plan_again(job: Job) -> None:
    """Decide anew on the graph that algorithms have changed; what there is to say was said before."""
    job.plan = job.target.plan(job.config)


def start_observers(job: Job) -> None:
    """Give every tensor that needs a scale an observer; those of weights and biases see their values now."""
    job.calibration = calibrate.start(job.plan)


def observe(job: Job) -> None:
    """Run the float model over the data; resumed, over those that a stopped run has left. Observers see its values."""
    calibration, batches = job.calibration, job.batches
    done, data = _restored(job)

    def snapshot() -> Snapshot:
        tensors = {name: tensor.clone() for name, tensor in calibration.state_dict().items()}
        return Snapshot(tensors, {"batches": calibration.batches, "data": data})

    def after_batch(_: calibrate.Calibration) -> None:
        nonlocal data
        data = batches.seen
        stage.advance()

    saved: dict[str, Any] = {"saved_as": "calibration", "snapshot": snapshot}
    with job.stage("calib", batches.total, done=done, **saved) as stage, job.target.observed() as model:
        calibrate.run(calibration, model, _rest(job, done, data), after_batch)
        if job.fast_finetune:
            stage.advance(stage.done, at_boundary=True)
    unreached = job.target.unreached()
    for layer in dict.fromkeys(tensor.layer for tensor in job.plan.tensors.values() if tensor.is_calibrated):
        if layer in unreached:
            text = f"{layer} was not reached by the calibration data: its activations stay float"
            job.events.message(logging.WARNING, text)
    job.calibration = calibration.without(unreached)


def _restored(job: Job) -> tuple[int, Any]:
    """How many batches a stopped run has observed, and their fingerprint; what it found goes into the calibration."""
    snapshot = job.restored("calibration")
    if snapshot is None:
        return 0, None
    job.calibration.load_state_dict(snapshot.tensors)
    job.calibration.batches = int(snapshot.state["batches"])
    return job.calibration.batches, snapshot.state["data"]


def _rest(job: Job, done: int, data: Any) -> Iterator[Batch]:
    """The batches that a resumed run has not seen; the others are read again and must be the same."""
    count = 0
    for count, batch in enumerate(job.read(), 1):
        if count > done:
            yield batch
        elif count == done and job.batches.seen != data:
            raise other_run("the data differ")
    if count < done:
        raise other_run("the data differ")


def find_scales(job: Job) -> None:
    """Scales and zero points, of what was observed or what algorithms have found."""
    if job.algorithms_need_data and not job.calibration.batches and job.batches.fingerprint is not None:
        job.calibration.batches = job.batches.fingerprint["batches"]
    found = calibrate.solution(job.calibration)
    job.solution = job.target.solved(found, job.adjustment, job.report) if job.adjustment else found


def align_to_dpu(job: Job) -> None:
    """Move power-of-two scales to those that the DPU has shifts for."""
    job.solution, moves = aligned(job.solution, job.plan.graph, job.plan.settings)
    for move in moves:
        job.events.message(logging.INFO, f"note: {move}")


def aligned(found: Solution, graph: Graph, settings: Settings) -> tuple[Solution, tuple[Move, ...]]:
    """The solution at aligned positions, with a note at each tensor that was moved, and the moves."""
    known = {key: tensor.position for key, tensor in found.tensors.items() if tensor.spec.symmetric}
    positions, moves = align(
        graph,
        {key: at for key, at in known.items() if at is not None},
        change_concat_input_fix=settings.change_concat_input_fix,
        change_pool_input_fix=settings.change_pool_input_fix,
    )
    tensors, notes = dict(found.tensors), dict(found.notes)
    for move in moves:
        key = (move.layer, move.role)
        scale = torch.full_like(found.tensors[key].scale, 2.0 ** -positions[key])
        tensors[key] = dataclasses.replace(found.tensors[key], scale=scale)
        notes[key] = (*notes.get(key, ()), f"position {move.before} -> {move.after}: {move.why}")
    return dataclasses.replace(found, tensors=tensors, notes=notes), moves


def correct_biases(job: Job) -> None:
    """Give each quantized layer the mean output back that it has in float.

    Raises:
        DataError: a correction is not finite, or the data are not the same when they are read again.
    """
    data = job.read_again("bias correction", "set include_bias_corr to false")
    runner = SequentialRunner(quantized_network(job.plan.graph, job.solution).to(job.target.device), data)
    as_codes = job.plan.settings.target_device == "DPU"
    with job.stage("bias correction", len(job.plan.graph.nodes), "layers") as stage:
        found = bias_correction.correct_biases(
            runner, job.calibration.means, as_codes=as_codes, after_layer=stage.advance
        )
    name, largest = max(((layer, float(c.abs().max())) for layer, c in found.items()), key=lambda pair: pair[1])
    text = f"biases of {len(found)} layers corrected, by at most {largest:.3g} in {name}"
    job.events.message(logging.INFO, text)
    job.solution = dataclasses.replace(job.solution, corrections=found)


def encode_parameters(job: Job) -> None:
    """Make codes of the quantized parameters: what is stored, run and exported from now on."""
    job.solution = job.target.encoded(job.solution)


STEPS: tuple[Step, ...] = (
    Step(run_passes),
    Step(make_plan),
    Step(run_algorithms, when=lambda job: bool(job.config.algorithms)),
    Step(plan_again, when=lambda job: bool(job.config.algorithms)),
    Step(start_observers),
    Step(observe, when=lambda job: job.plan.needs_data or bool(job.fast_finetune)),
    Step(find_scales),
    Step(align_to_dpu, when=lambda job: job.plan.settings.target_device == "DPU"),
    Step(finetune_weights, when=lambda job: bool(job.fast_finetune)),
    Step(correct_biases, when=lambda job: bool(job.calibration.means)),
    Step(encode_parameters),
)


def run(job: Job) -> Solution:
    """Run all steps; what they found on the way stays in the job.

    Raises:
        ConfigError, UsageError, ModelError, DataError, ResultError: as the steps say. What a stopped run needs to go on
            is saved where the job has checkpoints.
    """
    for step in STEPS:
        if step.when(job):
            step.run(job)
    return job.solution
