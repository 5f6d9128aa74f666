"""What a step of a calibration is, and what a step keeps for later runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.graph.ir import Graph

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
    """One step of a calibration.

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
        when: returns whether the network may need a decision.
        decide: returns the decision. It reads the first batches.
        apply: returns the state with the network that was decided on.
        check: raises `ResultError` if a stored decision does not fit the graph after passes.
            It takes the path of the file, too.
        differences: yields sentences on what two decisions do differently, for two calibrations
            that are to be merged.
    """

    name: str
    about: str
    when: Condition
    decide: Callable[[CalibrationRequest, CalibrationState], Any]
    apply: Callable[[CalibrationRequest, CalibrationState, Any], CalibrationState]
    check: Callable[[Any, Graph, Path | str], None]
    differences: Callable[[Any, Any], Iterator[str]]

    @property
    def step(self) -> Step:
        """Return the step that decides and applies."""
        return Step("decide", self._run, self.when)

    def _run(self, request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
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
