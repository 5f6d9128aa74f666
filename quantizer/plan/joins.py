"""What a plan says of joins: whose parts share a scale as the config asks for it, and what
waits for calibration.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from quantizer.config.model import Config
from quantizer.config.roles import channels_role
from quantizer.graph.computed_parts import Runs
from quantizer.graph.ir import Graph
from quantizer.plan.groups import EVERY_JOIN, Group, Join, Layout, Product, quantization_point
from quantizer.plan.match import RANKS, MatchedRule
from quantizer.plan.model import (
    ENTRIES,
    JoinDecision,
    JoinPlan,
    Key,
    Plan,
    TensorPlan,
    part_name,
)

OWN = "its parts keep their own quantization"
CLOSE_DB = 9.0
"""Parts share a scale where the error of a product grows by no more than this."""
_CHANNELS_OF_IMAGES = 1


def single_joins(config: Config, graph: Graph, rules: Iterable[MatchedRule]) -> Container[str]:
    """Return the joins whose parts share one scale: all on the DPU, else those that a layer
    entry names.

    An entry names joins if it speaks of their output and finds nothing else.
    """
    if config.settings.target_device == "DPU":
        return EVERY_JOIN
    named: set[str] = set()
    for row in rules:
        layers = row.found.layers
        names_joins = layers and all(graph.by_name[layer].is_join for layer in layers)
        if (
            names_joins
            and row.found.rank > RANKS.index("weighted")
            and row.speaks_of("activation")
        ):
            named.update(layers)
    return named


def open_joins(where: Layout) -> dict[str, Join]:
    """Return the joins that calibration looks at, by the layer where all parts would be
    quantized.

    It decides on those that products read. Of those that have one scale anyway it says what
    that costs.
    """
    by_point: dict[str, Join] = {}
    for join in where.joins.values():
        if join.products or join.is_single:
            by_point[join.group.point] = join
    return by_point


def watched(joins: Iterable[Join]) -> dict[str, Group]:
    """Return the parts of joins that are not quantized on their own, but observed, by where
    they would be.
    """
    parts: dict[str, Group] = {}
    for join in joins:
        if join.is_single:
            parts.update({part.point: part for part in join.alone})
    return parts


def products_of(joins: Iterable[Join]) -> dict[str, list[tuple[Join, Product]]]:
    """Return which joins each multiplying layer reads."""
    by_layer: dict[str, list[tuple[Join, Product]]] = {}
    for join in joins:
        for product in join.products:
            by_layer.setdefault(product.layer, []).append((join, product))
    return by_layer


def observed_at(where: Layout, join: Join, value: str) -> str:
    """Return whose values a product's own quantization is found on: the join's, where the
    product reads all of it.
    """
    joined, read = where.origins[join.name], where.origins.get(value)
    is_whole = read is None or read.sources == joined.sources
    return join.group.point if is_whole else value


def input_role(graph: Graph, product: Product) -> str | None:
    """Return the role in which a layer reads a value, None if it reads it as one of a list."""
    for role, name in graph.by_name[product.layer].input_roles().items():
        if name == product.value:
            return role
    return None


class JoinPlanner:
    """Says of joins what calibration has to decide.

    Args:
        where: the layout of the graph.
        graph: the planned graph.
        tensors: what is planned, for both ways of each join.
        stated: inputs of layers that an entry of the config asks for; they stay.
    """

    def __init__(
        self,
        where: Layout,
        graph: Graph,
        tensors: Mapping[Key, TensorPlan],
        *,
        stated: Container[Key],
    ) -> None:
        self.where, self.graph = where, graph
        self.tensors, self.stated = tensors, stated

    def unplanned_parts(self) -> dict[Key, TensorPlan]:
        """Return tensors for parts of joins that nothing quantizes on their own, so that their
        ranges are seen.

        They are specified as the whole is, where a layer multiplies it.
        """
        parts: dict[Key, TensorPlan] = {}
        for join in (*open_joins(self.where).values(), *self.where.blends.values()):
            whole = self._whole(join)
            if whole is None or join.is_single:
                continue
            spans = self._spans(join)
            for first, length in spans.values():
                span = (self.where.runs[join.group.point].axis, first, length)
                key = self._span_key(join, first, length)
                layer, role = key
                parts[key] = replace(
                    whole,
                    layer=layer,
                    role=role,
                    source=join.group.point,
                    members=(layer,),
                    channels=span,
                )
            if spans or join.group.point in self.where.blends:
                continue
            for name in self.where.origins[join.name].sources:
                key = self._part_key(name)
                node = self.graph.by_name[name]
                is_constant = node.row.kind == "structural" and node.op not in ENTRIES
                if key in self.tensors or is_constant:
                    continue
                point, role = key
                parts[key] = replace(
                    whole, layer=point, role=role, source=point, members=(point,)
                )
        return parts

    def plans(self, observed: Container[Key]) -> list[JoinPlan]:
        """Return the open joins; `observed` are the parts that are quantized in neither way."""
        plans: list[JoinPlan] = []
        for join in open_joins(self.where).values():
            plan = (
                self._plan_of_channels(join)
                if self._spans(join)
                else self._plan(join, observed)
            )
            if plan.single is not None or plan.inputs:
                plans.append(plan)
        for join in self.where.blends.values():
            if self._spans(join):
                plans.append(self._plan_of_channels(join))
        return plans

    def _plan_of_channels(self, join: Join) -> JoinPlan:
        """What there is to decide of parts that an operator computes, after which they are
        channels of one value.
        """
        keys: dict[int, Key] = {}
        for number, (first, length) in self._spans(join).items():
            keys[number] = self._span_key(join, first, length)
        parts: dict[str, tuple[tuple[Key | None, int], ...]] = {}
        inputs: list[Key] = []
        for product in join.products:
            key = self._input_key(product)
            if key is not None:
                inputs.append(key)
            if self._is_scalable(product):
                lying = groupby(self.where.runs[product.value].numbers)
                parts[product.layer] = tuple(
                    (keys[number], len([*same])) for number, same in lying
                )
        single = (join.group.point, "activation")
        has_single = single in self.tensors
        alone = [self._key_at(part.point) for part in join.alone]
        is_blend = join.group.point in self.where.blends
        return JoinPlan(
            name=join.name,
            single=single if has_single else None,
            sources=(*keys.values(),),
            alone=tuple(key for key in alone if key in self.tensors),
            observed=(*keys.values(),),
            inputs=() if is_blend and has_single else tuple(inputs),
            divisible=(),
            scalable=(*parts,),
            is_returned=join.is_returned,
            parts=parts,
        )

    def _spans(self, join: Join) -> dict[int, tuple[int, int]]:
        """Where the parts lie in what is quantized, if calibration can bring them to one range
        there.

        Nothing else can be done for them where all that multiplies them reads what an operator
        has computed.
        """
        whole, point = self._whole(join), join.group.point
        runs = self.where.runs.get(point)
        if whole is None or runs is None or join.is_single or not whole.is_calibrated:
            return {}
        if whole.spec.dtype != "int" or not whole.spec.has_one_scale:
            return {}
        scalable = [self._is_scalable(product) for product in join.products]
        is_possible = all(scalable) if point in self.where.blends else any(scalable)
        return runs.spans() if is_possible else {}

    def _span_key(self, join: Join, first: int, length: int) -> Key:
        """The tensor of a part that is some channels of a value."""
        return join.group.point, channels_role(first, length)

    def _plan(self, join: Join, observed: Container[Key]) -> JoinPlan:
        sources = self._source_keys(join)
        has_grids = len(sources) >= len(self.where.origins[join.name].sources)
        inputs: list[Key] = []
        divisible: list[Key] = []
        scalable: list[str] = []
        parts: dict[str, tuple[tuple[Key | None, int], ...]] = {}
        for product in join.products:
            key = self._input_key(product)
            if key is not None:
                inputs.append(key)
            if not has_grids or not self._is_divisible(product):
                continue
            parts[product.layer] = self._channels(product)
            if key is not None:
                divisible.append(key)
            if self._is_scalable(product):
                scalable.append(product.layer)
        single = (join.group.point, "activation")
        alone = [self._key_at(part.point) for part in join.alone]
        return JoinPlan(
            name=join.name,
            single=single if single in self.tensors else None,
            sources=sources,
            alone=tuple(key for key in alone if key in self.tensors),
            observed=tuple(key for key in sources if key in observed),
            inputs=tuple(inputs),
            divisible=tuple(divisible),
            scalable=tuple(scalable),
            is_returned=join.is_returned,
            is_single=join.is_single,
            parts=parts,
        )

    def _whole(self, join: Join) -> TensorPlan | None:
        """How all of a join is quantized: at the join, or where a layer multiplies it."""
        single = self.tensors.get((join.group.point, "activation"))
        if single is not None:
            return single
        for product in join.products:
            key = self._input_key(product)
            if key is not None:
                return self.tensors[key]
        return None

    def _input_key(self, product: Product) -> Key | None:
        """The quantization of what a layer multiplies, where it has one that calibration may
        drop.
        """
        role = input_role(self.graph, product)
        key = (product.layer, role or "")
        return key if key in self.tensors and key not in self.stated else None

    def _key_at(self, point: str) -> Key:
        """The tensor of what is quantized at a layer."""
        role = "input" if self.graph.by_name[point].op in ENTRIES else "activation"
        return point, role

    def _part_key(self, source: str) -> Key:
        """The tensor of a part, whether it is planned or not."""
        return self._key_at(quantization_point(self.graph, self.where, source) or source)

    def _source_keys(self, join: Join) -> tuple[Key, ...]:
        """The tensors of a join's parts, each once; trained tensors that stand among them are
        weights.
        """
        alone: dict[str, Key] = {}
        for part in join.alone:
            alone.update(dict.fromkeys(part.members, self._key_at(part.point)))
        keys: dict[Key, None] = {}
        for source in self.where.origins[join.name].sources:
            key = alone.get(source) or self._part_key(source)
            trained = (source, "weights")
            is_trained = (
                self.graph.by_name[source].row.kind == "structural" and trained in self.tensors
            )
            if is_trained:
                keys[trained] = None
            elif key in self.tensors:
                keys[key] = None
        return tuple(keys)

    def _channels(self, product: Product) -> tuple[tuple[Key | None, int], ...]:
        """Which tensor each run of a layer's input channels comes from; None for constants."""
        runs: list[tuple[Key | None, int]] = []
        for source, length in self.where.origins[product.value].parts:
            key = self._part_key(source) if source else None
            is_planned = key in self.tensors
            runs.append((key if is_planned else None, length))
        return tuple(runs)

    def _is_divisible(self, product: Product) -> bool:
        """Whether a layer's product is a sum, or a row, of the products of the parts with a
        weight of its own.
        """
        node = self.graph.by_name[product.layer]
        origins = self.where.origins.get(product.value)
        if origins is None or origins.axis is None or origins.constants:
            return False
        if node.row.scales_channels:
            return origins.axis == node.row.channels
        if not node.is_multiplying or node.operands.get("input") != product.value:
            return False
        return node.row.spatial == 0 or origins.axis == _CHANNELS_OF_IMAGES

    def _is_scalable(self, product: Product) -> bool:
        """Whether the parts lie along the layer's input channels, so that its weights can take
        factors back.
        """
        node = self.graph.by_name[product.layer]
        lying = self.where.runs.get(product.value) or self.where.origins.get(product.value)
        if lying is None:
            return False
        if node.row.scales_channels:
            # On integers of their own the products of parts are as good.
            return isinstance(lying, Runs) and lying.axis == node.row.channels
        if not node.is_multiplying or node.operands.get("input") != product.value:
            return False
        if node.row.spatial == 0:
            return lying.axis == self.graph.by_name[product.value].rank - 1
        return lying.axis == _CHANNELS_OF_IMAGES


def left_out(join: JoinPlan, *, is_close: bool) -> tuple[Key, ...]:
    """Return the tensors that a plan does without once a join is decided.

    Args:
        is_close: whether the ranges of the parts are close enough for one scale.
    """
    has_no_other = join.is_of_channels and not join.inputs
    has_one = join.is_single or ((is_close or has_no_other) and not join.is_returned)
    if join.single is not None and has_one:
        return (*join.alone, *join.inputs, *join.observed)
    if join.is_single:
        return ()
    single = () if join.single is None else (join.single,)
    is_split = not is_close and not join.observed
    return (*single, *join.observed, *(join.divisible if is_split else ()))


def decide(
    join: JoinPlan, lost_bits: Mapping[str, float], gains: Mapping[str, Mapping[str, float]]
) -> JoinDecision:
    """Return how a join is quantized.

    Args:
        lost_bits: by layer that makes a part, how many bits its values lose on the scale of the
            whole.
        gains: by layer that multiplies the join, how much the squared error of each part weighs
            in its output.
    """
    lost_db = max((_lost_db(lost_bits, weights) for weights in gains.values()), default=0.0)
    left = left_out(join, is_close=lost_db <= CLOSE_DB)
    has_one = join.single not in left if join.single is not None else join.is_of_channels
    return JoinDecision(join, "one" if has_one else "own", gains, lost_bits, lost_db, left)


def lost_bits(join: JoinPlan, widths: Mapping[Key, float]) -> dict[str, float]:
    """Return the base-2 logarithm of how much wider the range of the whole is, by the layer
    that makes a part.

    Args:
        widths: of the ranges of tensors. Those that lose nothing on another scale have none:
            all zero, or in a format with an exponent.
    """
    whole = widths.get(join.single or join.inputs[0])
    lost: dict[str, float] = {}
    for key in join.sources:
        if key in widths and whole is not None:
            lost[part_name(key)] = round(max(0.0, math.log2(whole / widths[key])), 3)
    return lost


def _lost_db(lost_bits: Mapping[str, float], gains: Mapping[str, float]) -> float:
    """How much larger the error of a product is where its parts lose bits, in dB."""
    one = sum(gains.values())
    own = 0.0
    for layer, gain in gains.items():
        own += gain * 4.0 ** -lost_bits.get(layer, 0.0)
    return round(10 * math.log10(one / own), 3) if own > 0 else 0.0


def decided_unseen(plan: Plan) -> Plan:
    """Return the plan with the joins decided whose scales calibration does not find: their
    parts count as close.
    """
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
