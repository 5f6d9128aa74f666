"""Finds which layers the int8 kernels of phones multiply, and what they cannot hold.

ExecuTorch's XNNPACK and LiteRT have nearly the same kernels. Inputs and outputs are int8 with
one scale and any zero point. Weights are int8 with a scale for each output channel, and biases
are int32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.export.arithmetic.operands import layer_input_spec, output_spec
from quantizer.export.exporter import Refusal
from quantizer.export.kernels import Kernels
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
_Reason = tuple[str, str]
"""Why a tensor cannot be held, and what to change."""


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
            reason: _Reason | None = None
            if not is_parameter(role):
                reason = self._activation_reason(spec, node)
            elif role == "weights" and node.is_multiplying and not _is_grouped_transpose(node):
                reason = self._weight_reason(spec, int(node.row.transposed))
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
        integer: list[str] = []
        floating: dict[str, str] = {}
        for node in graph.nodes:
            if node.row.kind != "mac" or node.row.scales_channels:
                continue
            reason = self._float_reason(node, graph, specs, where)
            if reason is None:
                integer.append(node.name)
            else:
                floating[node.name] = reason
        return Kernels(tuple(integer), floating)

    def _activation_reason(self, spec: QuantizationSpec, node: Node) -> _Reason | None:
        """Return why the engine cannot run an activation, with a remedy; None if it can."""
        if node.is_float and node.dtype != torch.float32:
            dtype = str(node.dtype).removeprefix("torch.")
            return f"is computed in {dtype}", "convert the model to float32"
        if spec.dtype != "int" or spec.bit_width != 8:
            return (
                f"is {_format_of(spec)}, and {self.name} computes with int8",
                "quantize it to int8, or leave it float",
            )
        if spec.is_dynamic:
            return "has a range that is found at run time", "give it a static range"
        if spec.qscheme != "per_tensor":
            return "has more than one scale", "set per_channel to false there"
        if spec.quant_max - spec.quant_min != _CODES - 1:
            return "uses only some of the 256 codes", "set narrow_range to false there"
        if spec.round_mode != "half_even":
            return (
                f"is rounded by {spec.round_mode}, and {self.name} rounds half to even",
                'set round_mode to "half_even"',
            )
        return None

    def _weight_reason(self, spec: QuantizationSpec, axis: int) -> _Reason | None:
        """Return why the engine cannot hold a weight, with a remedy; None if it can."""
        if spec.dtype != "int" or spec.bit_width > 8:
            return (
                f"is {_format_of(spec)}, and {self.name} multiplies int8",
                "quantize it to int8, or leave it float",
            )
        if not spec.signed:
            return "is unsigned", "set signed to true there"
        if not spec.symmetric:
            return "has a zero point", "set symmetry to true there"
        if spec.qscheme not in ("per_tensor", "per_channel"):
            return "has scales for groups of inputs", "set per_channel to true there"
        if spec.qscheme == "per_channel" and spec.ch_axis != axis:
            return "has scales along its inputs", f"set ch_axis to {axis} there"
        if spec.quant_min == _LEAST_CODE and not self.has_least_code:
            return (
                f"may have the code {_LEAST_CODE}, which {self.name} does not allow",
                "set narrow_range to true there",
            )
        return None

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
        return None if self._gives_floats(node) else reason

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

    def _gives_floats(self, node: Node) -> bool:
        """Return whether a kernel gives floats for a layer with int8 inputs and weights."""
        has_kernel = not node.row.transposed and node.attrs.get("groups", 1) == 1
        return has_kernel and (node.row.spatial or 0) in self.float_axes

    def with_float_outputs(self, graph: Graph, specs: TensorSpecs) -> frozenset[str]:
        """Return the layers that are multiplied in int8, and whose outputs stay in float."""
        where = layout(graph)
        layers: set[str] = set()
        for layer in self.kernels(graph, specs).integer:
            node = graph.by_name[layer]
            if _output_reason(node, graph, specs, where) is not None:
                layers.add(layer)
        return frozenset(layers)


_CODES = 256
_LEAST_CODE = -128


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


def _format_of(spec: QuantizationSpec) -> str:
    """Return the number format of a spec."""
    return f"int{spec.bit_width}" if spec.dtype == "int" else spec.dtype
