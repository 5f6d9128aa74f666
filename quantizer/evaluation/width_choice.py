"""Chooses bit widths under a size budget, from what each width costs each weight."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantizer.algorithms.budget import Option, choose
from quantizer.errors import GateError
from quantizer.evaluation.analyze import Analysis, GetBatches, measured_noise
from quantizer.plan.model import Plan

CURVE_POINTS = 24
"""Budgets between the smallest and the largest widths for which a curve has the best choice."""

LARGEST_SIZE = 1e12
"""No number of a budget may be larger, in any unit: a limit in bytes has to be finite."""


@dataclass(frozen=True)
class Budget:
    """A size limit. One field is set.

    Attributes:
        bits: the most bits of a value of the analysed weights in the mean, without scales.
        share: the most bytes, as a share of those that all weights have in the config.
        max_bytes: the most bytes of all weights, with scales.
    """

    bits: float | None = None
    share: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class MeasuredChoice:
    """Widths with the energy of the output noise that they make on a few batches.

    Attributes:
        widths: the index of the width of each weight.
        noise: the energy.
    """

    widths: tuple[int, ...]
    noise: float


def choice_line(label: str, analysis: Analysis, choice: MeasuredChoice) -> str:
    """Return a line about a choice. It begins with `label`."""
    widths = choice.widths
    megabytes = analysis.bytes(widths) / 1e6
    predicted_db = analysis.db(analysis.total(widths))
    measured_db = analysis.db(choice.noise)
    return (
        f"{label}: {analysis.mean_bits(widths):.3f} bits per weight, weights "
        f"{megabytes:.3f} MB, output {predicted_db:.2f} dB predicted, "
        f"{measured_db:.2f} dB measured"
    )


def measured_choices(
    plan: Plan, analysis: Analysis, budget: Budget, batches: GetBatches
) -> dict[str, MeasuredChoice]:
    """Return the best mixed widths, by "mixed", and the largest uniform width, by "uniform".

    Without a uniform width within the budget, only the first.

    Raises:
        GateError: the smallest widths are too large.
    """
    choices = {"mixed": best_choice(analysis, budget)}
    uniform = uniform_choice(analysis, budget)
    if uniform is not None:
        choices["uniform"] = uniform
    measured: dict[str, MeasuredChoice] = {}
    for label, choice in choices.items():
        noise = measured_noise(plan, analysis, choice, batches)
        measured[label] = MeasuredChoice(choice, noise)
    return measured


def best_choice(analysis: Analysis, budget: Budget) -> tuple[int, ...]:
    """Return the choice with the least predicted noise within the budget.

    Raises:
        GateError: the smallest widths are too large.
    """
    costs, limit = _costs(analysis, budget)
    groups = _row_groups(analysis)
    items = []
    for rows in groups:
        options = []
        for index in range(len(analysis.widths)):
            sizes = []
            noises = []
            for row in rows:
                sizes.append(costs[row][index])
                noises.append(analysis.rows[row].noise[index])
            option = Option(sum(sizes), math.fsum(noises))
            options.append(option)
        items.append(options)
    choice = choose(items, limit)
    if choice is None:
        bits = analysis.bits
        smallest = [bits.index(min(bits))] * len(analysis.rows)
        raise GateError(
            "the budget cannot be met: the smallest choice takes "
            f"{analysis.mean_bits(smallest):.4g} bits per weight, "
            f"{analysis.bytes(smallest) / 1e6:.4g} MB with all other weights "
            f"({analysis.other_bytes / 1e6:.4g} MB) and scales",
            help="raise the budget, or give smaller widths in <--choices>",
        )
    by_row = [0] * len(analysis.rows)
    for rows, index in zip(groups, choice, strict=True):
        for row in rows:
            by_row[row] = index
    return tuple(by_row)


def _row_groups(analysis: Analysis) -> list[Sequence[int]]:
    """Return the numbers of all rows, in groups that must have one width each."""
    first_of: dict[int, Sequence[int]] = {}
    tied: set[int] = set()
    for rows in analysis.tied:
        first_of[rows[0]] = rows
        tied.update(rows)
    groups: list[Sequence[int]] = []
    for number in range(len(analysis.rows)):
        if number in first_of:
            groups.append(first_of[number])
        elif number not in tied:
            groups.append([number])
    return groups


def uniform_choice(analysis: Analysis, budget: Budget) -> tuple[int, ...] | None:
    """Return the widest single width for all weights within the budget; None if all exceed
    it.
    """
    costs, limit = _costs(analysis, budget)
    fitting = []
    for index in range(len(analysis.widths)):
        if sum(sizes[index] for sizes in costs) <= limit:
            fitting.append(index)
    if not fitting:
        return None
    widest = max(fitting, key=analysis.bits.__getitem__)
    return (widest,) * len(analysis.rows)


def budget_curve(analysis: Analysis) -> list[tuple[int, ...]]:
    """Return the best choices under growing budgets, from the smallest to the largest
    widths.
    """
    smallest = analysis.other_bytes
    largest = analysis.other_bytes
    for row in analysis.rows:
        smallest += min(row.sizes)
        largest += max(row.sizes)
    span = largest - smallest
    choices = []
    for step in range(CURVE_POINTS):
        max_bytes = smallest + span * step // (CURVE_POINTS - 1)
        choices.append(best_choice(analysis, Budget(max_bytes=max_bytes)))
    return list(dict.fromkeys(choices))


def _costs(analysis: Analysis, budget: Budget) -> tuple[list[list[int]], int]:
    """Return what each row costs at each width, and the most that all rows may cost.

    Both are in bits of codes if the budget is in bits, and else in bytes with scales.
    """
    if budget.bits is not None:
        bits = analysis.bits
        costs = []
        for row in analysis.rows:
            costs.append([row.values * width for width in bits])
        values = sum(row.values for row in analysis.rows)
        limit = math.floor(budget.bits * values)
        return costs, limit
    limit = budget.max_bytes or 0
    if budget.share is not None:
        size = analysis.other_bytes
        for row in analysis.rows:
            size += row.config_bytes
        limit = math.floor(budget.share * size)
    limit -= analysis.other_bytes
    costs = []
    for row in analysis.rows:
        costs.append(list(row.sizes))
    return costs, limit
