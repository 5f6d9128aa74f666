"""Decides after calibration which joins have one scale for all their parts, and which leave
each part its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quantizer.calibration.observing import Calibration
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.config.wording import first_names
from quantizer.errors import ResultError
from quantizer.graph.edits import by_channel
from quantizer.graph.ir import Graph
from quantizer.observers import Observer
from quantizer.plan.joining import joins
from quantizer.plan.joining.joins import CLOSE_DB
from quantizer.plan.model import JoinDecision, JoinPlan, Key, Plan, part_name
from quantizer.storage.deferred_tensor import loaded

if TYPE_CHECKING:
    from quantizer.calibration.scaled_joins import Scaling

FEW_BITS = 4.0
"""A part of a join with fewer bits is reported."""
_FAR = {
    "own": "each part keeps its own",
    "scaled": "parts are multiplied with powers of two, which the weights that read them take "
    "back",
}
"""What is logged about joins whose parts' ranges are far apart, by `JoinDecision.scale`."""


def decide_joins(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Decide on all joins of the plan.

    Parts that would lose too much on one scale are brought to one range, if that is possible.
    """
    open_plan = state.plan
    unscaled_decisions = join_decisions(state.calibration)
    state, scaled = _scale_parts(request, state, unscaled_decisions)
    decisions = unscaled_decisions
    if scaled:
        decisions = join_decisions(state.calibration)
    for name in scaled:
        # The report shows the losses before scaling; scaling decides which tensors are dropped
        decision = decisions.get(name)
        left = () if decision is None else decision.left
        decisions[name] = replace(unscaled_decisions[name], scale="scaled", left=left)
    for level, text in join_remarks(open_plan, decisions):
        request.events.message(level, text)
    plan = joins.with_decisions(state.calibration.plan, decisions)
    calibration = replace(state.calibration, plan=plan)
    return replace(state, plan=plan, calibration=calibration, joins=decisions)


def join_decisions(calibration: Calibration) -> dict[str, JoinDecision]:
    """Return how each open join is quantized, by name."""
    decisions = {}
    for join in calibration.plan.joins:
        widths = _widths(join, calibration.observers)
        lost_bits = joins.lost_bits(join, widths)
        gains = _gains(join, calibration.plan.graph)
        decisions[join.name] = joins.decide_join(join, lost_bits, gains)
    return decisions


def _scale_parts(
    request: CalibrationRequest, state: CalibrationState, decisions: Mapping[str, JoinDecision]
) -> tuple[CalibrationState, list[str]]:
    """Scale the parts of joins that lose too much, as far as that is possible.

    Returns:
        The state, and the names of the joins that are scaled.
    """
    far = []
    for join in state.plan.joins:
        lost_db = decisions[join.name].lost_db
        if lost_db > CLOSE_DB and not join.is_single:
            far.append(join)
    if not far:
        return state, []
    # Few joins lose so much
    from quantizer.calibration import scaled_joins

    rounded = state.adjustment.rounded
    wanted = scaled_joins.scalings(state.calibration, far, rounded)
    by_join: dict[str, list[Scaling]] = {}
    for scaling in wanted:
        by_join.setdefault(scaling.join, []).append(scaling)
    scaled = _scaled(request, state, wanted)
    if scaled is not None:
        return scaled, list(by_join)
    # Not all together, so join by join
    possible: list[Scaling] = []
    names = []
    for name, of_join in by_join.items():
        more = _scaled(request, state, [*possible, *of_join])
        if more is not None:
            scaled = more
            possible += of_join
            names.append(name)
    return scaled or state, names


def _scaled(
    request: CalibrationRequest, state: CalibrationState, scalings: Sequence[Scaling]
) -> CalibrationState | None:
    """Return the state with these scalings; None if calibration has not observed every tensor
    that is quantized then.
    """
    if not scalings:
        return state
    # As in `_scale_parts`
    from quantizer.calibration import scaled_joins

    adjustment = scaled_joins.scaling_adjustment(state.plan.graph, scalings)
    target = state.target.adjusted(adjustment)
    plan = target.plan(request.config)
    calibration = scaled_joins.taken_over(
        state.calibration, plan, scalings, adjustment.insertions
    )
    if calibration is None:
        return None
    return replace(
        state,
        target=target,
        calibration=calibration,
        adjustment=state.adjustment.followed_by(adjustment),
    )


def join_remarks(
    plan: Plan, decisions: Mapping[str, JoinDecision]
) -> Iterator[tuple[int, str]]:
    """Yield messages about joins, each after its level of `logging`.

    Args:
        plan: the plan before the decisions.
        decisions: on its joins, by name.
    """
    for scale, text in _FAR.items():
        names = []
        for name, decision in decisions.items():
            if decision.scale == scale and decision.lost_db > CLOSE_DB:
                names.append(name)
        if names:
            reason = "what is joined has ranges too different for one scale"
            yield logging.INFO, f"{reason}, so {text}: {first_names(names, 3)}"
    for join in plan.joins:
        lost_bits = decisions[join.name].lost_bits
        if not join.is_single or join.single is None or not lost_bits:
            continue
        smallest = max(lost_bits, key=lost_bits.__getitem__)
        bit_width = plan.tensors[join.single].spec.bit_width
        left = bit_width - lost_bits[smallest]
        if left < FEW_BITS:
            bits = f"{max(0.0, left):.1f} of {bit_width} bits"
            yield logging.WARNING, _few_bits(plan, join, smallest, bits)


def _few_bits(plan: Plan, join: JoinPlan, smallest: str, bits: str) -> str:
    """Return a sentence about a part that has few bits left on one scale, and the remedy."""
    if plan.settings.target_device == "DPU":
        remedy = (
            "return its parts one by one, or bring them to one range before they are joined"
        )
    else:
        remedy = f"remove the entry for {join.name}, and each part keeps its own scale"
    return (
        f"{join.name} has one scale for all that it joins, which leaves {bits} to {smallest}: "
        f"{remedy}"
    )


def _widths(join: JoinPlan, observers: Mapping[Key, Observer]) -> dict[Key, float]:
    """Return the width of the range of each tensor of a join: scale * 2^bit_width.

    The scale is the largest one of the tensor. A tensor of zeros has no width.
    """
    widths = {}
    whole = join.single or join.inputs[0]
    for key in (whole, *join.sources):
        observer = observers.get(key)
        if observer is None or observer.spec.dtype != "int":
            continue
        is_zero = (observer.low == 0).all() and (observer.high == 0).all()
        if not is_zero:
            scale = float(observer.qparams().scale.max())
            widths[key] = scale * 2.0**observer.spec.bit_width
    return widths


def decide_joins_again(
    stored: Mapping[str, JoinDecision], widths: Mapping[Key, float]
) -> dict[str, JoinDecision]:
    """Return how joins are quantized with new ranges, if weights must stay as they are.

    Parts that are scaled stay scaled.

    Args:
        stored: the earlier decisions, by join.
        widths: of the new ranges, by tensor.

    Raises:
        ResultError: parts would have to be scaled now.
    """
    decisions = {}
    for name, before in stored.items():
        join = before.join
        lost_bits = joins.lost_bits(join, widths)
        after = joins.decide_join(join, lost_bits, before.gains)
        is_far = before.lost_db <= CLOSE_DB < after.lost_db
        if is_far and join.scalable and not join.is_single:
            raise ResultError(
                f"{name} now joins ranges too different for one scale, and its weights would "
                "have to change",
                help="calibrate again with the other config",
            )
        decisions[name] = before if before.scale == "scaled" else after
    return decisions


def _gains(join: JoinPlan, graph: Graph) -> dict[str, dict[str, float]]:
    """Return by layer that reads the join, and by part, the factor of the part's squared error
    in the layer's output.

    The factor is the sum of the squared weights that the part is multiplied by. In layers
    without such a weight, it is 1 for all parts.
    """
    equal = {part_name(key): 1.0 for key in join.sources}
    layers: Iterable[str] = join.parts
    if not join.is_of_channels:
        layers = [layer for layer, _ in join.inputs] or [join.name]
    gains = {}
    for layer in layers:
        gains[layer] = equal
        if layer in join.parts:
            gains[layer] = _weight_gains(join, graph, layer)
    return gains


def _weight_gains(join: JoinPlan, graph: Graph, layer: str) -> dict[str, float]:
    """Return the sum of squares of a layer's weights for the input channels of each part."""
    node = graph.by_name[layer]
    runs = join.parts[layer]
    weight = loaded(graph.weight(node)).double()
    if node.row.scales_channels:
        squares = weight.square()
    else:
        squares = by_channel(node, weight).square()
        squares = squares.sum((1, 3)).flatten()
    count = sum(length for _, length in runs)
    if len(squares) != count:
        # Parts are rows, which are all multiplied with the same weights
        squares = squares.mean().expand(count)
    gains: dict[str, float] = {}
    first = 0
    for key, length in runs:
        if key is not None:
            name = part_name(key)
            total = squares[first : first + length].sum()
            total += gains.get(name, 0.0)
            gains[name] = round(float(total), 9)
        first += length
    return gains
