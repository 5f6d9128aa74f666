"""Joins in a plan: those whose parts share a scale because the config says so, and those on
which calibration decides.
"""

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from quantizer.config.model import ResolvedConfig
from quantizer.graph.ir import Graph
from quantizer.plan.layout import EVERY_JOIN, Group, Join, Layout, Multiplication
from quantizer.plan.match import MatchedRule
from quantizer.plan.model import RANKS, JoinDecision, JoinPlan, Key, Plan, part_name

OWN = "its parts keep their own quantization"
CLOSE_DB = 9.0
"""Parts share a scale if the error of every product grows by no more than this."""


def single_joins(
    config: ResolvedConfig, graph: Graph, rules: Iterable[MatchedRule]
) -> Container[str]:
    """Return the joins whose parts share one scale: all on the DPU, otherwise those that a
    layer entry names.

    An entry names joins if it configures their output and matches no other layer.
    """
    if config.settings.target_device == "DPU":
        return EVERY_JOIN
    named: set[str] = set()
    for row in rules:
        layers = row.match.layers
        is_entry_of_layers = row.match.rank > RANKS.index("weighted")
        are_joins = all(graph.by_name[layer].is_join for layer in layers)
        if are_joins and is_entry_of_layers and row.configures("activation"):
            named.update(layers)
    return named


def open_joins(where: Layout) -> dict[str, Join]:
    """Return the joins that calibration observes, by the layer where all parts would be
    quantized.

    Calibration decides on those that products read. For those that have one scale anyway it
    reports the cost of that.
    """
    by_point: dict[str, Join] = {}
    for join in where.joins.values():
        if join.products or join.is_single:
            by_point[join.group.point] = join
    return by_point


def parts_to_observe(joins: Iterable[Join]) -> dict[str, Group]:
    """Return the parts of joins that are not quantized on their own, but observed, by where
    they would be.
    """
    parts: dict[str, Group] = {}
    for join in joins:
        if join.is_single:
            for part in join.alone:
                parts[part.point] = part
    return parts


def products_of(joins: Iterable[Join]) -> dict[str, list[tuple[Join, Multiplication]]]:
    """Return which joins each multiplying layer reads."""
    by_layer: dict[str, list[tuple[Join, Multiplication]]] = {}
    for join in joins:
        for product in join.products:
            by_layer.setdefault(product.layer, []).append((join, product))
    return by_layer


def observed_at(where: Layout, join: Join, value: str) -> str:
    """Return the node whose values give the range of a product's input: the join, if the
    product reads all of it.
    """
    origins = where.origins.get(value)
    is_whole = origins is None or origins.sources == where.origins[join.name].sources
    return join.group.point if is_whole else value


def input_role(graph: Graph, product: Multiplication) -> str | None:
    """Return the role in which a layer reads a value, or None if the value is one of a list."""
    for role, name in graph.by_name[product.layer].input_roles().items():
        if name == product.value:
            return role
    return None


def dropped_tensors(join: JoinPlan, *, is_close: bool) -> tuple[Key, ...]:
    """Return the tensors that are dropped once a join is decided.

    Args:
        is_close: whether the ranges of the parts are close enough for one scale.
    """
    has_no_other = join.is_of_channels and not join.inputs
    has_one = join.is_single or ((is_close or has_no_other) and not join.is_returned)
    if join.single is not None and has_one:
        return (*join.alone, *join.inputs, *join.observed)
    if join.is_single:
        return ()
    dropped = [*join.observed]
    if join.single is not None:
        dropped.insert(0, join.single)
    if not is_close and not join.observed:
        dropped.extend(join.divisible)
    return tuple(dropped)


def decide_join(
    join: JoinPlan, lost_bits: Mapping[str, float], gains: Mapping[str, Mapping[str, float]]
) -> JoinDecision:
    """Return how a join is quantized.

    Args:
        lost_bits: by layer that computes a part, how many bits its values lose on the scale of
            the whole.
        gains: by layer that multiplies the join, the weight of each part's squared error in its
            output.
    """
    lost_dbs = [_lost_db(lost_bits, weights) for weights in gains.values()]
    lost_db = max(lost_dbs, default=0.0)
    left = dropped_tensors(join, is_close=lost_db <= CLOSE_DB)
    has_one = join.is_of_channels
    if join.single is not None:
        has_one = join.single not in left
    scale = "one" if has_one else "own"
    return JoinDecision(join, scale, gains, lost_bits, lost_db, left)


def lost_bits(join: JoinPlan, widths: Mapping[Key, float]) -> dict[str, float]:
    """Return the base-2 logarithm of how much wider the range of the whole is, by the layer
    that computes a part.

    Args:
        widths: of the ranges of tensors. Tensors that lose nothing on another scale have none:
            those of zeros, and those in a format with an exponent.
    """
    whole = widths.get(join.single or join.inputs[0])
    lost: dict[str, float] = {}
    for key in join.sources:
        if key in widths and whole is not None:
            lost[part_name(key)] = round(max(0.0, math.log2(whole / widths[key])), 3)
    return lost


def _lost_db(lost_bits: Mapping[str, float], gains: Mapping[str, float]) -> float:
    """Return how much the error of a product grows if its parts lose bits, in dB."""
    with_one_scale = sum(gains.values())
    with_own_scales = 0.0
    for layer, gain in gains.items():
        with_own_scales += gain * 4.0 ** -lost_bits.get(layer, 0.0)
    if with_own_scales <= 0:
        return 0.0
    return round(10 * math.log10(with_one_scale / with_own_scales), 3)


def decided_unseen(plan: Plan) -> Plan:
    """Return the plan with the joins decided that calibration does not observe. Their parts
    count as close.
    """
    unseen: dict[str, JoinDecision] = {}
    for join in plan.joins:
        whole = join.single or join.inputs[0]
        tensor = plan.tensors[whole]
        if not tensor.is_calibrated or tensor.spec.is_dynamic:
            unseen[join.name] = decide_join(join, {}, {})
    waiting = tuple(join for join in plan.joins if join.name not in unseen)
    return replace(with_decisions(plan, unseen), joins=waiting, left={})


def with_decisions(plan: Plan, decisions: Mapping[str, JoinDecision]) -> Plan:
    """Return the plan with its open joins as calibration has decided on them."""
    reasons: dict[Key, str] = {}
    for join in plan.joins:
        decision = decisions.get(join.name)
        if decision is None:
            continue
        reason = OWN
        if join.single is not None and decision.scale == "one":
            reason = f"quantized at {join.single[0]}"
        reasons.update(dict.fromkeys(decision.left, reason))
    left = {key: tensor for key, tensor in plan.tensors.items() if key in reasons}
    return replace(plan.without(reasons), joins=(), left=left)
