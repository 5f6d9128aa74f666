"""A search keeps what gains something, from cheap to dear, and never ends below its start."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.configs import document

from quantizer.commands.searching import steps as table
from quantizer.commands.searching.search import (
    KEPT,
    NOT_TRIED,
    OUT_OF_TIME,
    REPLACED,
    TAKEN_BACK,
    Search,
    SearchStep,
)
from quantizer.commands.searching.steps import STEPS
from quantizer.commands.searching.trials import Change, Figures, Trial
from quantizer.commands.searching.tune import with_tuning_comments
from quantizer.config.algorithms import ConfigChange, ConfigStep
from quantizer.declarations import Plugin
from quantizer.errors import DataError, UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace

START_BITS = 8
FORMATS = (2, 3, 4, 5, 6, 7)
"""The width of all tensors tells the trials of these tests apart."""


@cache
def graph() -> Graph:
    torch.manual_seed(0)
    return trace(torch.nn.Linear(4, 2).eval(), (torch.randn(3, 4),))


def with_bits(bits: int) -> Callable[[Trial], Trial]:
    return lambda trial: Trial(document(overall={"bit_width": bits}), trial.fast_finetune)


def step(name: str, *widths: int) -> SearchStep:
    def trials(search: Search) -> Iterator[Change]:
        for bits in widths:
            yield Change(f"{bits} bits", with_bits(bits))

    return SearchStep(name, "nothing", trials)


def bits_of(trial: Trial) -> int:
    return int(trial.document["overall_quantize_config"]["bit_width"])


def figures(shortfall: float | tuple[float, ...], sqnr_db: float = 0.0) -> Figures:
    shortfalls = shortfall if isinstance(shortfall, tuple) else (shortfall,)
    return Figures({"sqnr_db": sqnr_db}, shortfalls, 1)


@dataclass
class Widths:
    """A context in which each width has its result."""

    results: dict[int, Figures | Exception]
    refused: str
    measured: list[int] = field(default_factory=list)
    original: Graph = field(default_factory=graph)

    def measure(self, trial: Trial) -> Figures:
        self.measured.append(bits_of(trial))
        result = self.results[bits_of(trial)]
        if isinstance(result, Exception):
            raise result
        return result

    def calibrate(self, trial: Trial) -> Any:
        raise AssertionError(trial)

    def batches(self) -> Iterator[Any]:
        return iter(())

    def refusal(self, plan: Any, algorithms: Any) -> str:
        return self.refused


def search_with(
    steps: list[SearchStep],
    results: dict[int, Figures | Exception],
    seconds: float = 1e9,
    clock: Callable[[], float] = lambda: 0.0,
    refused: str = "",
) -> tuple[Search, list[int]]:
    """Search among widths, each with its result; returns what was measured, too."""
    context = Widths(results, refused)
    search = Search(context, steps, seconds, clock=clock)
    search.run(Trial(document(overall={"bit_width": START_BITS})))
    return search, context.measured


def results_of(result: Search) -> list[str]:
    return [row.result for row in result.rows[1:]]


def test_a_start_that_meets_the_gates_is_left_alone() -> None:
    result, measured = search_with([step("a", 4)], {8: figures(0.0)})
    assert (measured, result.changes, bits_of(result.best)) == ([8], [], 8)


def test_it_ends_with_the_first_change_that_meets_the_gates() -> None:
    steps = [step("a", 4, 5), step("b", 6)]
    result, measured = search_with(steps, {8: figures(0.5), 4: figures(0.0), 5: figures(0.0)})
    assert measured == [8, 4]
    assert result.figures.is_met and result.changes == ["a: 4 bits"]


def test_a_step_that_gains_nothing_is_taken_back() -> None:
    steps = [step("worse", 4), step("equal", 5), step("better", 6, 7)]
    values = {8: 0.5, 4: 0.6, 5: 0.5, 6: 0.3, 7: 0.2}
    result, _ = search_with(steps, {bits: figures(value) for bits, value in values.items()})
    assert results_of(result) == [TAKEN_BACK, TAKEN_BACK, KEPT]
    assert (bits_of(result.best), result.changes) == (7, ["better: 7 bits"])
    assert not result.figures.is_met and not result.is_out_of_time


def test_the_outputs_decide_between_equal_gates() -> None:
    """A class may stay the same until several changes together turn it."""
    steps = [step("a", 4), step("b", 5)]
    results = {8: figures(0.5, 20.0), 4: figures(0.499, 20.05), 5: figures(0.5, 23.0)}
    result, _ = search_with(steps, dict(results))
    assert results_of(result) == [TAKEN_BACK, KEPT]


def test_no_gate_may_get_worse_for_another() -> None:
    steps = [step("a", 4, 5)]
    results = {8: figures((0.4, 0.2)), 4: figures((0.0, 0.3)), 5: figures((0.3, 0.2))}
    result, _ = search_with(steps, dict(results))
    assert result.changes == ["a: 5 bits"]
    result, _ = search_with([step("a", 4)], dict(results))
    assert results_of(result) == [TAKEN_BACK]


def test_a_change_that_a_later_one_undoes_is_not_listed() -> None:
    def trials(search: Search) -> Iterator[Change]:
        yield Change("4 bits", with_bits(4), undoes="a")

    steps = [step("a", 5), SearchStep("b", "", trials)]
    result, _ = search_with(steps, {8: figures(0.5), 5: figures(0.4), 4: figures(0.3)})
    assert results_of(result) == [REPLACED, KEPT]
    assert result.changes == ["b: 4 bits"]


def test_undefined_figures_are_never_better() -> None:
    result, _ = search_with([step("a", 4)], {8: figures(0.5), 4: figures(math.nan)})
    assert results_of(result) == [TAKEN_BACK]
    result, _ = search_with([step("a", 4)], {8: figures(math.inf), 4: figures(0.5)})
    assert results_of(result) == [KEPT]


def test_a_trial_that_fails_is_a_reason_and_the_others_go_on() -> None:
    steps = [step("a", 4, 5), step("b", 6)]
    results = {8: figures(0.5), 4: DataError("few"), 5: figures(0.4), 6: DataError("none")}
    result, _ = search_with(steps, dict(results))
    assert results_of(result) == [KEPT, NOT_TRIED]
    assert [row.reasons for row in result.rows[1:]] == [["few"], ["none"]]


def test_what_the_config_the_model_or_a_target_has_no_place_for_is_not_measured() -> None:
    def refused(search: Search) -> Iterator[Change]:
        raise UsageError("no word")
        yield

    def wrong(trial: Trial) -> Trial:
        changed = copy.deepcopy(dict(trial.document))
        changed["overall_quantize_config"]["method"] = "guess"
        return Trial(changed)

    def wrong_trials(search: Search) -> Iterator[Change]:
        yield Change("guess", wrong)

    steps = [
        SearchStep("refused", "", refused),
        SearchStep("wrong", "", wrong_trials),
        step("same", 8),
    ]
    result, measured = search_with(steps, {8: figures(0.5)})
    assert (measured, results_of(result)) == ([8], [NOT_TRIED] * 3)
    reasons = [row.reasons[0] for row in result.rows[1:]]
    assert reasons[0] == "no word" and "method" in reasons[1]
    assert reasons[2] == "changes nothing in this model"
    result, measured = search_with([step("a", 4)], {8: figures(0.5)}, refused="too wide")
    assert (measured, result.rows[1].reasons) == ([8], ["too wide"])


def test_no_trial_begins_after_the_time() -> None:
    ticks = iter(range(1000))
    steps = [step("a", 4, 5, 6), step("b", 7)]
    results = {bits: figures(1 / bits) for bits in (8, *FORMATS)}
    result, measured = search_with(
        steps, dict(results), seconds=5, clock=lambda: float(next(ticks))
    )
    assert 1 < len(measured) < 4 and result.is_out_of_time
    assert result.rows[-1].reasons == [OUT_OF_TIME]
    none, measured = search_with(steps, dict(results), seconds=0)
    assert (measured, bits_of(none.best)) == ([8], 8)


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0, math.inf, math.nan]), min_size=7, max_size=7),
    st.lists(st.integers(10, 30), min_size=7, max_size=7),
)
def test_no_row_that_is_kept_is_worse_than_the_one_before(
    shortfalls: list[float], ratios: list[int]
) -> None:
    results = {}
    for bits, shortfall, ratio in zip((8, *FORMATS), shortfalls, ratios, strict=True):
        results[bits] = figures(shortfall, float(ratio))
    steps = [step("a", 2, 3), step("b", 4), step("c", 5, 6, 7)]
    result, _ = search_with(steps, dict(results))
    before = results[8]
    for row in result.rows[1:]:
        if row.result == KEPT:
            assert row.figures is not None and row.figures.is_better_than(before)
            before = row.figures
    assert result.figures is before


def test_each_step_has_a_name_of_its_own_and_says_what_it_costs() -> None:
    assert len({row.name for row in STEPS}) == len(STEPS)
    assert all(row.cost for row in STEPS)


@pytest.mark.parametrize("order", [("ranges", "rounding"), ("rounding", "float layers")])
def test_cheap_steps_come_first(order: tuple[str, str]) -> None:
    names = [row.name for row in STEPS]
    assert names.index(order[0]) < names.index(order[1])


def test_plugins_add_steps_and_changes_and_without_them_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = ConfigChange("weights alone", setting="include_cle", needs_activations=False)
    both = ConfigChange("both", algorithm={"name": "gptq"})
    few_bits = ConfigChange("few bits", setting="include_cle", most_bits=4)
    tuned = ConfigChange("finetuned", fast_finetune="adaround")
    found = {
        "a": ConfigStep("late", "much", (weights, both)),
        "b": ConfigStep("early", "little", (tuned, few_bits), place=1),
        "c": ConfigStep("late", "more", (few_bits,)),
    }
    monkeypatch.setattr(table, "loaded", found.__getitem__)
    rows = [Plugin(name, search=name) for name in found]
    monkeypatch.setattr(table, "plugins", lambda: rows)
    early, late = table.declared_steps()
    assert [(early.name, early.cost), (late.name, late.cost)] == [
        ("early", "little"),
        ("late", "much"),
    ]
    search, _ = search_with([], {8: figures(0.5)})
    assert [change.text for change in early.changes(search)] == ["finetuned"]
    (change,) = late.changes(search)
    before = Trial(search.best.document, "adaround")
    assert (change.text, change.undoes, change.apply(before).fast_finetune) == (
        "both",
        "early",
        None,
    )
    monkeypatch.setattr(table, "plugins", lambda: rows[2:])
    (none,) = table.declared_steps()
    with pytest.raises(UsageError, match="changes nothing"):
        list(none.changes(search))


def test_comments_say_what_was_changed_and_changes_nothing_else() -> None:
    value = {"$schema": "x", "//": "mine", **document()}
    once = with_tuning_comments(value, ["a: b"], None)
    twice = with_tuning_comments(once, ["c: d"], "adaround")
    assert list(once)[:3] == ["$schema", "//", "// quantizer tune"]
    assert twice["// quantizer tune"] == ["a: b", "c: d"]
    assert twice["// calibrate with"] == "--fast_finetune adaround"
    assert with_tuning_comments(twice, [], None).keys() == once.keys()
    plain = {key: item for key, item in twice.items() if not key.startswith("// ")}
    assert json.dumps(plain) == json.dumps(value)
    assert with_tuning_comments(value, [], None) == value
