"""Searches for a config with which all gates hold: changes a config step by step, from cheap
changes to dear ones, until they hold or the time is up.

Each step tries some changes. The best of them is kept if it is better than the config before.
So no step ends with a worse config.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantizer.commands.searching.trials import Change, Figures, SearchContext, Trial, plan_of
from quantizer.config.diagnostics import ConfigError
from quantizer.config.json_types import JsonObject
from quantizer.errors import QuantizerError, UsageError
from quantizer.plan.fit.fitted_config import why_algorithm_is_idle
from quantizer.plan.model import Plan
from quantizer.report.tables import finite_row, number_text
from quantizer.report.view import Listing

# The results of steps
START = "start"
KEPT = "kept"
TAKEN_BACK = "taken back"
REPLACED = "replaced"
NOT_TRIED = "not tried"
# A reason
OUT_OF_TIME = "the time was up"
NO_CHANGE = "changes nothing in this model"
_MAX_REASON = 150
"""Characters of a reason; tune.json has all of it."""


class OutOfTimeError(Exception):
    """A trial would be measured after the time budget."""


@dataclass(frozen=True)
class SearchStep:
    """A step of a search.

    Attributes:
        name: in tables.
        cost: what it costs to measure and at run time, as words.
        changes: yields the changes to try, each of the best trial so far. An error that it
            raises is the reason why there is nothing to change.
    """

    name: str
    cost: str
    changes: Callable[[Search], Iterator[Change]]


@dataclass
class Row:
    """What a step of a search did, as a row of the table.

    Attributes:
        step: its name.
        cost: what it costs, and why.
        result: START, KEPT, TAKEN_BACK, REPLACED or NOT_TRIED.
        change: the change of the best trial; empty if none was measured.
        undoes: the name of the earlier step whose change the best trial removes.
        figures: what was measured on the best trial; None if none was measured.
        reasons: why trials were not measured.
        tests: how many configs were calibrated and tested.
        seconds: the time of the whole step.
    """

    step: str
    cost: str = ""
    result: str = NOT_TRIED
    change: str = ""
    undoes: str = ""
    figures: Figures | None = None
    reasons: list[str] = field(default_factory=list)
    tests: int = 0
    seconds: float = 0.0


class Search:
    """Measures trials in order until all gates hold, and keeps the best.

    Args:
        context: what all trials share.
        steps: in order.
        seconds: the time after which no trial is measured.
        clock: returns the time, in seconds.

    Attributes:
        context: as given.
        best: the best trial so far.
        figures: what was measured on it.
        rows: the start and the steps, in order.
    """

    best: Trial
    figures: Figures

    def __init__(
        self,
        context: SearchContext,
        steps: Sequence[SearchStep],
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.context = context
        self.rows: list[Row] = []
        self._steps = steps
        self._clock = clock
        self._seconds = seconds
        self._deadline = math.inf
        self._measured: dict[str, Figures] = {}
        self._tests = 0
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """Return the plan of the best trial, before algorithms."""
        if self._plan is None:
            self._plan = plan_of(self.best, self.context.original)
        return self._plan

    @property
    def changes(self) -> list[str]:
        """Return each change that is in the best trial, with the name of its step."""
        return [f"{row.step}: {row.change}" for row in self.rows if row.result == KEPT]

    @property
    def is_out_of_time(self) -> bool:
        """Return whether the time ended the search."""
        return any(OUT_OF_TIME in row.reasons for row in self.rows)

    def run(self, start: Trial, figures: Figures | None = None) -> None:
        """Change a trial step by step until all gates hold.

        Nothing is changed if a gate does not hold for the float network either.

        Args:
            start: the trial to begin with.
            figures: what was measured on it; None to measure it.

        Raises:
            QuantizerError: the start cannot be measured.
        """
        began = self._clock()
        self._deadline = began + self._seconds
        row = Row(START, result=START)
        if figures is None:
            figures = self.context.measure(start)
            row.tests = 1
        row.figures = figures
        self.best = start
        self.figures = figures
        self._add(row, began)
        for step in self._steps:
            if self.figures.is_met or self.figures.missed_by_float:
                return
            self._run_step(step)

    def measure(self, trial: Trial) -> Figures:
        """Return what is measured on a trial. Equal trials are measured once.

        Raises:
            OutOfTimeError: the time is up.
            QuantizerError: it cannot be measured.
        """
        if trial.key not in self._measured:
            self._require_time()
            self.record(trial, self.context.measure(trial))
            self._tests += 1
        return self._measured[trial.key]

    def record(self, trial: Trial, figures: Figures) -> None:
        """Record what was measured on a trial, or on another one with the same effect."""
        self._measured[trial.key] = figures

    def _run_step(self, step: SearchStep) -> None:
        """Measure the trials of a step, and keep the best of them if it is better than the one
        before.

        A trial with which all gates hold is the last.
        """
        began = self._clock()
        row = Row(step.name, step.cost)
        tests_before = self._tests
        preferred = self.best
        try:
            self._require_time()
            for change in step.changes(self):
                trial = self._tried(change, row)
                if trial is None:
                    continue
                figures = self.measure(trial)
                if self._is_preferred(figures, row.figures):
                    row.figures = figures
                    row.change = change.text
                    row.undoes = change.undoes
                    preferred = trial
                if figures.is_met:
                    break
        except OutOfTimeError:
            row.reasons.append(OUT_OF_TIME)
        except QuantizerError as error:
            # There are no changes, or they cannot be found
            row.reasons.append(_reason_of(error))
        row.tests = self._tests - tests_before
        if row.figures is not None:
            row.result = TAKEN_BACK
            if row.figures.is_better_than(self.figures):
                row.result = KEPT
                self.best = preferred
                self.figures = row.figures
                self._plan = None
                self._mark_replaced(row.undoes)
        self._add(row, began)

    def _tried(self, change: Change, row: Row) -> Trial | None:
        """Return the trial of a change, measured. If it need not or cannot be measured, return
        None and append the reason to the row.
        """
        try:
            trial = change.apply(self.best)
            require_worth_measuring(trial, self.best, self.plan, self.context)
            self.measure(trial)
        except QuantizerError as error:
            reason = _reason_of(error)
            if reason not in row.reasons:
                row.reasons.append(reason)
            return None
        return trial

    def _is_preferred(self, figures: Figures, best: Figures | None) -> bool:
        """Return whether a trial replaces the best trial of its step.

        Args:
            figures: of the trial.
            best: of the best trial of the step until then; None without one.
        """
        if best is None or figures.is_better_than(best):
            return True
        # The best trial may move one gate nearer and another one away, so that neither trial is
        # better than the other. Only a trial that is better than the one before can be kept
        return figures.is_better_than(self.figures) and not best.is_better_than(self.figures)

    def _mark_replaced(self, step: str) -> None:
        """Mark the row of a step whose change a later one has undone."""
        for row in self.rows:
            if row.step == step and row.result == KEPT:
                row.result = REPLACED

    def _require_time(self) -> None:
        """Raise `OutOfTimeError` after the time budget."""
        if self._clock() >= self._deadline:
            raise OutOfTimeError

    def _add(self, row: Row, began: float) -> None:
        """Add the row of a step that is done."""
        row.seconds = self._clock() - began
        self.rows.append(row)


def _reason_of(error: QuantizerError) -> str:
    """Return the message of an error, without the place in a config."""
    if isinstance(error, ConfigError):
        for finding in error.diagnostics:
            if finding.severity == "error":
                return finding.message
    return error.message


def require_worth_measuring(
    changed: Trial, before: Trial, plan_before: Plan, context: SearchContext
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


def search_table(search: Search) -> Listing:
    """Return a table with a row for each step that was measured."""
    metrics = [gate.metric for gate in search.context.gates]
    columns = list(dict.fromkeys((*metrics, "sqnr_db")))
    lines = []
    for row in search.rows:
        if row.figures is None:
            continue
        texts = []
        for metric in columns:
            value = row.figures.gated.get(metric)
            texts.append(number_text(value, ".5g"))
        megabytes = f"{row.figures.weight_bytes / 1e6:.3f}"
        cost = (megabytes, str(row.tests), f"{row.seconds:.1f}")
        lines.append((row.step, *texts, *cost, row.result))
    titles = ("step", *columns, "MB", "tests", "s", "result")
    layouts = (titles, ("step", *columns, "MB", "s", "result"), ("step", *columns, "result"))
    return Listing(titles, lines, frozenset(titles[1:-1]), layouts)


def result_lines(search: Search, data: str, config: str) -> Iterator[str]:
    """Yield lines about what was changed, what was not tried and why, and the time.

    Args:
        search: with all its rows.
        data: a sentence on the data; empty if there is nothing to say.
        config: the path of the written config.
    """
    if search.figures.is_met and not search.changes:
        yield "all gates hold with the config as it is"
    for gate in search.figures.missed_by_float:
        yield f"{NOT_TRIED}: any change: the float network does not meet {gate} either"
    for change in search.changes:
        yield f"{KEPT}: {change}"
    for reason, steps in _not_tried(search.rows).items():
        yield f"{NOT_TRIED}: {', '.join(steps)}: {reason}"
    if data:
        yield f"data: {data}"
    yield f"config: {config}"
    mode = search.best.fast_finetune
    if mode is not None:
        yield f"calibrate with --fast_finetune {mode}, too: it is an option"


def _not_tried(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the steps that were not tried, by their reason."""
    steps_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if row.result != NOT_TRIED:
            continue
        reason = "; ".join(row.reasons)
        if len(reason) > _MAX_REASON:
            reason = f"{reason[:_MAX_REASON]}…"
        steps_by_reason.setdefault(reason, []).append(row.step)
    return steps_by_reason


def search_json(search: Search) -> JsonObject:
    """Return a search for programs."""
    return {
        "gates": [gate.text for gate in search.context.gates],
        "met": search.figures.is_met,
        "missed_by_float": list(search.figures.missed_by_float),
        "out_of_time": search.is_out_of_time,
        "changes": search.changes,
        "fast_finetune": search.best.fast_finetune,
        "steps": [_row_json(row) for row in search.rows],
    }


def _row_json(row: Row) -> JsonObject:
    content: JsonObject = {
        "step": row.step,
        "cost": row.cost,
        "result": row.result,
        "change": row.change,
        "reasons": list(row.reasons),
        "tests": row.tests,
        "seconds": round(row.seconds, 2),
    }
    if row.figures is not None:
        shortfall = math.fsum(row.figures.shortfalls)
        figures = {"weight_bytes": row.figures.weight_bytes, "shortfall": shortfall}
        content |= finite_row(figures)
        content["metrics"] = finite_row(row.figures.gated)
    return content
