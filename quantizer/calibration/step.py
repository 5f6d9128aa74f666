"""The steps of a calibration, and what they keep for later runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.declarations import CalibrationStep
from quantizer.graph.ir import Graph
from quantizer.plugins import loaded, plugin_steps

Stage = Literal["plan", "decide", "adjust", "observe", "scale", "correct", "finish"]
"""Where a step runs: the steps of a stage follow those of the stages before it.

"decide" changes the network as its first batches demand, "adjust" rewrites weights before they
are observed, and "correct" changes what the scales have made.
"""
STAGES: tuple[Stage, ...] = get_args(Stage)
Condition = Callable[[CalibrationRequest, CalibrationState], bool]


def _always(request: CalibrationRequest, state: CalibrationState) -> bool:
    return True


@dataclass(frozen=True)
class Step:
    """One step of a calibration, of the core or as a plug-in declares it.

    Args:
        stage: where it runs.
        run: returns the state with what the step makes.
        when: returns whether the step runs.
    """

    stage: Stage
    run: Callable[[CalibrationRequest, CalibrationState], CalibrationState]
    when: Condition = _always


@dataclass(frozen=True)
class Decision:
    """A decision on the first batches that changes the network, so that later runs need it.

    It is JSON, and empty if nothing changes. `CalibrationState.kept`, `Solution.kept` and the
    header of quant_info.json have it under its name. The header has only those that are not
    empty.

    Args:
        name: what it is kept under.
        about: what ranks wait for, in errors.
        decide: returns the decision. It reads the first batches.
        apply: returns the state with the network that was decided on.
        check: raises `ResultError` if a stored decision does not fit the graph after passes.
            It takes the path of the file, too.
        differences: yields sentences on what two decisions do differently, for two calibrations
            that are to be merged.
    """

    name: str
    about: str
    decide: Callable[[CalibrationRequest, CalibrationState], Any]
    apply: Callable[[CalibrationRequest, CalibrationState, Any], CalibrationState]
    check: Callable[[Any, Graph, Path | str], None]
    differences: Callable[[Any, Any], Iterator[str]]

    def __call__(
        self, request: CalibrationRequest, state: CalibrationState
    ) -> CalibrationState:
        """Decide on the first rank for all, or take the decision of an earlier calibration."""
        decision: Any = {}
        if request.kept is not None:
            decision = request.kept.get(self.name, {})
        elif request.ranks.is_first and not request.batches.stands_in:
            decision = self.decide(request, state)
        decision = request.ranks.broadcast(decision, self.about)
        if not decision:
            return state
        state = replace(state, kept={**state.kept, self.name: decision})
        return self.apply(request, state, decision)


def in_order(core: Iterable[Step]) -> list[Step]:
    """Return all steps in the order in which they run. In a stage, those of the core come
    first, and then those of plug-ins by rank.
    """
    steps = list(core)
    for row in plugin_steps():
        stage = cast(Stage, row.stage)
        steps.append(Step(stage, partial(_run, row), row.when))
    return sorted(steps, key=lambda step: STAGES.index(step.stage))


def _run(
    row: CalibrationStep, request: CalibrationRequest, state: CalibrationState
) -> CalibrationState:
    """Run a step of a plug-in, which is imported now."""
    after: CalibrationState = loaded(row.run)(request, state)
    return after


def decisions_of(*kept: Mapping[str, Any]) -> dict[str, Decision]:
    """Return the decisions that calibrations have kept, by name, in their order.

    Args:
        kept: what each has kept, by name.
    """
    decisions = {}
    for row in plugin_steps():
        if any(row.keeps in names for names in kept):
            decision = loaded(row.run)
            if isinstance(decision, Decision):
                decisions[row.keeps] = decision
    return decisions
