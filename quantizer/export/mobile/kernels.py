"""Finds which layers the int8 kernels of phones multiply, and what they cannot hold.

ExecuTorch's XNNPACK and LiteRT have nearly the same kernels. Inputs and outputs are int8 with
one scale and any zero point. Weights are int8 with a scale for each output channel, and biases
are int32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quantizer.config.roles import is_parameter
from quantizer.export.arithmetic import layer_input_spec, output_spec
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.limits import HALF_EVEN, Limit, beyond
from quantizer.export.performance import Kernels
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.plan.groups import layout
from quantizer.plan.layout import Layout
from quantizer.plan.model import TensorSpecs

PRESET = "mobile_int8"
"""The preset whose plans these kernels hold."""
_FUSED = ("relu", "relu6", "hardtanh")
"""The activation functions that kernels compute with the layer before them."""
DOUBTFUL = (
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "argsort",
    "conv3d",
    "conv_transpose3d",
    "diagonal_scatter",
    "histc",
    "median",
    "searchsorted",
    "sort",
    "std_mean",
    "topk",
    "var_mean",
)
"""Operators of the table that an engine may lack."""
_MOST_AXES = 2
"""Of a convolution's kernel."""
_TO_INT8 = "quantize it to int8, or leave it float"
_ACTIVATION_LIMITS = (
    Limit(
        lambda spec: spec.dtype == "int" and spec.bit_width == 8,
        "is {number_format}, and kernels compute with int8",
        _TO_INT8,
    ),
    Limit(
        lambda spec: not spec.is_dynamic,
        "has a range that is found at run time",
        "give it a static range",
    ),
    Limit(
        lambda spec: spec.qscheme == "per_tensor",
        "has more than one scale",
        "set per_channel to false there",
    ),
    Limit(
        lambda spec: spec.quant_max - spec.quant_min == 255,
        "uses only some of the 256 codes",
        "set narrow_range to false there",
    ),
    HALF_EVEN,
)
_WEIGHT_LIMITS = (
    Limit(
        lambda spec: spec.dtype == "int" and spec.bit_width <= 8,
        "is {number_format}, and kernels multiply int8",
        _TO_INT8,
    ),
    Limit(lambda spec: spec.signed, "is unsigned", "set signed to true there"),
    Limit(lambda spec: spec.symmetric, "has a zero point", "set symmetry to true there"),
    Limit(
        lambda spec: spec.qscheme in ("per_tensor", "per_channel"),
        "has scales for groups of inputs",
        "set per_channel to true there",
    ),
)


@dataclass(frozen=True)
class MobileEngine:
    """What the int8 kernels of one engine take.

    Attributes:
        name: for sentences.
        compiler: the same for what makes its files.
        has_computed_filters: whether a convolution without groups may have filters that are
            computed.
        has_least_code: whether int8 weights may have the code -128.
        float_axes: how many axes a layer's kernel has if it may give floats for int8 inputs and
            weights, 0 for linear layers.
    """

    name: str
    compiler: str
    has_least_code: bool
    has_computed_filters: bool = False
    float_axes: tuple[int, ...] = ()

    def refusals(self, graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
        """Yield the tensors that no kernel holds, and the network if no layer has a kernel."""
        are_held = True
        for (layer, role), spec in specs.items():
            node = graph.by_name[layer]
            reason: Reason | None = None
            if not is_parameter(role) and node.is_float and node.dtype != torch.float32:
                dtype = str(node.dtype).removeprefix("torch.")
                reason = f"is computed in {dtype}", "convert the model to float32"
            elif not is_parameter(role):
                reason = beyond(_ACTIVATION_LIMITS, spec)
            elif role == "weights" and node.is_multiplying and not _is_grouped_transpose(node):
                reason = beyond(self._weight_limits(int(node.row.transposed)), spec)
            if reason is not None:
                are_held = False
                yield Refusal(*reason, layer, role)
        for node in graph.nodes:
            if self._lacks_computed_filters(node):
                are_held = False
                yield Refusal(
                    f"has filters that are computed, which {self.compiler} cannot convert",
                    "write it as a product of matrices (torch.bmm), or use <--deploy onnx>",
                    node.name,
                )
        if not are_held or not specs:
            return
        kernels = self.kernels(graph, specs)
        if kernels.floating and not kernels.integer:
            reasons = sorted(set(kernels.floating.values()))
            yield Refusal(
                f"would multiply every layer in float: {'; '.join(reasons)}",
                f"start from configs/{PRESET}.json, or use <--deploy pt2_float>",
            )

    def kernels(self, graph: Graph, specs: TensorSpecs) -> Kernels:
        """Return the layers that are multiplied in int8, and the reason for each other one."""
        where = layout(graph)
        reasons = {
            node.name: self._float_reason(node, graph, specs, where)
            for node in graph.nodes
            if node.row.kind == "mac" and not node.row.scales_channels
        }
        floating = {layer: reason for layer, reason in reasons.items() if reason is not None}
        integer = tuple(layer for layer in reasons if layer not in floating)
        return Kernels(integer, floating)

    def _weight_limits(self, axis: int) -> list[Limit]:
        """Return what the engine holds as weights, whose outputs are along an axis."""
        limits = [
            *_WEIGHT_LIMITS,
            Limit(
                lambda spec: spec.qscheme != "per_channel" or spec.ch_axis == axis,
                "has scales along its inputs",
                f"set ch_axis to {axis} there",
            ),
        ]
        if not self.has_least_code:
            without_least_code = Limit(
                lambda spec: spec.quant_min != -128,
                f"may have the code -128, which {self.name} does not allow",
                "set narrow_range to true there",
            )
            limits.append(without_least_code)
        return limits

    def _float_reason(
        self, node: Node, graph: Graph, specs: TensorSpecs, where: Layout
    ) -> str | None:
        """Return why a layer is multiplied in float; None if there is an int8 kernel."""
        if not node.is_multiplying:
            return f"{self.name} has no int8 kernel for {node.op}"
        if _is_grouped_transpose(node):
            return f"{self.name} has no int8 kernel for transposed convolutions in groups"
        if (node.row.spatial or 0) > _MOST_AXES:
            return f"{self.name} has no int8 kernel for convolutions with three axes"
        if (node.name, "weights") not in specs:
            return "its weights are not quantized"
        if layer_input_spec(node.name, graph, specs) is None:
            return "its input is not quantized"
        reason = _output_reason(node, graph, specs, where)
        # A kernel may give floats for a layer with int8 inputs and weights
        is_plain = not node.row.transposed and node.attrs.get("groups", 1) == 1
        gives_floats = is_plain and (node.row.spatial or 0) in self.float_axes
        return None if gives_floats else reason

    def _lacks_computed_filters(self, node: Node) -> bool:
        """Return whether a convolution has filters that follow from the input, and the engine
        has no form for it.
        """
        is_computed = isinstance(node.inputs.get("weight"), Ref)
        if not is_computed or not node.row.spatial:
            return False
        # A number of groups that follows the batch is no attribute, and XNNPACK leaves such a
        # convolution to ExecuTorch's own kernel
        is_in_groups = node.attrs.get("groups", 1) != 1
        return is_in_groups or not self.has_computed_filters

    def with_float_outputs(self, graph: Graph, specs: TensorSpecs) -> frozenset[str]:
        """Return the layers that are multiplied in int8, and whose outputs stay in float."""
        where = layout(graph)
        return frozenset(
            layer
            for layer in self.kernels(graph, specs).integer
            if _output_reason(graph.by_name[layer], graph, specs, where) is not None
        )


def _is_grouped_transpose(node: Node) -> bool:
    """Return whether a layer is a transposed convolution in groups."""
    return node.row.transposed and node.attrs.get("groups", 1) != 1


def _output_reason(node: Node, graph: Graph, specs: TensorSpecs, where: Layout) -> str | None:
    """Return why the output of a layer is not quantized next; None if it is."""
    if output_spec(node.name, graph, specs, where) is None:
        return "its output is not quantized"
    if (node.name, "activation") in specs:
        return None
    readers = graph.consumers[node.name]
    if len(readers) != 1 or not readers[0]:
        return "several readers quantize its output"
    reader = graph.by_name[readers[0]]
    is_quantized = (reader.name, "activation") in specs
    if (reader.name, "input") in specs or (reader.op in _FUSED and is_quantized):
        return None
    return f"{reader.op} follows it, and its output is quantized after that"
