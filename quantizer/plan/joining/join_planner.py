"""Plan joins: the tensors that calibration observes for them, and the decisions that it has to
make.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from itertools import groupby

from quantizer.config.roles import channels_role
from quantizer.graph.channels.origins import Runs
from quantizer.graph.ir import Graph
from quantizer.plan.joining.joins import input_role, open_joins
from quantizer.plan.layout import Join, Layout, Multiplication, quantization_point
from quantizer.plan.model import JoinPlan, Key, PartRuns, TensorPlan, is_entry, output_role

_CHANNELS_OF_IMAGES = 1


class JoinPlanner:
    """A planner of the decisions that calibration has to make about joins.

    Args:
        layout: the joins and origins of values in the graph.
        graph: the planned graph.
        tensors: the planned tensors, for both ways of each join.
        stated: inputs of layers that an entry of the config asks for, which are not dropped.
    """

    def __init__(
        self,
        layout: Layout,
        graph: Graph,
        tensors: Mapping[Key, TensorPlan],
        *,
        stated: Container[Key],
    ) -> None:
        self.layout = layout
        self.graph = graph
        self.tensors = tensors
        self.stated = stated

    def unplanned_parts(self) -> dict[Key, TensorPlan]:
        """Return tensors for parts of joins that are observed though they are not quantized on
        their own. They have the spec of the whole.
        """
        parts: dict[Key, TensorPlan] = {}
        for join in (*open_joins(self.layout).values(), *self.layout.blends.values()):
            whole = self._whole(join)
            if whole is None or join.is_single:
                continue
            spans = self._spans(join)
            for first, length in spans.values():
                span = (self.layout.runs[join.group.point].axis, first, length)
                key = self._span_key(join, first, length)
                parts[key] = replace(_like(whole, key), channels=span)
            if spans or join.group.point in self.layout.blends:
                continue
            for name in self.layout.origins[join.name].sources:
                key = self._part_key(name)
                node = self.graph.by_name[name]
                is_constant = node.row.kind == "structural" and not is_entry(node)
                if key not in self.tensors and not is_constant:
                    parts[key] = _like(whole, key)
        return parts

    def plans(self, observed: Container[Key]) -> list[JoinPlan]:
        """Return the open joins.

        Args:
            observed: the keys of `unplanned_parts`, whose tensors are only observed.
        """
        plans: list[JoinPlan] = []
        for join in open_joins(self.layout).values():
            if self._spans(join):
                plan = self._plan_of_channels(join)
            else:
                plan = self._plan(join, observed)
            if plan.single is not None or plan.inputs:
                plans.append(plan)
        for join in self.layout.blends.values():
            if self._spans(join):
                plans.append(self._plan_of_channels(join))
        return plans

    def _plan_of_channels(self, join: Join) -> JoinPlan:
        """Return the plan of a join whose parts are channels of an operator's output."""
        keys: dict[int, Key] = {}
        for number, (first, length) in self._spans(join).items():
            keys[number] = self._span_key(join, first, length)
        parts: dict[str, PartRuns] = {}
        inputs: list[Key] = []
        for product in join.products:
            key = self._input_key(product)
            if key is not None:
                inputs.append(key)
            if self._is_scalable(product):
                runs = []
                for number, channels in groupby(self.layout.runs[product.value].numbers):
                    runs.append((keys[number], len([*channels])))
                parts[product.layer] = tuple(runs)
        single = self._single_key(join)
        if single is not None and join.group.point in self.layout.blends:
            inputs.clear()
        return JoinPlan(
            name=join.name,
            single=single,
            sources=(*keys.values(),),
            alone=self._alone_keys(join),
            observed=(*keys.values(),),
            inputs=tuple(inputs),
            divisible=(),
            scalable=(*parts,),
            is_returned=join.is_returned,
            parts=parts,
        )

    def _spans(self, join: Join) -> dict[int, tuple[int, int]]:
        """Return first channel and length of each part in the quantized value, if calibration
        can bring the parts to one range there.

        Nothing else can be done for them if all products read the output of an operator.
        """
        whole = self._whole(join)
        point = join.group.point
        runs = self.layout.runs.get(point)
        if whole is None or runs is None or join.is_single or not whole.is_calibrated:
            return {}
        if whole.spec.dtype != "int" or not whole.spec.has_one_scale:
            return {}
        scalable = [self._is_scalable(product) for product in join.products]
        is_possible = all(scalable) if point in self.layout.blends else any(scalable)
        return runs.spans() if is_possible else {}

    def _span_key(self, join: Join, first: int, length: int) -> Key:
        """Return the key of a part that consists of channels of a value."""
        return join.group.point, channels_role(first, length)

    def _single_key(self, join: Join) -> Key | None:
        """Return the key of the tensor at a join, if it is planned."""
        key = (join.group.point, "activation")
        return key if key in self.tensors else None

    def _alone_keys(self, join: Join) -> tuple[Key, ...]:
        """Return the keys of the planned parts of a join that nothing else reads."""
        keys = [self._key_at(part.point) for part in join.alone]
        return tuple(key for key in keys if key in self.tensors)

    def _plan(self, join: Join, observed: Container[Key]) -> JoinPlan:
        """Return the plan of a join whose parts are outputs of layers."""
        sources = self._source_keys(join)
        has_scales = len(sources) >= len(self.layout.origins[join.name].sources)
        inputs: list[Key] = []
        divisible: list[Key] = []
        scalable: list[str] = []
        parts: dict[str, PartRuns] = {}
        for product in join.products:
            key = self._input_key(product)
            if key is not None:
                inputs.append(key)
            if not has_scales or not self._is_divisible(product):
                continue
            parts[product.layer] = self._channels(product)
            if key is not None:
                divisible.append(key)
            if self._is_scalable(product):
                scalable.append(product.layer)
        return JoinPlan(
            name=join.name,
            single=self._single_key(join),
            sources=sources,
            alone=self._alone_keys(join),
            observed=tuple(key for key in sources if key in observed),
            inputs=tuple(inputs),
            divisible=tuple(divisible),
            scalable=tuple(scalable),
            is_returned=join.is_returned,
            is_single=join.is_single,
            parts=parts,
        )

    def _whole(self, join: Join) -> TensorPlan | None:
        """Return the tensor of a whole join, at the join or at a layer that multiplies it."""
        single = self._single_key(join)
        if single is not None:
            return self.tensors[single]
        for product in join.products:
            key = self._input_key(product)
            if key is not None:
                return self.tensors[key]
        return None

    def _input_key(self, product: Multiplication) -> Key | None:
        """Return the key of the input that a layer multiplies, if it is planned and calibration
        may drop it.
        """
        role = input_role(self.graph, product)
        key = (product.layer, role or "")
        return key if key in self.tensors and key not in self.stated else None

    def _key_at(self, point: str) -> Key:
        """Return the key of the tensor at a layer's output."""
        return point, output_role(self.graph.by_name[point])

    def _part_key(self, source: str) -> Key:
        """Return the key of a part, whether it is planned or not."""
        return self._key_at(quantization_point(self.graph, self.layout, source) or source)

    def _source_keys(self, join: Join) -> tuple[Key, ...]:
        """Return the keys of a join's parts, each once. Those of trained tensors are
        weights.
        """
        alone: dict[str, Key] = {}
        for part in join.alone:
            alone.update(dict.fromkeys(part.members, self._key_at(part.point)))
        keys: dict[Key, None] = {}
        for source in self.layout.origins[join.name].sources:
            key = alone.get(source) or self._part_key(source)
            weights = (source, "weights")
            is_structural = self.graph.by_name[source].row.kind == "structural"
            if is_structural and weights in self.tensors:
                keys[weights] = None
            elif key in self.tensors:
                keys[key] = None
        return tuple(keys)

    def _channels(self, product: Multiplication) -> PartRuns:
        """Return the tensor of each run of a layer's input channels, None for constants, and
        the run's length.
        """
        runs: list[tuple[Key | None, int]] = []
        for source, length in self.layout.origins[product.value].parts:
            key = self._part_key(source) if source else None
            if key not in self.tensors:
                key = None
            runs.append((key, length))
        return tuple(runs)

    def _is_divisible(self, product: Multiplication) -> bool:
        """Return whether a layer's product is a sum, or a row, of products of each part with
        some of the weight.
        """
        node = self.graph.by_name[product.layer]
        origins = self.layout.origins.get(product.value)
        if origins is None or origins.axis is None or origins.constants:
            return False
        if node.row.scales_channels:
            return origins.axis == node.row.channels
        if not node.is_multiplying or node.operands.get("input") != product.value:
            return False
        return node.row.spatial == 0 or origins.axis == _CHANNELS_OF_IMAGES

    def _is_scalable(self, product: Multiplication) -> bool:
        """Return whether the parts are along the layer's input channels, so that its weights
        can undo factors.
        """
        node = self.graph.by_name[product.layer]
        parts = self.layout.runs.get(product.value) or self.layout.origins.get(product.value)
        if parts is None:
            return False
        if node.row.scales_channels:
            # Its channels are not added up, so other parts can just as well have a scale each
            return isinstance(parts, Runs) and parts.axis == node.row.channels
        if not node.is_multiplying or node.operands.get("input") != product.value:
            return False
        if node.row.spatial == 0:
            return parts.axis == self.graph.by_name[product.value].rank - 1
        return parts.axis == _CHANNELS_OF_IMAGES


def _like(tensor: TensorPlan, key: Key) -> TensorPlan:
    """Return the plan of a layer's output with the spec of another tensor."""
    layer, role = key
    return replace(tensor, layer=layer, role=role, source=layer, members=(layer,))
