"""Decomposes operators that torch.onnx has no form for, or that it or a runtime gets wrong.

The values are the same if none of the inputs is NaN.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import statically_known_true

from quantizer.export.onnx.decompositions import PRODUCTS, complex_decompositions, follows_batch

_ATEN = torch.ops.aten
_Form = Callable[..., Any]
_BAG_OPTIONS = ("mode", "sparse", "per_sample_weights", "include_last_offset", "padding_idx")
_POOL_OPTIONS = ("ceil_mode", "count_include_pad", "divisor_override")
_ATTENTION = _ATEN.scaled_dot_product_attention.default


@dataclass(frozen=True)
class _Decomposition:
    """How an operator is written by others.

    Attributes:
        form: is called with the operator's arguments. NotImplemented leaves a call as it is.
        applies: whether a call needs it, so that the program is decomposed.
        is_for_all: whether that must hold for all calls, because `form` is for each of them.
    """

    form: _Form
    applies: Callable[[fx.Node], bool] = lambda node: True
    is_for_all: bool = False


def decompositions_for(program: ExportedProgram) -> Mapping[Any, _Form]:
    """Return decompositions of a program's operators; none if all are read right."""
    calls: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        if node.target in _DECOMPOSITIONS:
            calls.setdefault(node.target, []).append(node)
    decompositions: dict[Any, _Form] = {}
    for operator, nodes in calls.items():
        row = _DECOMPOSITIONS[operator]
        needed = [row.applies(node) for node in nodes]
        if all(needed) if row.is_for_all else any(needed):
            decompositions[operator] = row.form
    values = [node.meta.get("val") for node in program.graph.nodes]
    if any(isinstance(value, Tensor) and value.is_complex() for value in values):
        decompositions |= complex_decompositions()
    return decompositions


def _has_other_dimensions(node: fx.Node) -> bool:
    """Return whether an attention has other than four dimensions, which torch.onnx knows."""
    query: Any = node.args[0]
    return bool(query.meta["val"].dim() != 4)


def _reads_no_places(node: fx.Node) -> bool:
    """Return whether the places of the largest values are not read."""
    return not any(user.args[1] == 1 and user.users for user in node.users)


def _largest_of_regions(x: Tensor, sizes: Sequence[int]) -> Any:
    """Take the largest value of each region if regions differ in size."""
    lengths = x.shape[-len(sizes) :]
    if not any(length % count for length, count in zip(lengths, sizes, strict=True)):
        # torch.onnx knows this pooling
        return NotImplemented
    values = _reduced_regions(x, sizes, torch.amax)
    # Nothing reads the places
    return values, values


def _reduced_regions(x: Tensor, sizes: Sequence[int], reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce each region of an adaptive pooling to one value, axis by axis."""
    for axis, count in enumerate(sizes, start=-len(sizes)):
        length = x.shape[axis]
        values: list[Tensor] = []
        for index in range(count):
            start = index * length // count
            # Rounded up: regions may overlap
            stop = -(-(index + 1) * length // count)
            region = x.narrow(axis, start, stop - start)
            value = reduce(region, axis, keepdim=True)
            values.append(value)
        x = torch.cat(values, axis)
    return x


def _nearest(
    x: Tensor, output_size: Sequence[int] | None, scale_factors: Sequence[float] | None
) -> Any:
    """Take the rows and columns that torch takes, if Resize would take others.

    torch multiplies a place by a ratio of sizes. Resize divides it by the inverse, and that
    rounds in another way.
    """
    sizes = x.shape[2:]
    counts = output_size or list(map(int, map(mul, sizes, scale_factors or ())))
    if any(isinstance(size, torch.SymInt) for size in (*sizes, *counts)):
        return NotImplemented
    result = x
    is_other = False
    for index, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        factor = scale_factors[index] if scale_factors else count / size
        ratio = 1 / factor if scale_factors else size / count
        places = np.arange(count, dtype=np.float32)
        taken = np.floor(places * np.float32(ratio))
        is_other |= not np.array_equal(taken, np.floor(places / np.float32(factor)))
        of_torch = (torch.arange(float(count)) * ratio).floor()
        result = result.index_select(index + 2, of_torch.long().clamp(max=size - 1))
    return result if is_other else NotImplemented


def _kth_value(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """Sort the values, and take the one of rank `k` with its place."""
    if not x.dim():
        return NotImplemented
    results: list[Tensor] = []
    for ranked in x.sort(dim):
        result = ranked.narrow(dim, k - 1, 1)
        if not keepdim:
            result = result.squeeze(dim)
        results.append(result)
    return tuple(results)


def _median(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    """Take the lower one of two values in the middle, as torch does."""
    if not x.dim():
        return NotImplemented
    middle = (x.shape[dim] + 1) // 2
    return _kth_value(x, middle, dim, keepdim)


def _search(
    bounds: Tensor,
    x: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Count the bounds below each value, on the right side also those that equal it."""
    if sorter is not None:
        bounds = bounds.gather(-1, sorter)
    if bounds.dim() > 1:
        bounds = bounds.unsqueeze(-2)
    values = x.unsqueeze(-1)
    is_below = bounds < values
    if right or side == "right":
        is_below = bounds <= values
    dtype = torch.int32 if out_int32 else torch.int64
    return is_below.sum(-1, dtype=dtype)


def _distances(x: Tensor, y: Tensor, p: float = 2.0, _mode: int | None = None) -> Tensor:
    """Compute the distance of each pair of vectors."""
    differences = x.unsqueeze(-2) - y.unsqueeze(-3)
    distances: Tensor = torch.linalg.vector_norm(differences, p, -1)
    return distances


def _is_member(
    x: Tensor, members: Tensor, _unique: bool = False, invert: bool = False
) -> Tensor:
    """Compare each value with each member."""
    is_equal = x.unsqueeze(-1) == members.flatten()
    is_member = is_equal.any(-1)
    if invert:
        return ~is_member
    return is_member


def _with_diagonal(x: Tensor, values: Tensor, offset: int = 0, *dims: int) -> Tensor:
    """Take the values of a diagonal where a mask of rows and columns says so."""
    axes = (*dims, *(0, 1)[len(dims) :])
    matrices = x.movedim(axes, (-2, -1))
    rows, columns = map(torch.arange, matrices.shape[-2:])
    is_diagonal = rows.unsqueeze(-1) + offset == columns
    places = (columns - max(offset, 0)).clamp(0, values.shape[-1] - 1)
    by_column = values.index_select(-1, places).unsqueeze(-2)
    replaced = torch.where(is_diagonal, by_column, matrices)
    return replaced.movedim((-2, -1), axes)


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


_DECOMPOSITIONS: dict[Any, _Decomposition] = {
    _ATTENTION: _Decomposition(_attention_of_heads, _has_other_dimensions),
    _ATEN.adaptive_avg_pool3d.default: _Decomposition(
        lambda x, sizes: _reduced_regions(x, sizes, torch.mean)
    ),
    _ATEN.cdist.default: _Decomposition(_distances),
    _ATEN.diagonal_scatter.default: _Decomposition(_with_diagonal),
    _ATEN.embedding_bag.padding_idx: _Decomposition(_even_bags, _has_even_bags, True),
    _ATEN.hypot.default: _Decomposition(lambda x, y: (x * x + y * y).sqrt()),
    _ATEN.instance_norm.default: _Decomposition(
        _norm_of_statistics, lambda node: not node.args[5]
    ),
    _ATEN.isin.Tensor_Tensor: _Decomposition(_is_member),
    _ATEN.kthvalue.default: _Decomposition(_kth_value),
    _ATEN.median.dim: _Decomposition(_median),
    _ATEN.pad.default: _Decomposition(_circular_pad, lambda node: "circular" in node.args),
    _ATEN.searchsorted.Tensor: _Decomposition(_search),
}
for _pool, _average in (
    (_ATEN.avg_pool1d.default, torch.nn.functional.avg_pool1d),
    (_ATEN.avg_pool2d.default, torch.nn.functional.avg_pool2d),
    (_ATEN.avg_pool3d.default, torch.nn.functional.avg_pool3d),
):
    _DECOMPOSITIONS[_pool] = _Decomposition(
        _average_by_divisor(_average),
        lambda node: "divisor_override" in node.kwargs or len(node.args) > 6,
    )
for _pool in (
    _ATEN.adaptive_max_pool1d.default,
    _ATEN.adaptive_max_pool2d.default,
    _ATEN.adaptive_max_pool3d.default,
):
    _DECOMPOSITIONS[_pool] = _Decomposition(_largest_of_regions, _reads_no_places, True)
for _resize in (
    _ATEN.upsample_nearest1d.vec,
    _ATEN.upsample_nearest2d.vec,
    _ATEN.upsample_nearest3d.vec,
):
    _DECOMPOSITIONS[_resize] = _Decomposition(_nearest)
for _convolution, _product in PRODUCTS.items():
    _DECOMPOSITIONS[_convolution] = _Decomposition(_product, follows_batch)
