"""What a plan says of joins: whose parts share a scale as the config asks for it, and what waits for calibration."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from quantizer.config.model import Config
from quantizer.graph.ir import Graph
from quantizer.plan.groups import EVERY_JOIN, Group, Join, Layout, Product, quantization_point
from quantizer.plan.match import RANKS, MatchedRule
from quantizer.plan.model import ENTRIES, JoinDecision, JoinPlan, Key, Plan, TensorPlan

OWN = "its parts keep their own quantization"
CLOSE_DB = 9.0
"""Parts share a scale where the error of a product grows by no more than this."""
_CHANNELS_OF_IMAGES = 1


def single_joins(config: Config, graph: Graph, rules: Iterable[MatchedRule]) -> Container[str]:
    """Return the joins whose parts share one scale: all on the DPU, else those that a layer entry names.

    An entry names joins if it speaks of their output and finds nothing else.
    """
    if config.settings.target_device == "DPU":
        return EVERY_JOIN
    named: set[str] = set()
    for row in rules:
        layers = row.found.layers
        names_joins = layers and all(graph.by_name[layer].is_join for layer in layers)
        if names_joins and row.found.rank > RANKS.index("weighted") and row.speaks_of("activation"):
            named.update(layers)
    return named


def open_joins(where: Layout) -> dict[str, Join]:
    """Return the joins that calibration looks at, by the layer where all parts would be quantized.

    It decides on those that products read. Of those that have one scale anyway it says what that costs.
    """
    return {join.group.point: join for join in where.joins.values() if join.products or join.is_single}


def watched(joins: Iterable[Join]) -> dict[str, Group]:
    """Return the parts of joins that are not quantized on their own, but observed, by where they would be."""
    return {part.point: part for join in joins if join.is_single for part in join.alone}


def products_of(joins: Iterable[Join]) -> dict[str, list[tuple[Join, Product]]]:
    """Return which joins each multiplying layer reads."""
    by_layer: dict[str, list[tuple[Join, Product]]] = {}
    for join in joins:
        for product in join.products:
            by_layer.setdefault(product.layer, []).append((join, product))
    return by_layer


def observed_at(where: Layout, join: Join, value: str) -> str:
    """Return whose values a product's own quantization is found on: the join's, where the product reads all of it."""
    joined, read = where.origins[join.name], where.origins.get(value)
    is_whole = read is None or read.sources == joined.sources
    return join.group.point if is_whole else value


def unplanned_parts(
    where: Layout, graph: Graph, tensors: Mapping[Key, TensorPlan], stated: Container[Key]
) -> dict[Key, TensorPlan]:
    """Return tensors for parts of joins that nothing quantizes on their own, so that their ranges are seen.

    They are specified as the whole is, where a layer multiplies it.
    """
    parts: dict[Key, TensorPlan] = {}
    for join in open_joins(where).values():
        keys = [(join.group.point, "activation")]
        for product in join.products:
            key = (product.layer, input_role(graph, product) or "")
            keys += [] if key in stated else [key]
        whole = next((tensors[key] for key in keys if key in tensors), None)
        if whole is None or join.is_single:
            continue
        for name in where.origins[join.name].sources:
            node = graph.by_name[name]
            point = quantization_point(graph, where, name) or name
            role = _output_role(graph, point)
            if (point, role) not in tensors and (node.row.kind != "structural" or node.op in ENTRIES):
                parts[point, role] = replace(whole, layer=point, role=role, source=point, members=(point,))
    return parts


def join_plans(
    where: Layout,
    graph: Graph,
    tensors: Mapping[Key, TensorPlan],
    *,
    stated: Container[Key],
    observed: Container[Key],
) -> list[JoinPlan]:
    """Return what calibration has to decide, of the tensors that are planned for both ways.

    Args:
        stated: inputs of layers that an entry of the config asks for; they stay.
        observed: parts of joins that are quantized in neither way.
    """
    plans: list[JoinPlan] = []
    for join in open_joins(where).values():
        single = (join.group.point, "activation")
        sources = _source_keys(where, graph, join, tensors)
        has_grids = len(sources) >= len(where.origins[join.name].sources)
        inputs: list[Key] = []
        divisible: list[Key] = []
        scalable: list[str] = []
        parts: dict[str, tuple[tuple[Key | None, int], ...]] = {}
        for product in join.products:
            key = (product.layer, input_role(graph, product) or "")
            if key in tensors and key not in stated:
                inputs.append(key)
            if has_grids and _is_divisible(where, graph, product):
                divisible += [key] if key in inputs else []
                scalable += [product.layer] if _is_scalable(where, graph, product) else []
                parts[product.layer] = _channels(where, graph, product, tensors)
        if single in tensors or inputs:
            plans.append(
                JoinPlan(
                    name=join.name,
                    single=single if single in tensors else None,
                    sources=sources,
                    alone=_keys(graph, [part.point for part in join.alone], tensors),
                    observed=tuple(key for key in sources if key in observed),
                    inputs=tuple(inputs),
                    divisible=tuple(divisible),
                    scalable=tuple(scalable),
                    is_returned=join.is_returned,
                    is_single=join.is_single,
                    parts=parts,
                )
            )
    return plans


def left_out(join: JoinPlan, *, is_close: bool) -> tuple[Key, ...]:
    """Return the tensors that a plan does without once a join is decided.

    Args:
        is_close: whether the ranges of the parts are close enough for one scale.
    """
    has_one = join.is_single or (is_close and not join.is_returned)
    if join.single is not None and has_one:
        return (*join.alone, *join.inputs, *join.observed)
    if join.is_single:
        return ()
    single = () if join.single is None else (join.single,)
    is_split = not is_close and not join.observed
    return (*single, *join.observed, *(join.divisible if is_split else ()))


def decide(join: JoinPlan, lost_bits: Mapping[str, float], gains: Mapping[str, Mapping[str, float]]) -> JoinDecision:
    """Return how a join is quantized.

    Args:
        lost_bits: by layer that makes a part, how many bits its values lose on the scale of the whole.
        gains: by layer that multiplies the join, how much the squared error of each part weighs in its output.
    """
    lost_db = max((_lost_db(lost_bits, weights) for weights in gains.values()), default=0.0)
    left = left_out(join, is_close=lost_db <= CLOSE_DB)
    has_one = join.single is not None and join.single not in left
    return JoinDecision(join, "one" if has_one else "own", gains, lost_bits, lost_db, left)


def lost_bits(join: JoinPlan, widths: Mapping[Key, float]) -> dict[str, float]:
    """Return the base-2 logarithm of how much wider the range of the whole is, by the layer that makes a part.

    Args:
        widths: of the ranges of tensors. Those that lose nothing on another scale have none: all zero, or in a format
            with an exponent.
    """
    whole = widths.get(join.single or join.inputs[0])
    lost: dict[str, float] = {}
    for key in join.sources:
        if key in widths and whole is not None:
            lost[key[0]] = round(max(0.0, math.log2(whole / widths[key])), 3)
    return lost


def _lost_db(lost_bits: Mapping[str, float], gains: Mapping[str, float]) -> float:
    """How much larger the error of a product is where its parts lose bits, in dB."""
    one = sum(gains.values())
    own = 0.0
    for layer, gain in gains.items():
        own += gain * 4.0 ** -lost_bits.get(layer, 0.0)
    return round(10 * math.log10(one / own), 3) if own > 0 else 0.0


def decided_unseen(plan: Plan) -> Plan:
    """Return the plan with the joins decided whose scales calibration does not find: their parts count as close."""
    unseen: dict[str, JoinDecision] = {}
    for join in plan.joins:
        whole = join.single or join.inputs[0]
        if not plan.tensors[whole].is_calibrated:
            unseen[join.name] = decide(join, {}, {})
    waiting = tuple(join for join in plan.joins if join.name not in unseen)
    return replace(decided(plan, unseen), joins=waiting, left={})


def decided(plan: Plan, decisions: Mapping[str, JoinDecision]) -> Plan:
    """Return the plan with its open joins as calibration has decided on them."""
    why: dict[Key, str] = {}
    for join in plan.joins:
        decision = decisions.get(join.name)
        if decision is None:
            continue
        has_one = join.single is not None and decision.scale == "one"
        reason = f"quantized at {join.single[0]}" if has_one and join.single else OWN
        why.update(dict.fromkeys(decision.left, reason))
    left = {key: tensor for key, tensor in plan.tensors.items() if key in why}
    return replace(plan.without(why), joins=(), left=left)


def input_role(graph: Graph, product: Product) -> str | None:
    """Return the role in which a layer reads a value, None if it reads it as one of a list."""
    for role, name in graph.by_name[product.layer].input_roles().items():
        if name == product.value:
            return role
    return None


def _keys(graph: Graph, points: Sequence[str], tensors: Mapping[Key, TensorPlan]) -> tuple[Key, ...]:
    """The tensors that are quantized at these layers."""
    keys: list[Key] = []
    for point in points:
        key = (point, _output_role(graph, point))
        if key in tensors:
            keys.append(key)
    return tuple(keys)


def _output_role(graph: Graph, name: str) -> str:
    """The role in which a node's values are quantized."""
    return "input" if graph.by_name[name].op in ENTRIES else "activation"


def _source_keys(where: Layout, graph: Graph, join: Join, tensors: Mapping[Key, TensorPlan]) -> tuple[Key, ...]:
    """The tensors of a join's parts; trained tensors that stand among them are weights."""
    sources = where.origins[join.name].sources
    own: dict[str, str] = {}
    for part in join.alone:
        own.update(dict.fromkeys(part.members, part.point))
    points = [own.get(name) or quantization_point(graph, where, name) or name for name in sources]
    trained = [(name, "weights") for name in sources if (name, "weights") in tensors]
    parameters = [key for key in trained if graph.by_name[key[0]].row.kind == "structural"]
    return (*_keys(graph, list(dict.fromkeys(points)), tensors), *parameters)


def _channels(
    where: Layout, graph: Graph, product: Product, tensors: Mapping[Key, TensorPlan]
) -> tuple[tuple[Key | None, int], ...]:
    """Which tensor each run of a layer's input channels comes from."""
    runs: list[tuple[Key | None, int]] = []
    for source, length in where.origins[product.value].parts:
        point = quantization_point(graph, where, source) or source if source else ""
        keys = _keys(graph, [point], tensors) if point else ()
        runs.append((keys[0] if keys else None, length))
    return tuple(runs)


def _is_divisible(where: Layout, graph: Graph, product: Product) -> bool:
    """Whether a layer's product is a sum, or a row, of the products of the parts with a weight of its own."""
    node, origins = graph.by_name[product.layer], where.origins.get(product.value)
    if origins is None or origins.axis is None or origins.constants:
        return False
    if node.row.scales_channels:
        return origins.axis == node.row.channels
    reads_it = node.is_multiplying and node.operands.get("input") == product.value
    return reads_it and (node.row.spatial == 0 or origins.axis == _CHANNELS_OF_IMAGES)


def _is_scalable(where: Layout, graph: Graph, product: Product) -> bool:
    """Whether the parts of a divisible product lie along the layer's input channels."""
    axis = where.origins[product.value].axis
    if graph.by_name[product.layer].row.scales_channels:
        return False  # on integers of their own its products are as good
    is_linear = graph.by_name[product.layer].row.spatial == 0
    return axis == (graph.by_name[product.value].rank - 1 if is_linear else _CHANNELS_OF_IMAGES)
