"""The request of a calibration, the state that its steps have reached, and what a step is and
keeps for later runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast, get_args

from torch import Tensor

from quantizer.calibration import fingerprint
from quantizer.calibration.events import Events, LoggedEvents, Snapshot
from quantizer.calibration.observing import Calibration
from quantizer.calibration.solution import Solution
from quantizer.calibration.statistics import InputMagnitudes
from quantizer.calibration.target import Target
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import ResolvedConfig
from quantizer.declarations import CalibrationStep
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError
from quantizer.graph.ir import Graph
from quantizer.layerwise.adjustment import Adjustment
from quantizer.plan.model import JoinDecision, Plan
from quantizer.plugins import loaded, plugin_steps
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches

_NOT_YET: Any = None
"""The value of a field until the step that makes it has run; the order of `STEPS` ensures that
no step reads it before.
"""


@dataclass(frozen=True)
class StoredStatistics:
    """The statistics of an earlier calibration, which has seen so many `batches`."""

    state: Mapping[str, Tensor]
    batches: int


@dataclass(frozen=True, kw_only=True)
class CalibrationState:
    """What the steps of a calibration have made so far. Each step returns a new state.

    The fields are immutable, with two exceptions. The target of modules in place
    (`ModuleTarget`) holds the model that it changes. `calibration` holds observers, but no step
    changes them after it has returned them.

    Args:
        target: what is quantized, with the changes so far.
        plan: how each tensor is quantized.
        adjustment: what algorithms, levelled channels and scaled joins have changed.
        calibration: the observers.
        joins: how the parts of joins are quantized.
        kept: the decisions on the first batches that changed the network, by name.
        inputs: the largest values of each sample.
        solution: scales, zero points, codes and corrections.
    """

    target: Target
    plan: Plan = _NOT_YET
    adjustment: Adjustment = field(default_factory=Adjustment)
    calibration: Calibration = _NOT_YET
    joins: Mapping[str, JoinDecision] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    inputs: InputMagnitudes = field(default_factory=InputMagnitudes)
    solution: Solution = _NOT_YET


Confirm = Callable[["CalibrationRequest", CalibrationState], CalibrationState | None]
"""Called when the plan is made and nothing is changed yet. It raises if the plan cannot be
used, and may return a state with another plan.
"""


class CheckpointStore(Protocol):
    """A place where stopped stages leave their snapshots."""

    def restore(self, name: str, key: Mapping[str, Any]) -> Snapshot | None:
        """Return the snapshot of a stage that a stopped run left, if this run resumes it."""


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """What a calibration is asked to do.

    Args:
        target: what is quantized.
        config: how.
        batches: the calibration data, or an example input where no data are needed.
        events: who follows the run.
        checkpoints: where interrupted stages leave their snapshots; None to leave nothing.
        seed: of all randomness.
        fast_finetune: "adaround", "adaquant" or None.
        dpu_accuracy: the level that the config and `fast_finetune` were raised to, or None.
        facts: what else the results depend on, for checkpoints.
        findings: on the config, from reading it.
        confirm: see `Confirm`.
        ranks: the processes that share the work.
        memory: bytes of the network's values that may stay in memory; None for half of what is
            free.
        statistics: what earlier calibrations have seen, in their order, instead of data.
        kept: the decisions of an earlier calibration, by name; None for data to decide.
    """

    target: Target
    config: ResolvedConfig
    batches: Batches
    events: Events = field(default_factory=LoggedEvents)
    checkpoints: CheckpointStore | None = None
    seed: int = 0
    fast_finetune: str | None = None
    dpu_accuracy: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Diagnostic, ...] = ()
    confirm: Confirm = lambda request, state: None
    ranks: Ranks = ALONE
    memory: int | None = None
    statistics: tuple[StoredStatistics, ...] = ()
    kept: Mapping[str, Any] | None = None

    @property
    def algorithms_need_data(self) -> bool:
        """Return whether an algorithm of the config needs the values of calibration data."""
        return any(algorithm.needs_data for algorithm in self.config.algorithms)

    def needs_data(self, plan: Plan) -> bool:
        """Return whether all batches are read, and not only the first one for its shape."""
        return plan.needs_data or self.fast_finetune is not None or self.algorithms_need_data

    def data_stamp(self, plan: Plan) -> str | None:
        """Return what reports say of the data that decided anything; None if it is real."""
        return self.batches.stamp if self.needs_data(plan) else None

    def data_of(self, plan: Plan) -> Mapping[str, Any] | None:
        """Return the fingerprint of the data that decided anything; None if none did."""
        return self.batches.fingerprint if self.needs_data(plan) else None

    def header(self, state: CalibrationState) -> dict[str, Any]:
        """Return what results record of the run, besides what the steps have kept."""
        return {
            **self.model_digests,
            "seed": self.seed,
            "data": self.data_of(state.plan),
            "stamp": self.data_stamp(state.plan),
            # The step keeps the mode under this name if it has changed weights
            "fast_finetune": None,
            "dpu_accuracy": self.dpu_accuracy,
        }

    @cached_property
    def model_digests(self) -> dict[str, dict[str, str]]:
        """Return the digests of the model's layers and weights; takes a second per GB."""
        return fingerprint.model_digests(self.target.original)

    @cached_property
    def _key(self) -> Mapping[str, Any]:
        """Return what every checkpoint of this run belongs to."""
        key = {
            name: fingerprint.value_digest(digests)
            for name, digests in self.model_digests.items()
        }
        key["config"] = fingerprint.config_digest(self.config)
        return {**key, **self.facts}

    def stored(self, saved_as: str, **key: Any) -> Snapshot | None:
        """Return the snapshot of a stage that a stopped run left, if this run resumes it.

        Args:
            saved_as: the name of the checkpoint.
            key: what else the snapshot depends on.

        Raises:
            ResultError: it is damaged, or belongs to another run.
        """
        if self.checkpoints is None:
            return None
        return self.checkpoints.restore(saved_as, {**self._key, **key})

    def shared_snapshot(self, saved_as: str) -> Snapshot | None:
        """Return what `stored` returns on the first rank, on all ranks."""
        snapshot = self.stored(saved_as)
        place = f"the checkpoint of {saved_as}"
        is_stored = self.ranks.broadcast(snapshot is not None, place)
        if not is_stored:
            return None
        from quantizer.calibration.snapshots import share_snapshot

        return share_snapshot(snapshot or Snapshot({}, {}), self.ranks, place)

    def first_batch(self) -> Batch:
        """Return the first batch, on the target's device.

        Raises:
            DataError: there is none.
        """
        return self.batches.first().to(self.target.original.device)

    def read(self, graph: Graph | None = None) -> Iterator[Batch]:
        """Yield the calibration data without padding, on the target's device.

        Args:
            graph: the trace that they run through; by default that of the target, if it is
                traced.
        """
        original = self.target.original
        if graph is None and self.target.is_traced:
            graph = original
        batches = self.batches.without_padding(graph)
        return (batch.to(original.device) for batch in batches)

    def read_again(self, step: str, remedy: str, graph: Graph | None = None) -> Iterator[Batch]:
        """Yield the calibration data another time, for a step that needs the same batches.

        Args:
            step: that needs them.
            remedy: what to do if they are not the same.
            graph: as `read` takes it.

        Raises:
            DataError: the batches are not those that calibration saw.
        """
        different = DataError(
            f"{self.batches.label} gives different batches when it is read again, and {step} "
            "reads it more than once",
            help=f"draw random crops and orders from a fixed seed, or {remedy}",
        )
        seen = self.batches.fingerprint
        for batch in self.read(graph):
            if not self.batches.repeats:
                raise different
            yield batch
        if seen is not None and self.batches.fingerprint != seen:
            raise different


Stage = Literal["plan", "decide", "adjust", "observe", "scale", "correct", "finish"]
"""Where a step runs: the steps of a stage follow those of the stages before it.

"decide" changes the network as its first batches demand, "adjust" rewrites weights before they
are observed, and "correct" changes what the scales have made.
"""
STAGES: tuple[Stage, ...] = get_args(Stage)
Condition = Callable[[CalibrationRequest, CalibrationState], bool]


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
    when: Condition = lambda request, state: True


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
