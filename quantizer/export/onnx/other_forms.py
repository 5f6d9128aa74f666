"""Writes operators that torch.onnx has no form for by others, with the same values if none of
the inputs is NaN.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import mul
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
_Form = Callable[..., Any]


def other_forms(nodes: Iterable[fx.Node]) -> dict[Any, _Form]:
    """Return decompositions of a program's operators, by operator; none if it needs none."""
    forms: dict[Any, _Form] = {}
    have_places: set[Any] = set()
    for node in nodes:
        operator: Any = node.target
        if operator in _FORMS:
            forms[operator] = _FORMS[operator]
        if operator in _LARGEST and _reads_places(node):
            have_places.add(operator)
    # A decomposition is for all nodes of an operator
    for operator in have_places:
        del forms[operator]
    return forms


def _reads_places(node: fx.Node) -> bool:
    """Return whether the places of the largest values are read."""
    for user in node.users:
        is_places = user.args[1] == 1
        if is_places and user.users:
            return True
    return False


# torch calls the functions below with an operator's arguments. NotImplemented leaves the
# operator as it is.


def _average_of_regions(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute the mean of each region of a volume."""
    return _reduced_regions(x, sizes, torch.mean)


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


def _hypotenuse(x: Tensor, y: Tensor) -> Tensor:
    """Compute the root of the sum of two squares."""
    squares = x * x + y * y
    return squares.sqrt()


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


_LARGEST = (
    _ATEN.adaptive_max_pool1d.default,
    _ATEN.adaptive_max_pool2d.default,
    _ATEN.adaptive_max_pool3d.default,
)
_FORMS: Mapping[Any, _Form] = {
    _ATEN.adaptive_avg_pool3d.default: _average_of_regions,
    _ATEN.cdist.default: _distances,
    _ATEN.diagonal_scatter.default: _with_diagonal,
    _ATEN.hypot.default: _hypotenuse,
    _ATEN.isin.Tensor_Tensor: _is_member,
    _ATEN.kthvalue.default: _kth_value,
    _ATEN.median.dim: _median,
    _ATEN.searchsorted.Tensor: _search,
    _ATEN.upsample_nearest1d.vec: _nearest,
    _ATEN.upsample_nearest2d.vec: _nearest,
    _ATEN.upsample_nearest3d.vec: _nearest,
} | dict.fromkeys(_LARGEST, _largest_of_regions)
