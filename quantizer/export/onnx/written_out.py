"""Decomposes operators that torch.onnx or a runtime gets wrong, with the same values."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quantizer.export.onnx.complex_numbers import complex_decompositions
from quantizer.export.onnx.other_forms import other_forms
from quantizer.export.onnx.sample_filters import products_for

_ATEN = torch.ops.aten
_BAG_OPTIONS = ("mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx")
_POOL_OPTIONS = ("ceil_mode", "count_include_pad", "divisor_override")
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_EMBEDDING_BAG = _ATEN.embedding_bag.padding_idx
_AVERAGES = {
    _ATEN.avg_pool1d.default: torch.nn.functional.avg_pool1d,
    _ATEN.avg_pool2d.default: torch.nn.functional.avg_pool2d,
    _ATEN.avg_pool3d.default: torch.nn.functional.avg_pool3d,
}


def decompositions_for(program: ExportedProgram) -> Mapping[Any, Callable[..., Any]]:
    """Return decompositions of a program's operators; none if all are read right."""
    nodes = program.graph.nodes
    decompositions: dict[Any, Callable[..., Any]] = other_forms(nodes)
    decompositions |= products_for(nodes)
    bags: list[fx.Node] = []
    for node in nodes:
        if node.target is _ATTENTION and node.args[0].meta["val"].dim() != 4:
            decompositions[node.target] = _attention_of_heads
        elif node.target is _ATEN.instance_norm.default and not node.args[5]:
            decompositions[node.target] = _norm_of_statistics
        elif node.target is _ATEN.pad.default and "circular" in node.args:
            decompositions[node.target] = _circular_pad
        elif node.target in _AVERAGES and _has_divisor(node):
            decompositions[node.target] = _average_by_divisor(_AVERAGES[node.target])
        elif node.target is _EMBEDDING_BAG:
            bags.append(node)
    if bags and all(map(_has_even_bags, bags)):
        decompositions[_EMBEDDING_BAG] = _even_bags
    if any(_is_complex(node.meta.get("val")) for node in nodes):
        decompositions |= complex_decompositions()
    return decompositions


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


# torch calls the functions below with an operator's arguments. NotImplemented leaves the
# operator as it is.


def _attention_of_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *arguments: Any,
    **others: Any,
) -> Any:
    """Compute attention in four dimensions, the only ones that torch.onnx knows of it."""
    missing = 4 - query.dim()
    if missing not in (1, 2):
        return NotImplemented
    for _ in range(missing):
        query, key, value = (tensor.unsqueeze(-3) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unsqueeze(1)
    attended = _ATTENTION(query, key, value, attn_mask, *arguments, **others)
    for _ in range(missing):
        attended = attended.squeeze(-3)
    return attended


def _norm_of_statistics(x: Tensor, *arguments: Any) -> Any:
    """Compute an instance norm by tracked statistics as a batch norm.

    torch.onnx would use the statistics of each sample.
    """
    weight, bias, running_mean, running_var, use_input_stats, *others = arguments
    if use_input_stats:
        return NotImplemented
    return _ATEN.batch_norm.default(x, weight, bias, running_mean, running_var, False, *others)


def _circular_pad(
    x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    """Pad with values of the other end by indices; OpenVINO has no such padding."""
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
    *arguments: Any,
    **others: Any,
) -> Any:
    """Look up and reduce the rows of bags of one length; torch.onnx writes no valid loop."""
    options = dict(zip(_BAG_OPTIONS, arguments, strict=False)) | others
    if options.get("include_last_offset") or options.get("padding_idx") is not None:
        return NotImplemented
    bags = indices.reshape(offsets.shape[0], -1)
    rows = _ATEN.embedding.default(weight, bags)
    weights = options.get("per_sample_weights")
    if weights is not None:
        rows = rows * weights.reshape(bags.shape).unsqueeze(-1)
    reduce = (Tensor.sum, Tensor.mean, Tensor.amax)[options.get("mode", 0)]
    # Nothing reads the other results.
    return reduce(rows, 1), offsets, offsets, offsets


def _has_divisor(node: fx.Node) -> bool:
    return "divisor_override" in node.kwargs or len(node.args) > 6


def _average_by_divisor(average: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return an average pool that divides by a number, which torch.onnx ignores."""

    def compute(
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        *arguments: Any,
        **others: Any,
    ) -> Any:
        """Return the mean of each window times the size of a window over the divisor.

        NotImplemented if there is no divisor. Shapes and arguments are those of torch.
        """
        options = dict(zip(_POOL_OPTIONS, arguments, strict=False)) | others
        divisor = options.get("divisor_override")
        if divisor is None:
            return NotImplemented
        ceil_mode = options.get("ceil_mode", False)
        dims = len(kernel)
        strides = list(stride) or list(kernel)
        pads = list(padding) * dims if len(padding) == 1 else list(padding)
        # Padded behind the values as much as the last window needs, so that all are whole.
        amounts: list[int] = []
        windows = average(x, kernel, strides, pads, ceil_mode).shape[-dims:]
        for axis in reversed(range(dims)):
            needed = (windows[axis] - 1) * strides[axis] + kernel[axis]
            amounts += [pads[axis], needed - pads[axis] - x.shape[axis - dims]]
        mean = average(torch.nn.functional.pad(x, amounts), kernel, strides)
        return mean * (math.prod(kernel) / divisor)

    return compute
