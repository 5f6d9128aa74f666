"""The steps of a calibration, from a model, a config and data to all that test mode needs.

The shell, Python and quantization in place run these steps. Writing, testing and exporting come
after them.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from quantizer.calibration import observing
from quantizer.calibration.events import RunStage, Snapshot
from quantizer.calibration.faithful import changed_function
from quantizer.calibration.observing import Calibration
from quantizer.calibration.request import CalibrationRequest, CalibrationState, Step, in_order
from quantizer.calibration.statistics import InputMagnitudes
from quantizer.config.diagnostics import ConfigError, with_place
from quantizer.errors import CheckpointError
from quantizer.option_words import Sentence, marked_text
from quantizer.plan.model import Plan
from quantizer.sources.batches import Batch
from quantizer.storage.process_memory import TRIM_AFTER_GROWTH, trim_heap

_CHECKPOINT = "the checkpoint of calibration"


def prepare_graph(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Bring the graph into the form that is planned."""
    target = state.target.prepared(request.config)
    return replace(state, target=target)


def plan_tensors(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Decide how each tensor is quantized, and report it.

    Raises:
        ConfigError: a selector matches nothing, or values conflict once merged.
    """
    plan = state.target.plan(request.config)
    findings = (*request.findings, *plan.diagnostics)
    if any(finding.severity == "error" for finding in findings):
        raise ConfigError(findings)
    events = request.events
    for finding in findings:
        is_note = finding.severity == "note"
        level = logging.INFO if is_note else logging.WARNING
        text = with_place(finding).marked
        if finding.help:
            text += f" ({marked_text(finding.help)})"
        events.message(level, Sentence(text), finding)
    for level, text in state.target.remarks(request.config, plan):
        events.message(level, text)
    state = replace(state, plan=plan)
    return request.confirm(request, state) or state


def run_algorithms(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Run all algorithms of the config; see `calibration.run_algorithms`."""
    # Only configs with algorithms need it
    from quantizer.calibration import run_algorithms as algorithms

    return algorithms.run_algorithms(request, state)


def start_observers(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Create the observers, and show those of weights and biases their values."""
    calibration = observing.create_observers(state.plan)
    return replace(state, calibration=calibration)


def observe(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Run the float model over the data, and show its values to the observers.

    A resumed run continues after the batches that the stopped run has observed.

    Raises:
        DataError: there is no batch, or a value is not finite.
        ResultError: the checkpoint is damaged, or of other data.
    """
    batches = request.batches
    calibration = state.calibration.unseen()
    fingerprint = _resume(request, calibration)
    done = calibration.batches
    inputs = InputMagnitudes()

    def snapshot() -> Snapshot:
        """Return the statistics so far, and the fingerprint of the data they are of."""
        statistics = calibration.state_dict()
        tensors = {name: tensor.clone() for name, tensor in statistics.items()}
        progress = {"batches": calibration.batches, "data": fingerprint}
        return Snapshot(tensors, progress)

    def remaining_batches() -> Iterator[Batch]:
        """Yield the batches after those of the stopped run, which must be the same again."""
        nonlocal fingerprint
        count = 0
        for count, batch in enumerate(request.read(), 1):
            inputs.add(batch)
            if count > done:
                yield batch
                # Several ranks add up their statistics only now and then, and a snapshot needs
                # the fingerprint of the batches that are in them
                if calibration.batches == count:
                    fingerprint = batches.seen
                stage.advance(batches.seen["batches"])
            elif count == done and batches.seen != fingerprint:
                raise _other_data()
        if count < done:
            raise _other_data()

    # `done` counts the parts in which batches with padding are observed, this one the user's
    batches_done = fingerprint["batches"] if fingerprint else 0
    stage = RunStage(
        request.events,
        "calib",
        batches.total,
        done=batches_done,
        saved_as="calibration",
        snapshot=snapshot,
    )
    with stage, state.target.observed() as model:
        if request.ranks.is_alone:
            observing.observe_batches(calibration, model, remaining_batches())
        else:
            # A run in one process does not need it
            from quantizer.calibration.snapshots import observe_share

            observe_share(calibration, model, remaining_batches(), request.ranks)
            observing.require_batches(calibration)
            batches.require_same(request.ranks)
        fingerprint = batches.seen
        if request.fast_finetune:
            # Finetuning may be stopped, too, and then continues with these statistics
            stage.advance(stage.done, at_boundary=True)
    unreached = state.target.unreached()
    for layer in _uncalibrated(state.plan, unreached):
        text = f"{layer} was not reached by the calibration data: its activations stay float"
        request.events.message(logging.WARNING, text)
    calibration = calibration.without(unreached)
    return replace(state, calibration=calibration, inputs=inputs)


def _uncalibrated(plan: Plan, unreached: Collection[str]) -> list[str]:
    """Return the layers among `unreached` with activations to calibrate."""
    layers = []
    for tensor in plan.tensors.values():
        layer = tensor.layer
        if tensor.is_calibrated and layer in unreached and layer not in layers:
            layers.append(layer)
    return layers


def _other_data() -> CheckpointError:
    """Return the error about a checkpoint whose data this run does not read."""
    from quantizer.calibration.snapshots import other_run

    return other_run("the data differ")


def _resume(request: CalibrationRequest, calibration: Calibration) -> Any:
    """Load the statistics of a stopped run, if there are any.

    Returns:
        The fingerprint of the data that the stopped run has observed, or None.
    """
    snapshot = request.shared_snapshot("calibration")
    if snapshot is None:
        return None
    from quantizer.calibration.snapshots import checked_statistics, reporting_damage

    with reporting_damage(_CHECKPOINT):
        calibration.load_state_dict(checked_statistics(snapshot.tensors, _CHECKPOINT))
        calibration.batches = operator.index(snapshot.state["batches"])
        fingerprint = snapshot.state["data"]
        if fingerprint is not None:
            operator.index(fingerprint["batches"])
        names = calibration.state_dict().keys()
        if calibration.batches < 0 or snapshot.tensors.keys() != names:
            raise ValueError("it lacks tensors, or has others")
    return fingerprint


def load_statistics(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Merge the statistics of earlier calibrations, instead of reading data."""
    calibration = state.calibration.unseen()
    for part in request.statistics:
        other = calibration.fresh()
        other_state = {}
        for name, tensor in part.state.items():
            layer, role, _ = name.rsplit("|", 2)
            if (layer, role) in other.calibrated:
                other_state[name] = tensor
        other.load_state_dict(other_state)
        other.batches = part.batches
        calibration.merge(other)
    return replace(state, calibration=calibration)


def find_scales(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Return the state with scales and zero points, from observers and algorithms."""
    fingerprint = request.batches.fingerprint
    calibration = state.calibration
    # Only algorithms have read the data: results report how many batches they were
    if request.algorithms_need_data and not calibration.batches and fingerprint is not None:
        calibration = replace(calibration, batches=fingerprint["batches"])
        state = replace(state, calibration=calibration)
    if state.plan.joins:
        # Only networks with joins need it
        from quantizer.calibration.joins import decide_joins

        state = decide_joins(request, state)
    solution = replace(
        observing.observed_solution(state.calibration), joins=state.joins, kept=state.kept
    )
    solution = state.target.solved(solution, state.adjustment)
    if request.config.algorithms:
        # As in `run_algorithms`
        from quantizer.calibration.run_algorithms import algorithms_report

        algorithms = algorithms_report(request.config.algorithms, state.adjustment)
        solution = replace(solution, algorithms=algorithms)
    return replace(state, solution=solution)


def keep_plain_scales(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Give weights their plain scales back; see `calibration.safe_pairs`."""
    # Only weights with the method need it
    from quantizer.calibration import safe_pairs

    return safe_pairs.keep_plain_scales(request, state)


def name_far_samples(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Name the samples that stretch the range of an input."""
    for text in state.inputs.sentences(state.plan, state.solution):
        request.events.message(logging.WARNING, text)
    return state


def name_changed_function(
    request: CalibrationRequest, state: CalibrationState
) -> CalibrationState:
    """Warn if passes have changed what the float network computes, and none of them says so:
    tests compare the quantized network with it.
    """
    graph = state.target.graph
    first = request.batches.first().to(graph.device)
    difference = changed_function(request.target.original, graph, first)
    if difference:
        text = (
            f"passes or algorithms have changed what {graph.model} computes in float: outputs "
            f"differ by {difference:.2g} of their size, and no figure of a test shows it. "
            "Leave them out one by one to find which"
        )
        request.events.message(logging.WARNING, text)
    return state


def finish(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Quantize the parameters to codes, which are stored, run and exported. In place, quantize
    the modules.
    """
    solution = state.target.finished(state.solution)
    return replace(state, solution=solution)


def _observes_data(request: CalibrationRequest, state: CalibrationState) -> bool:
    if request.statistics:
        return False
    return state.plan.needs_data or bool(request.fast_finetune)


_CORE = (
    Step("plan", prepare_graph),
    Step("plan", plan_tensors),
    Step("adjust", run_algorithms, when=lambda request, state: bool(request.config.algorithms)),
    Step("observe", start_observers),
    Step("observe", load_statistics, when=lambda request, state: bool(request.statistics)),
    Step("observe", observe, when=_observes_data),
    Step("scale", find_scales),
    Step(
        "scale",
        keep_plain_scales,
        when=lambda request, state: any(
            spec.method == "pair_safe" for spec in state.plan.specs.values()
        ),
    ),
    Step("scale", name_far_samples, when=lambda request, state: request.ranks.is_first),
    Step(
        "finish",
        name_changed_function,
        when=lambda request, state: state.target.is_traced and request.ranks.is_first,
    ),
    Step("finish", finish),
)
STEPS = in_order(_CORE)


def run_calibration(request: CalibrationRequest) -> CalibrationState:
    """Run all steps.

    Returns:
        The state after the last step.

    Raises:
        ConfigError, UsageError, ModelError, DataError, ResultError: see the steps. If the
            request has checkpoints, they hold what a stopped run needs to resume.
    """
    state = CalibrationState(target=request.target)
    for step in STEPS:
        if step.when(request, state):
            state = step.run(request, state)
            trim_heap(TRIM_AFTER_GROWTH)
    return state
