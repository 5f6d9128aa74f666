"""Climbs a ladder: changes a config step by step, from cheap changes to dear ones, until all
gates hold or the time is up.

Each step has some trials. The best of them is the next rung if it is better than the rung
before. So no rung is worse than the one before.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quantizer.errors import QuantizerError
from quantizer.evaluation.ladder.admission import Admission, reason_of
from quantizer.evaluation.ladder.rungs import (
    Ground,
    Judged,
    OutOfTimeError,
    Rung,
    Standing,
    Trial,
)
from quantizer.evaluation.ladder.steps import LADDER, LadderStep

# The results of steps
START = "start"
KEPT = "kept"
TAKEN_BACK = "taken back"
REPLACED = "replaced"
NOT_TRIED = "not tried"
# A reason
OUT_OF_TIME = "the time was up"


@dataclass
class Row:
    """What a step of a climb did, as a row of the table.

    Attributes:
        step: its name.
        cost: what it costs, and why.
        result: START, KEPT, TAKEN_BACK, REPLACED or NOT_TRIED.
        change: the change of the best trial; empty if none was measured.
        undoes: the name of the earlier step whose change the best trial removes.
        judged: what was measured on the best trial; None if none was measured.
        reasons: why trials were not measured.
        tests: how many configs were calibrated and tested.
        seconds: the time of the whole step.
    """

    step: str
    cost: str = ""
    result: str = NOT_TRIED
    change: str = ""
    undoes: str = ""
    judged: Judged | None = None
    reasons: list[str] = field(default_factory=list)
    tests: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Climb:
    """The result of a climb.

    Attributes:
        rung: the best rung.
        judged: what was measured on it.
        rows: the start and the steps, in order.
    """

    rung: Rung
    judged: Judged
    rows: Sequence[Row]

    @property
    def changes(self) -> list[str]:
        """Return each change that is in the best rung, with the name of its step."""
        return [f"{row.step}: {row.change}" for row in self.rows if row.result == KEPT]

    @property
    def is_out_of_time(self) -> bool:
        """Return whether the time ended the climb."""
        return any(OUT_OF_TIME in row.reasons for row in self.rows)


@dataclass
class Climber:
    """Climbs one ladder.

    Args:
        ground: what all rungs share.
        seconds: the time after which no rung is measured.
        steps: the steps of the ladder, in order.
        after_row: called with the row of each step that is done.
        clock: returns the time, in seconds.
    """

    ground: Ground
    seconds: float
    steps: Sequence[LadderStep] = LADDER
    after_row: Callable[[Row], None] = lambda row: None
    clock: Callable[[], float] = time.monotonic
    _measured: dict[str, Judged] = field(default_factory=dict)

    def climb(self, start: Rung, judged: Judged | None = None) -> Climb:
        """Change a rung step by step until all gates hold.

        Nothing is changed if a gate does not hold for the float network either.

        Args:
            start: the rung to begin with.
            judged: what was measured on it; None to measure it.

        Raises:
            QuantizerError: the start cannot be measured.
        """
        began = self.clock()
        row = Row(START, result=START)
        if judged is None:
            judged = self.ground.judge(start)
            row.tests = 1
        row.judged = judged
        row.seconds = self.clock() - began
        self.after_row(row)
        rows = [row]
        best = start
        for step in self.steps:
            if judged.is_met or judged.missed_by_float:
                break
            row, rung = self._step(step, best, judged, deadline=began + self.seconds)
            rows.append(row)
            self.after_row(row)
            if row.judged is not None and row.result == KEPT:
                best = rung
                judged = row.judged
                _mark_replaced(rows, row.undoes)
        return Climb(best, judged, rows)

    def _step(
        self, step: LadderStep, best: Rung, judged: Judged, *, deadline: float
    ) -> tuple[Row, Rung]:
        """Measure the trials of a step, and return its row and the rung of the best trial.

        A trial after which all gates hold is the last.

        Args:
            step: of the ladder.
            best: the rung that its trials change.
            judged: what was measured on `best`.
            deadline: the clock's time after which no rung is measured.
        """
        began = self.clock()
        row = Row(step.name, step.cost)
        tested_before = len(self._measured)

        def attempt(rung: Rung) -> Judged:
            """Return what is measured on a rung. Equal rungs are measured once."""
            if rung.key not in self._measured:
                if self.clock() >= deadline:
                    raise OutOfTimeError
                self._measured[rung.key] = self.ground.judge(rung)
            return self._measured[rung.key]

        admission = Admission(self.ground, best)
        chosen = best
        try:
            if began >= deadline:
                raise OutOfTimeError
            standing = Standing(self.ground, best, admission.plan, attempt)
            for trial in _trials(step, standing, row):
                rung = _changed(trial, admission, row)
                result = _measured_on(rung, attempt, row)
                if rung is None or result is None:
                    continue
                if _is_preferred(result, row.judged, judged):
                    row.judged = result
                    row.change = trial.change
                    row.undoes = trial.undoes
                    chosen = rung
                if result.is_met:
                    break
        except OutOfTimeError:
            row.reasons.append(OUT_OF_TIME)
        if row.judged is not None:
            row.result = KEPT if row.judged.is_better_than(judged) else TAKEN_BACK
        row.tests = len(self._measured) - tested_before
        row.seconds = self.clock() - began
        return row, chosen


def _mark_replaced(rows: Sequence[Row], step: str) -> None:
    """Mark the row of a step whose change a later one has undone."""
    for row in rows:
        if row.step == step and row.result == KEPT:
            row.result = REPLACED


def _trials(step: LadderStep, standing: Standing, row: Row) -> Iterator[Trial]:
    """Yield the trials of a step. An error while they are made ends them, with a reason in the
    row.
    """
    trials = step.trials(standing)
    while True:
        try:
            trial = next(trials, None)
        except QuantizerError as error:
            row.reasons.append(reason_of(error))
            return
        if trial is None:
            return
        yield trial


def _is_preferred(result: Judged, best: Judged | None, before: Judged) -> bool:
    """Return whether a trial replaces the best trial of its step.

    Args:
        result: what was measured on the trial.
        best: what was measured on the best trial of the step until then; None without one.
        before: what was measured on the rung that both change.
    """
    if best is None or result.is_better_than(best):
        return True
    # The best trial may move one gate nearer and another one away, so that neither trial is
    # better than the other. Only a trial that is better than the rung before can be kept
    return result.is_better_than(before) and not best.is_better_than(before)


def _measured_on(
    rung: Rung | None, attempt: Callable[[Rung], Judged], row: Row
) -> Judged | None:
    """Return what is measured on a rung; None without a rung. If measuring fails, return None
    and append the reason to the row.
    """
    if rung is None:
        return None
    try:
        return attempt(rung)
    except QuantizerError as error:
        row.reasons.append(reason_of(error))
        return None


def _changed(trial: Trial, admission: Admission, row: Row) -> Rung | None:
    """Return the rung of a trial. If it need not be measured, return None and append the reason
    to the row.
    """
    try:
        rung = trial.apply(admission.rung)
        admission.require_worth_measuring(rung)
    except QuantizerError as error:
        reason = reason_of(error)
        if reason not in row.reasons:
            row.reasons.append(reason)
        return None
    return rung
