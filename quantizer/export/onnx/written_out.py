"""Operators that torch.onnx or a runtime gets wrong, by others that they get right, with the
same values.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quantizer.export.onnx import complex_numbers as onnx_complex

_ATEN = torch.ops.aten
_AVERAGES = {
    _ATEN.avg_pool1d.default: torch.nn.functional.avg_pool1d,
    _ATEN.avg_pool2d.default: torch.nn.functional.avg_pool2d,
    _ATEN.avg_pool3d.default: torch.nn.functional.avg_pool3d,
}


def decompositions(program: ExportedProgram) -> Mapping[Any, Callable[..., Any]]:
    """Return what to run in place of operators of a program; none where all are read right."""
    written_out: dict[Any, Callable[..., Any]] = {}
    for node in program.graph.find_nodes(
        op="call_function", target=_ATEN.scaled_dot_product_attention.default
    ):
        if node.args[0].meta["val"].dim() != 4:
            written_out[node.target] = _attention_of_heads
    for node in program.graph.nodes:
        if node.target is _ATEN.instance_norm.default and not node.args[5]:
            written_out[node.target] = _norm_of_statistics
        elif node.target is _ATEN.pad.default and "circular" in node.args:
            written_out[node.target] = _circular_pad
        elif node.target in _AVERAGES and _has_divisor(node):
            written_out[node.target] = _average_by_divisor(_AVERAGES[node.target])
    bags = program.graph.find_nodes(op="call_function", target=_ATEN.embedding_bag.padding_idx)
    if bags and all(map(_has_even_bags, bags)):
        written_out[_ATEN.embedding_bag.padding_idx] = _even_bags
    if any(_is_complex(node.meta.get("val")) for node in program.graph.nodes):
        written_out |= onnx_complex.decompositions()
    return written_out


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _attention_of_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **others: Any,
) -> Any:
    """Write attention in four dimensions, which are all that torch.onnx knows of it."""
    missing = 4 - query.dim()
    if missing not in (1, 2):
        return NotImplemented  # stays as it is
    for _ in range(missing):
        query, key, value = (tensor.unsqueeze(-3) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unsqueeze(1)
    attended = _ATEN.scaled_dot_product_attention.default(
        query, key, value, attn_mask, *args, **others
    )
    return attended.squeeze(-3) if missing == 1 else attended.squeeze(-3).squeeze(-3)


def _norm_of_statistics(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    *others: Any,
) -> Any:
    """Write an instance norm by tracked statistics as the batch norm that it is, without
    statistics for each sample.
    """
    if use_input_stats:
        return NotImplemented
    return _ATEN.batch_norm.default(x, weight, bias, running_mean, running_var, False, *others)


def _circular_pad(
    x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """Write the padding with values of the other end by indices; OpenVINO has no such
    padding.
    """
    if mode != "circular":
        return NotImplemented
    for number in range(len(pad) // 2):
        axis = x.dim() - 1 - number
        before, after = pad[2 * number : 2 * number + 2]
        size = x.shape[axis]
        if before or after:
            x = x.index_select(axis, torch.arange(-before, size + after) % size)
    return x


def _has_even_bags(node: fx.Node) -> bool:
    """Return whether the bags of a table's rows are the rows of a matrix of indices."""
    _, flattened, offsets, *_ = node.args
    if not isinstance(offsets, fx.Node) or offsets.target is not _ATEN.arange.start_step:
        return False
    if not isinstance(flattened, fx.Node) or flattened.target not in (
        _ATEN.reshape.default,
        _ATEN.view.default,
    ):
        return False
    (matrix, _), (start, _, length) = flattened.args, offsets.args
    if not isinstance(matrix, fx.Node) or start != 0:
        return False
    shape = matrix.meta["val"].shape
    if isinstance(length, fx.Node):
        length = length.meta["val"]
    return len(shape) == 2 and statically_known_true(shape[1] == length)


def _even_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Write bags of one length as rows that are looked up and reduced; torch.onnx writes no
    valid loop.
    """
    if include_last_offset or padding_idx is not None:
        return NotImplemented
    bags = indices.reshape(offsets.shape[0], -1)
    rows = _ATEN.embedding.default(weight, bags)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(bags.shape).unsqueeze(-1)
    reduce = (Tensor.sum, Tensor.mean, Tensor.amax)[mode]
    return reduce(rows, 1), offsets, offsets, offsets  # of the others nothing is read


def _has_divisor(node: fx.Node) -> bool:
    return "divisor_override" in node.kwargs or len(node.args) > 6


def _average_by_divisor(average: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function that writes sums over windows that are divided by a number: torch.onnx
    ignores the number.
    """

    def write(
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        if divisor_override is None:
            return NotImplemented
        dims = len(kernel)
        strides = list(stride) or list(kernel)
        pads = list(padding) * dims if len(padding) == 1 else list(padding)
        # Behind the values as much as the last window needs, so that all windows are whole.
        amounts: list[int] = []
        windows = average(x, kernel, strides, pads, ceil_mode).shape[-dims:]
        for axis in reversed(range(dims)):
            needed = (windows[axis] - 1) * strides[axis] + kernel[axis]
            amounts += [pads[axis], needed - pads[axis] - x.shape[axis - dims]]
        mean = average(torch.nn.functional.pad(x, amounts), kernel, strides)
        return mean * (math.prod(kernel) / divisor_override)

    return write
