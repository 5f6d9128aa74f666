"""What all trials of a search share: the model, its data and how a trial is measured. Refuses
trials that need not be measured.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from quantizer.commands.searching.trial import Figures, Trial
from quantizer.config.diagnostics import ConfigError
from quantizer.config.model import Algorithm
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.plan.fitted_algorithms import why_algorithm_is_idle
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch

NO_CHANGE = "changes nothing in this model"


class Context(Protocol):
    """What all trials of a search share."""

    @property
    def original(self) -> Graph:
        """Return the traced model, before passes."""

    def measure(self, trial: Trial) -> Figures:
        """Calibrate and test a trial."""

    def calibrate(self, trial: Trial) -> tuple[Calibrated, Plan]:
        """Calibrate a trial in memory, and return its plan, too."""

    def batches(self) -> Iterator[Batch]:
        """Begin a pass over the calibration data, on the model's device."""

    def refusal(self, plan: Plan, algorithms: Iterable[Algorithm]) -> str:
        """Return why a target cannot hold a plan, or what its algorithms make of it. The text
        is empty if all targets can.
        """


def plan_of(trial: Trial, original: Graph) -> Plan:
    """Return the plan of a trial for a model, before algorithms."""
    graph = run_passes(original, trial.config.settings)
    return resolve_plan(trial.config, graph, original)


def require_worth_measuring(
    changed: Trial, before: Trial, plan_before: Plan, context: Context
) -> None:
    """Raise an error if a changed trial need not be measured.

    Args:
        changed: the trial after a change.
        before: the trial before.
        plan_before: the plan of `before`.
        context: of the search.

    Raises:
        ConfigError: its config has errors, in itself or for this model.
        UsageError: it changes nothing, a new algorithm has no layer to change, or a target
            cannot hold it.
    """
    plan = plan_of(changed, context.original)
    errors = [finding for finding in plan.diagnostics if finding.severity == "error"]
    if errors:
        raise ConfigError(errors)
    present = {algorithm.name for algorithm in before.config.algorithms}
    for algorithm in changed.config.algorithms:
        if algorithm.name not in present:
            reason = why_algorithm_is_idle(algorithm, plan)
            if reason is not None:
                raise UsageError(reason)
    if _effect(changed, plan) == _effect(before, plan_before):
        raise UsageError(NO_CHANGE)
    refusal = context.refusal(plan, changed.config.algorithms)
    if refusal:
        raise UsageError(refusal)


def _effect(trial: Trial, plan: Plan) -> tuple[Any, ...]:
    """Return all that a trial does to a model. Trials with the same effect have the same
    results.
    """
    # If equalization changes something, the graph's changes have it. Places are lines of a file
    settings = replace(trial.config.settings, include_cle=False, places={})
    algorithms = [algorithm.settings for algorithm in trial.config.algorithms]
    return plan.specs, settings, algorithms, plan.graph.changes, trial.fast_finetune
