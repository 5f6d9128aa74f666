"""How layers' inputs and outputs are quantized, and weights restated in what ONNX Runtime has
kernels for: the same values by other codes, scales or groups.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role
from quantizer.graph.ir import Graph, Node
from quantizer.graph.origins import maker
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.groups import PART_SCALE, Join, Layout, layout
from quantizer.plan.model import Key
from quantizer.plan.value_readers import values_readers
from quantizer.storage.deferred_tensor import loaded

Specs = Mapping[Key, QuantizationSpec]
BLOCKS = (256, 128, 64, 32, 16)
"""The sizes of groups that MatMulNBits has."""
BLOCK = 128
"""Its fastest, for weights that have no groups of their own."""
SIGN = 128
"""Between codes of 8 bits with a sign and those without."""
SAFE = 64
"""Largest magnitude of int8 weights of which every CPU multiplies and adds right: those without
VNNI add up two products with uint8 in 16 bits, and what does not fit saturates, 2 * 255 * 64
still does.
"""


def input_key(layer: str, graph: Graph, specs: Specs) -> Key | None:
    """Where what a layer reads is quantized: by itself, or where it was made."""
    return next((key for key in ((layer, "input"), *_up(layer, graph)) if key in specs), None)


def input_spec(layer: str, graph: Graph, specs: Specs) -> QuantizationSpec | None:
    """How what a layer reads is quantized."""
    key = input_key(layer, graph, specs)
    return None if key is None else specs[key]


def output_spec(
    layer: str, graph: Graph, specs: Specs, where: Layout
) -> QuantizationSpec | None:
    """How what a layer makes is quantized: where `where`, the graph's layout, has it, or by all
    that read it, alike.
    """
    for name in _points(layer, where):
        reading = {
            specs.get((reader, "input"))
            for reader, _ in values_readers(graph, name, where.floats)
        }
        found = specs.get((name, "activation")) or (
            reading.pop() if len(reading) == 1 else None
        )
        if found is not None:
            return found
    return None


def is_narrow(spec: QuantizationSpec | None) -> bool:
    """Whether it is of integers that kernels multiply: 8 bits or fewer."""
    return spec is not None and spec.dtype == "int" and spec.bit_width <= 8


def restated(
    graph: Graph, solution: Solution, weights: str, *, packed: bool = False
) -> Solution:
    """The solution with weights that multiply in the form that ONNX Runtime's kernels take;
    they stand for the same.

    Beside quantized inputs that is one scale, or one for each channel, with codes of 8 bits:
    int8 or uint8, as `weights` says. Beside floats it is groups of at most 256, for 4 bits or
    fewer or if codes will be `packed`, or else a scale for each channel.
    """
    specs, tensors = solution.specs, dict(solution.tensors)
    for key, tensor in solution.tensors.items():
        node = graph.by_name[key[0]]
        if _meets_integers(key, tensor.spec, graph, specs):
            # ONNX Runtime multiplies them in float, and OpenVINO misreads uint8 ones beside
            # inputs from 0 on.
            tensors[key] = _for_integers(tensor, "int8" if node.row.transposed else weights)
        elif key[1] == "weights" and node.row.kind == "mac" and is_narrow(tensor.spec):
            shape = graph.weight(node).shape
            tensors[key] = (
                _for_floats(tensor, *shape, packed=packed) if len(shape) == 2 else tensor
            )
    return replace(solution, tensors=tensors)


def quantized_apart(
    graph: Graph, solution: Solution, *, any_rounding: bool = False
) -> Solution:
    """The solution with values that a join alone reads quantized before it, too: to the same
    codes.

    So kernels of integers can make them. Where rounding takes operators in float, it would cost
    more than that brings, without `any_rounding`.
    """
    tensors, where = dict(solution.tensors), layout(graph)
    for join in where.joins.values():
        whole = solution.tensors.get((join.group.point, "activation"))
        if not _keeps_codes(graph, join):
            continue
        if whole is None or not is_narrow(whole.spec) or whole.spec.is_dynamic:
            continue
        if any_rounding or whole.spec.round_mode == "half_even":
            factors = _part_factors(graph, where, join)
            for part in join.alone:
                factor = next((factors[name] for name in part.members if name in factors), None)
                if factor is not None:
                    alike = replace(whole, scale=whole.scale / factor)
                    tensors.setdefault((part.point, "activation"), alike)
    return replace(solution, tensors=tensors)


def _keeps_codes(graph: Graph, join: Join) -> bool:
    """Whether rounding before a join's activation function leads to the same codes as rounding
    after it alone.
    """
    between = [graph.by_name[name] for name in join.group.members if name != join.name]
    return all(
        node.row.keeps_scale or node.row.cuts or node.op == PART_SCALE for node in between
    )


def _part_factors(graph: Graph, where: Layout, join: Join) -> dict[str, float]:
    """What the parts of a join are multiplied with before they are quantized, by the layer that
    made them.
    """
    scaling = graph.by_name[join.group.point]
    if scaling.op != PART_SCALE:
        return {name: 1.0 for part in join.alone for name in part.members}
    (value,) = scaling.refs()
    factors = loaded(graph.weight(scaling)).tolist()
    by_source: dict[str, float] = {}
    first = 0
    if value not in where.origins:
        return {}
    for source, length in where.origins[value].parts:
        by_source[source] = factors[first]
        first += length
    return by_source


def processors(graph: Graph, solution: Solution) -> tuple[str, ...]:
    """A sentence on where a restated solution is computed right, or faster, if that depends on
    the processor.
    """
    specs = solution.specs
    met = [
        tensor.codes
        for key, tensor in solution.tensors.items()
        if _meets_integers(key, tensor.spec, graph, specs)
        and not graph.by_name[key[0]].row.transposed
    ]
    if any(codes is not None and codes.dtype == torch.uint8 for codes in met):
        return (
            "8-bit weights are uint8, for any processor; on those with VNNI, --onnx_weights "
            "int8 is faster",
        )
    if any(codes is not None and int(codes.int().abs().max()) > SAFE for codes in met):
        return (
            "8-bit weights are int8: x86 processors without VNNI add up their products wrong",
        )
    return ()


def _meets_integers(key: Key, spec: QuantizationSpec, graph: Graph, specs: Specs) -> bool:
    """Whether a tensor is a weight that is multiplied with integers, or may be, as those of
    recurrent layers.
    """
    (layer, role), is_weight = key, base_role(key[1]) == "weights" and is_narrow(spec)
    if not is_weight or graph.by_name[layer].row.kind != "mac" or spec.qscheme == "per_group":
        return False
    return (
        is_narrow(input_spec(layer, graph, specs)) if role == "weights" else spec.bit_width == 8
    )


def _for_integers(tensor: QuantizedTensor, weights: str) -> QuantizedTensor:
    """A weight with codes of 8 bits; those that cannot overflow sums of 16 bits are int8 in any
    case.
    """
    spec = replace(tensor.spec, bit_width=8, narrow_range=False)
    if tensor.codes is None:
        return replace(tensor, spec=spec)
    least, most = (int(end) for end in tensor.codes.aminmax())
    if weights == "int8" or max(-least, most) <= SAFE:
        return _shifted(tensor, spec, -SIGN if most > SIGN - 1 else 0, signed=True)
    return _shifted(tensor, spec, SIGN if tensor.spec.signed else 0, signed=False)


def _shifted(
    tensor: QuantizedTensor, spec: QuantizationSpec, by: int, *, signed: bool
) -> QuantizedTensor:
    """The same values by codes that are `by` higher."""
    assert tensor.codes is not None
    codes = (tensor.codes.to(torch.int32) + by).to(torch.int8 if signed else torch.uint8)
    spec = replace(spec, signed=signed, symmetric=spec.symmetric and by == 0)
    return replace(tensor, spec=spec, codes=codes, zero_point=tensor.zero_point + by)


def _for_floats(
    tensor: QuantizedTensor, outputs: int, inputs: int, *, packed: bool
) -> QuantizedTensor:
    """A linear layer's weight in the form that is multiplied with floats; as it is where there
    is none.
    """
    spec = tensor.spec
    if spec.ch_axis not in (None, 1 if spec.qscheme == "per_group" else 0):
        return tensor
    group = (
        inputs
        if spec.qscheme != "per_group" or spec.group_size in (None, -1)
        else spec.group_size
    )
    assert group is not None  # of a spec per group
    block = next((size for size in (BLOCK, *BLOCKS) if group % size == 0), None)
    if group == inputs and (block is None or (spec.bit_width > 4 and not packed)):
        channels = replace(spec, qscheme="per_channel", ch_axis=0, group_size=None)
        return _rescaled(tensor, channels, lambda each: each.expand(outputs, 1)[:, 0])
    if group in BLOCKS or block is None:
        return tensor
    blocks, count = (
        replace(spec, qscheme="per_group", ch_axis=1, group_size=block),
        group // block,
    )
    return _rescaled(
        tensor, blocks, lambda each: each.expand(outputs, -1).repeat_interleave(count, 1)
    )


def _rescaled(
    tensor: QuantizedTensor, spec: QuantizationSpec, spread: Callable[[Tensor], Tensor]
) -> QuantizedTensor:
    """The same codes with the scales and zero points in another shape; `spread` is given
    [outputs or 1, groups].
    """

    def placed(values: Tensor) -> Tensor:
        return spread(values.reshape(values.shape[0] if values.dim() else 1, -1)).contiguous()

    return replace(
        tensor, spec=spec, scale=placed(tensor.scale), zero_point=placed(tensor.zero_point)
    )


def _up(layer: str, graph: Graph) -> Iterable[Key]:
    """The layer's source, and those that only hand its value on, or join parts of it."""
    node: Node | None = graph.source(graph.by_name[layer])
    while node is not None:
        yield node.name, "input" if node.op == "input" else "activation"
        if node.is_join:
            makers = {maker(graph, name) for name in node.joined()}
            node = graph.by_name[makers.pop()] if len(makers) == 1 else None
        else:
            node = graph.source(node) if node.row.keeps_scale else None


def _points(layer: str, where: Layout) -> Iterator[str]:
    """The layers at which the values that a layer makes may be quantized: with what follows it,
    or once joined.
    """
    point: str | None = layer
    while point:
        yield point
        point = where.served.get(point)
    for join in where.joins.values():
        if any(layer in part.members for part in join.alone):
            yield join.group.point
