"""Decides after calibration which joins have one scale for all their parts, and which leave
each part its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from quantizer.algorithms.adjustment import Adjustment
from quantizer.calibration import scaled_joins
from quantizer.calibration.job import Job
from quantizer.calibration.observing import Calibration
from quantizer.calibration.scaled_joins import Scaling
from quantizer.config.wording import shortened
from quantizer.errors import ResultError
from quantizer.graph.edits import by_channel
from quantizer.graph.ir import Graph
from quantizer.observers import Observer
from quantizer.plan import joins
from quantizer.plan.joins import CLOSE_DB
from quantizer.plan.model import JoinDecision, JoinPlan, Key, Plan, part_name
from quantizer.storage.deferred_tensor import loaded

FEW_BITS = 4.0
"""A part of a join that has fewer than this is told."""
_FAR = {
    "own": "each part keeps its own",
    "scaled": "parts are multiplied with powers of two, which the weights that read them take "
    "back",
}


def decide_joins(job: Job) -> None:
    """Decide on all joins of the job's plan, and bring to one range what would lose too much on
    one scale.
    """
    waiting = job.plan
    first = _decisions(job.calibration)
    scaled = _scale_parts(job, first)
    decisions = _decisions(job.calibration) if scaled else first
    for name in scaled:
        after = decisions.get(name)
        left = () if after is None else after.left
        decisions[name] = replace(first[name], scale="scaled", left=left)
    job.plan = joins.decided(job.calibration.plan, decisions)
    job.calibration = replace(job.calibration, plan=job.plan)
    job.joins = decisions
    for level, text in remarks(waiting, decisions):
        job.events.message(level, text)


def decided(calibration: Calibration) -> Calibration:
    """Return the calibration with the joins of its plan decided, as far as that changes no
    weights.
    """
    return replace(calibration, plan=joins.decided(calibration.plan, _decisions(calibration)))


def _decisions(calibration: Calibration) -> dict[str, JoinDecision]:
    """How each open join is quantized. What was observed of tensors that are not stays, for
    whoever decides anew.
    """
    decisions: dict[str, JoinDecision] = {}
    for join in calibration.plan.joins:
        lost = joins.lost_bits(join, _widths(join, calibration.observers))
        decisions[join.name] = joins.decide(join, lost, _gains(join, calibration.plan.graph))
    return decisions


def _scale_parts(job: Job, decisions: Mapping[str, JoinDecision]) -> list[str]:
    """Scale the parts of joins that have lost too much, as far as it can be done; return these
    joins.
    """
    far = [
        join
        for join in job.plan.joins
        if decisions[join.name].lost_db > CLOSE_DB and not join.is_single
    ]
    rounded = {} if job.adjustment is None else job.adjustment.rounded
    wanted = scaled_joins.scalings(job.calibration, far, rounded)
    found = _possible(job, wanted)
    if not found:
        return []
    more = scaled_joins.adjustment(job.plan.graph, found)
    plan = job.target.plan(job.config, more)
    job.target.adjust(more)
    job.calibration = scaled_joins.taken_over(job.calibration, plan, found, more.insertions)
    job.adjustment = (job.adjustment or Adjustment()).followed_by(more)
    return list(dict.fromkeys(scaling.join for scaling in found))


def _possible(job: Job, wanted: Sequence[Scaling]) -> Sequence[Scaling]:
    """Those factors for which calibration has seen enough: all of them, or join by join."""
    if not wanted or _is_seen(job, wanted):
        return wanted
    found: list[Scaling] = []
    for scalings in _by_join(wanted):
        if _is_seen(job, [*found, *scalings]):
            found += scalings
    return found


def _by_join(scalings: Iterable[Scaling]) -> list[list[Scaling]]:
    """The factors of each join, which are taken up together."""
    by_join: dict[str, list[Scaling]] = {}
    for scaling in scalings:
        by_join.setdefault(scaling.join, []).append(scaling)
    return [*by_join.values()]


def _is_seen(job: Job, scalings: Sequence[Scaling]) -> bool:
    """Whether calibration has seen what is quantized after these factors; the job stays as it
    is.
    """
    more = scaled_joins.adjustment(job.plan.graph, scalings)
    plan = job.target.plan(job.config, more)
    return scaled_joins.is_seen(job.calibration, plan, scalings, more.insertions)


def remarks(plan: Plan, decisions: Mapping[str, JoinDecision]) -> Iterator[tuple[int, str]]:
    """Yield what the user should hear of joins, with levels of `logging`.

    Args:
        plan: with the joins open.
        decisions: on these.
    """
    for scale, text in _FAR.items():
        names: list[str] = []
        for name, decision in decisions.items():
            if decision.scale == scale and decision.lost_db > CLOSE_DB:
                names.append(name)
        if names:
            why = "what is joined has ranges too different for one scale"
            yield logging.INFO, f"{why}, so {text}: {shortened(names, 3)}"
    for join in plan.joins:
        decision = decisions[join.name]
        if not join.is_single or join.single is None or not decision.lost_bits:
            continue
        smallest = max(decision.lost_bits, key=decision.lost_bits.__getitem__)
        bits = plan.tensors[join.single].spec.bit_width
        left = bits - decision.lost_bits[smallest]
        if left < FEW_BITS:
            yield (
                logging.WARNING,
                _few_bits(plan, join, smallest, f"{max(0.0, left):.1f} of {bits} bits"),
            )


def _few_bits(plan: Plan, join: JoinPlan, smallest: str, bits: str) -> str:
    """A sentence on a part that one scale leaves few bits to, and what to do about it."""
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
    """How wide the ranges of a join's tensors are, from the lowest code to the highest, of the
    widest channel.
    """
    widths: dict[Key, float] = {}
    for key in (join.single or join.inputs[0], *join.sources):
        observer = observers.get(key)
        if observer is None or observer.spec.dtype != "int":
            continue
        if bool((observer.low != 0).any() or (observer.high != 0).any()):
            widths[key] = float(observer.qparams().scale.max()) * 2.0**observer.spec.bit_width
    return widths


def decided_again(
    stored: Mapping[str, JoinDecision], widths: Mapping[Key, float]
) -> dict[str, JoinDecision]:
    """Return how joins are quantized where the ranges have changed and the weights cannot.

    Parts that are scaled stay so.

    Raises:
        ResultError: parts would have to be scaled now.
    """
    decisions: dict[str, JoinDecision] = {}
    for name, before in stored.items():
        after = joins.decide(before.join, joins.lost_bits(before.join, widths), before.gains)
        is_far = before.lost_db <= CLOSE_DB < after.lost_db
        if is_far and before.join.scalable and not before.join.is_single:
            text = (
                f"{name} joins what has ranges too different for one scale now, and weights "
                "would have to change"
            )
            raise ResultError(text, help="calibrate again with the other config")
        decisions[name] = before if before.scale == "scaled" else after
    return decisions


def _gains(join: JoinPlan, graph: Graph) -> dict[str, dict[str, float]]:
    """How much the squared error of each part weighs in each product: as the squared weights
    that it meets.

    Where there is no such weight, all parts count alike.
    """
    alike = {part_name(key): 1.0 for key in join.sources}
    gains: dict[str, dict[str, float]] = {}
    reading = [layer for layer, _ in join.inputs] or [join.name]
    for layer in join.parts if join.is_of_channels else reading:
        gains[layer] = _weight_gains(join, graph, layer) if layer in join.parts else alike
    return gains


def _weight_gains(join: JoinPlan, graph: Graph, layer: str) -> dict[str, float]:
    """The sums of squares of a layer's weights for the input channels of each part."""
    node, runs = graph.by_name[layer], join.parts[layer]
    weight = loaded(graph.weight(node)).double()
    if node.row.scales_channels:
        squares = weight.square()
    else:
        squares = by_channel(node, weight).square().sum((1, 3)).flatten()
    count = sum(length for _, length in runs)
    if len(squares) != count:
        # Parts are rows, which all meet the same weights
        squares = squares.mean().expand(count)
    gains: dict[str, float] = {}
    first = 0
    for key, length in runs:
        if key is not None:
            total = float(squares[first : first + length].sum())
            gains[part_name(key)] = round(gains.get(part_name(key), 0.0) + total, 9)
        first += length
    return gains
