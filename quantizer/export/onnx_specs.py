"""How layers' inputs and outputs are quantized, and weights restated in what ONNX Runtime has kernels for: the same
values by other codes, scales or groups.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.engine.solution import Solution
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key

Specs = Mapping[Key, QuantizationSpec]
BLOCKS = (256, 128, 64, 32, 16)
"""The sizes of groups that MatMulNBits has."""
BLOCK = 128
"""Its fastest, for weights that have no groups of their own."""


def input_key(layer: str, graph: Graph, specs: Specs) -> Key | None:
    """Where what a layer reads is quantized: by itself, or where it was made."""
    return next((key for key in ((layer, "input"), *_up(layer, graph)) if key in specs), None)


def input_spec(layer: str, graph: Graph, specs: Specs) -> QuantizationSpec | None:
    """How what a layer reads is quantized."""
    key = input_key(layer, graph, specs)
    return None if key is None else specs[key]


def output_spec(layer: str, graph: Graph, specs: Specs) -> QuantizationSpec | None:
    """How what a layer makes is quantized: at the layer, after what alone reads it, or by all that read it, alike."""
    for name in _down(layer, graph):
        read = {specs.get((reader, "input")) for reader in graph.consumers[name]}
        found = specs.get((name, "activation")) or (read.pop() if len(read) == 1 else None)
        if found is not None:
            return found
    return None


def is_narrow(spec: QuantizationSpec | None) -> bool:
    """Whether it is of integers that kernels multiply: 8 bits or fewer."""
    return spec is not None and spec.dtype == "int" and spec.bit_width <= 8


def restated(graph: Graph, solution: Solution, *, packed: bool = False) -> Solution:
    """The solution with weights that multiply in the form that ONNX Runtime's kernels take; they stand for the same.

    Beside quantized inputs that is one scale, or one for each channel, with codes of 8 bits. Beside floats it is groups
    of at most 256, for 4 bits or fewer or if codes will be `packed`, or else a scale for each channel.
    """
    specs, tensors = solution.specs, dict(solution.tensors)
    for (layer, role), tensor in solution.tensors.items():
        node = graph.by_name[layer]
        if role != "weights" or node.row.kind != "mac" or not is_narrow(tensor.spec):
            continue
        if tensor.spec.qscheme != "per_group" and is_narrow(input_spec(layer, graph, specs)):
            tensors[layer, role] = replace(tensor, spec=replace(tensor.spec, bit_width=8, narrow_range=False))
        elif graph.weight(node).dim() == 2:
            tensors[layer, role] = _for_floats(tensor, *graph.weight(node).shape, packed=packed)
    return replace(solution, tensors=tensors)


def _for_floats(tensor: QuantizedTensor, outputs: int, inputs: int, *, packed: bool) -> QuantizedTensor:
    """A linear layer's weight in the form that is multiplied with floats; as it is where there is none."""
    spec = tensor.spec
    if spec.ch_axis not in (None, 1 if spec.qscheme == "per_group" else 0):
        return tensor
    group = inputs if spec.qscheme != "per_group" or spec.group_size in (None, -1) else spec.group_size
    assert group is not None  # of a spec per group
    block = next((size for size in (BLOCK, *BLOCKS) if group % size == 0), None)
    if group == inputs and (block is None or (spec.bit_width > 4 and not packed)):
        channels = replace(spec, qscheme="per_channel", ch_axis=0, group_size=None)
        return _rescaled(tensor, channels, lambda each: each.expand(outputs, 1)[:, 0])
    if group in BLOCKS or block is None:
        return tensor
    blocks, count = replace(spec, qscheme="per_group", ch_axis=1, group_size=block), group // block
    return _rescaled(tensor, blocks, lambda each: each.expand(outputs, -1).repeat_interleave(count, 1))


def _rescaled(tensor: QuantizedTensor, spec: QuantizationSpec, spread: Callable[[Tensor], Tensor]) -> QuantizedTensor:
    """The same codes with the scales and zero points in another shape; `spread` is given [outputs or 1, groups]."""

    def placed(values: Tensor) -> Tensor:
        return spread(values.reshape(values.shape[0] if values.dim() else 1, -1)).contiguous()

    return replace(tensor, spec=spec, scale=placed(tensor.scale), zero_point=placed(tensor.zero_point))


def _up(layer: str, graph: Graph) -> Iterable[Key]:
    """The layer's source, and those that only hand its value on."""
    node: Node | None = graph.source(graph.by_name[layer])
    while node is not None:
        yield node.name, "input" if node.op == "input" else "activation"
        node = graph.source(node) if node.row.keeps_scale else None


def _down(layer: str, graph: Graph) -> Iterable[str]:
    """The layer, and what alone reads the one before, as long as it moves values or cuts them off."""
    while True:
        yield layer
        reader, *others = graph.consumers[layer] or ("",)
        if others or not reader or graph.by_name[reader].row.kind not in ("fusable", "passthrough"):
            return
        layer = reader
