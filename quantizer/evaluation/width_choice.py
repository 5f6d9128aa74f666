"""Chooses bit widths under a size budget, from what each width costs each weight, and changes a
config so that it has exactly these. The best choice is found by dynamic programming.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document
from quantizer.config.forms.level_edits import with_layer_entries
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.load import check_document
from quantizer.config.model import QuantizationSpec, Role
from quantizer.config.roles import base_role
from quantizer.errors import GateError, UsageError
from quantizer.evaluation.analyze import Analysis, GetBatches, WidthChoice, measured_noise
from quantizer.graph.ir import Graph
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

WidthChanges = Mapping[str, Mapping[Role, QuantizationSpec]]
"""For each layer with another width, the specs of its tensors."""
CURVE_POINTS = 24
"""Budgets between the smallest and the largest widths for which a curve has the best choice."""

LARGEST_SIZE = 1e12
"""No number of a budget may be larger, in any unit: a limit in bytes has to be finite."""

_MAX_STATES = 1 << 15
"""Partial choices kept at once. The result is the best as long as they suffice, which they do
where sizes repeat.
"""


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


@dataclass(frozen=True)
class SizedConfig:
    """A config with the best widths within a budget.

    Attributes:
        analysis: of the weights.
        choices: the best mixed widths, by "mixed", and the largest uniform width, by "uniform",
            if one is within the budget.
        best: the name of the choice with less noise.
        document: the config with it.
    """

    analysis: Analysis
    choices: Mapping[str, MeasuredChoice]
    best: str
    document: JsonObject

    def line(self, label: str, name: str) -> str:
        """Return a line about a choice, which it calls by `name`."""
        analysis = self.analysis
        choice = self.choices[label]
        widths = choice.widths
        megabytes = analysis.bytes(widths) / 1e6
        predicted_db = analysis.db(analysis.total(widths))
        measured_db = analysis.db(choice.noise)
        return (
            f"{name}: {analysis.mean_bits(widths):.3f} bits per weight, weights "
            f"{megabytes:.3f} MB, output {predicted_db:.2f} dB predicted, "
            f"{measured_db:.2f} dB measured"
        )


def sized_config(
    document: JsonMapping,
    plan: Plan,
    original: Graph,
    *,
    analysis: Analysis,
    budget: Budget,
    batches: GetBatches,
) -> SizedConfig:
    """Return a config with mixed widths or one uniform width: those with less noise.

    Args:
        document: the config to change.
        plan: of the config.
        original: the traced model, before passes.
        analysis: of the plan's weights.
        budget: of their size.
        batches: what the noise is measured on.

    Raises:
        GateError: the smallest widths are too large.
        ConfigError, UsageError: the config cannot have these widths.
    """
    widths = {"mixed": best_choice(analysis, budget)}
    uniform = uniform_choice(analysis, budget)
    if uniform is not None:
        widths["uniform"] = uniform
    choices = {}
    for label, choice in widths.items():
        noise = measured_noise(plan, analysis, choice, batches)
        choices[label] = MeasuredChoice(choice, noise)
    # The mixed widths, if both are equally good
    best = min(choices, key=lambda label: choices[label].noise)
    changes = chosen_specs(plan, analysis, choices[best].widths)
    changed = with_layer_entries(document, changes)
    _require_exact(plan, original, changes, changed)
    return SizedConfig(analysis, choices, best, changed)


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
            size = sum(costs[row][index] for row in rows)
            noise = math.fsum(analysis.rows[row].noise[index] for row in rows)
            options.append(Option(size, noise))
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
    tied = {number for rows in analysis.tied for number in rows}
    groups: dict[int, Sequence[int]] = {rows[0]: rows for rows in analysis.tied}
    for number in range(len(analysis.rows)):
        if number not in tied:
            groups[number] = [number]
    return [groups[first] for first in sorted(groups)]


def uniform_choice(analysis: Analysis, budget: Budget) -> tuple[int, ...] | None:
    """Return the widest single width for all weights within the budget; None if all exceed
    it.
    """
    costs, limit = _costs(analysis, budget)
    indices = range(len(analysis.widths))
    fitting = [index for index in indices if sum(sizes[index] for sizes in costs) <= limit]
    if not fitting:
        return None
    widest = max(fitting, key=analysis.bits.__getitem__)
    return (widest,) * len(analysis.rows)


def budget_curve(analysis: Analysis) -> list[tuple[int, ...]]:
    """Return the best choices under growing budgets, from the smallest to the largest
    widths.
    """
    smallest = analysis.other_bytes + sum(min(row.sizes) for row in analysis.rows)
    span = sum(max(row.sizes) - min(row.sizes) for row in analysis.rows)
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
        costs = [[row.values * width for width in bits] for row in analysis.rows]
        values = sum(row.values for row in analysis.rows)
        return costs, math.floor(budget.bits * values)
    limit = budget.max_bytes or 0
    if budget.share is not None:
        size = analysis.other_bytes + sum(row.config_bytes for row in analysis.rows)
        limit = math.floor(budget.share * size)
    return [list(row.sizes) for row in analysis.rows], limit - analysis.other_bytes


def chosen_specs(plan: Plan, analysis: Analysis, choice: WidthChoice) -> WidthChanges:
    """Return the specs of all tensors of each layer whose chosen width is not the config's."""
    changed: dict[str, dict[Role, QuantizationSpec]] = {}
    for row, index in zip(analysis.rows, choice, strict=True):
        width = analysis.widths[index]
        candidate = row.candidate
        specs = zip(candidate.layers, candidate.specs, strict=True)
        for name, spec in specs:
            resized = candidate.with_width(spec, width)
            if resized != spec:
                changed[name] = _specs_of_layer(plan, name)
                changed[name]["weights"] = resized
    return changed


def _specs_of_layer(plan: Plan, name: str) -> dict[Role, QuantizationSpec]:
    specs: dict[Role, QuantizationSpec] = {}
    for tensor in plan.tensors.values():
        if name in tensor.members:
            role = base_role(tensor.role)
            specs[role] = tensor.spec
    return specs


def unwanted_changes(before: Plan, after: Plan, changed: WidthChanges) -> list[str]:
    """Return the tensors, besides the weights of `changed`, whose spec differs in `after`."""
    expected_specs = before.specs
    actual_specs = after.specs
    differing = []
    for key in expected_specs.keys() | actual_specs.keys():
        name, role = key
        expected = expected_specs.get(key)
        if role == "weights" and name in changed:
            expected = changed[name]["weights"]
        if not _is_same(expected, actual_specs.get(key)):
            differing.append(f"{role} of {name}")
    return sorted(differing)


def _is_same(expected: QuantizationSpec | None, actual: QuantizationSpec | None) -> bool:
    """Return whether two specs quantize alike."""
    if expected is None or actual is None:
        return expected is actual
    if not expected.is_scaled:
        # The other fields of a format without a scale have no meaning.
        return expected.dtype == actual.dtype
    return expected == actual


def _require_exact(
    plan: Plan, original: Graph, changes: WidthChanges, config: JsonObject
) -> None:
    """Check that a changed config gives each weight the chosen width and changes nothing else.

    Raises:
        ConfigError: it is not valid, for example because the device lacks a width.
        UsageError: its form cannot express the widths.
    """
    checked = check_document(Document.of(config, "the config with the chosen widths"))
    after = resolve_plan(checked.require(), plan.graph, original)
    if any(finding.severity == "error" for finding in after.diagnostics):
        raise ConfigError(after.diagnostics, checked.sources)
    wrong = unwanted_changes(plan, after, changes)
    if wrong:
        raise UsageError(
            f"the config cannot be changed in place: {wrong[0]} would not be as chosen",
            help="state the weights' dtype, scheme and axis in one place, global or overall",
        )


@dataclass(frozen=True)
class Option:
    """Says what one choice for an item costs: a size in any whole unit, and an error. Both add
    up over items.
    """

    size: int
    error: float


def choose(items: Sequence[Sequence[Option]], budget: int) -> tuple[int, ...] | None:
    """Return the index of the chosen option of each item, with sizes that sum up to `budget` at
    most and the least sum of errors.

    This is the multiple-choice knapsack problem, solved by dynamic programming over undominated
    partial choices. If there are more than `_MAX_STATES`, a sample is kept. The result is then
    within the budget, and no worse than any choice of the same index for all items.

    Returns:
        None if even the smallest options are too large.

    Source: Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems", section 11.5.

    >>> choose([[Option(2, 9.0), Option(4, 1.0)], [Option(2, 3.0), Option(4, 1.0)]], 6)
    (1, 0)
    """
    smallest = [min(option.size for option in options) for options in items]
    room = budget - sum(smallest)
    if room < 0:
        return None
    sizes = torch.zeros(1, dtype=torch.int64)
    errors = torch.zeros(1, dtype=torch.float64)
    steps: list[tuple[Tensor, Tensor]] = []
    for options, least in zip(items, smallest, strict=True):
        extra_sizes = torch.tensor([option.size - least for option in options])
        option_errors = torch.tensor([option.error for option in options], dtype=torch.float64)
        sizes = (sizes[:, None] + extra_sizes).flatten()
        errors = (errors[:, None] + option_errors).flatten()
        states = _undominated(sizes, errors, room)
        steps.append((states // len(options), states % len(options)))
        sizes = sizes[states]
        errors = errors[states]
    # The largest state has the least error
    state = len(sizes) - 1
    chosen: list[int] = []
    for previous_states, indices in reversed(steps):
        chosen.append(int(indices[state]))
        state = int(previous_states[state])
    return _no_worse_than_uniform(items, budget, tuple(reversed(chosen)))


def _undominated(sizes: Tensor, errors: Tensor, room: int) -> Tensor:
    """Return the states to keep, smallest first: those that fit and have less error than all
    that are not larger.
    """
    order = torch.argsort(errors, stable=True)
    order = order[torch.argsort(sizes[order], stable=True)]
    order = order[sizes[order] <= room]
    best = torch.cummin(errors[order], 0).values
    is_better = torch.ones(len(order), dtype=torch.bool)
    is_better[1:] = best[1:] < best[:-1]
    order = order[is_better]
    if len(order) <= _MAX_STATES:
        return order
    bucket = sizes[order] * _MAX_STATES // (room + 1)
    # The last state of a bucket has its least error
    is_last = torch.ones(len(order), dtype=torch.bool)
    is_last[:-1] = bucket[1:] != bucket[:-1]
    # Every item can be added to the smallest state
    is_last[0] = True
    return order[is_last]


def _no_worse_than_uniform(
    items: Sequence[Sequence[Option]], budget: int, chosen: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the choice, or the same index for all items if that fits and is better."""

    def cost(indices: Sequence[int]) -> tuple[float, int]:
        options = [of_item[index] for of_item, index in zip(items, indices, strict=True)]
        return sum(option.error for option in options), sum(option.size for option in options)

    best = chosen
    counts = {len(options) for options in items}
    if len(counts) == 1:
        for index in range(counts.pop()):
            uniform = (index,) * len(items)
            _, size = cost(uniform)
            if size <= budget and cost(uniform) < cost(best):
                best = uniform
    return best
