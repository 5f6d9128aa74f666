"""A convolution or linear layer as one matrix product per group: its weight as rows, the inputs
it sees as patches.

Gathers and reshapes; solves nothing.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.nn import ExpertLinear


def weight_matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """The layer's weight as [groups, outputs of a group, inputs of a group times kernel
    positions].

    >>> layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
    >>> weight_matrix(layer, layer.weight).shape
    torch.Size([2, 3, 18])
    """
    groups: int = getattr(layer, "groups", 1)
    if getattr(layer, "transposed", False):
        kernel = list(range(3, weight.dim() + 1))
        return (
            weight.reshape(groups, -1, *weight.shape[1:])
            .transpose(1, 2)
            .flip(kernel)
            .flatten(2)
        )
    return weight.reshape(groups, len(weight) // groups, -1)


def matrix_weight(layer: nn.Module, matrix: Tensor) -> Tensor:
    """The inverse of `weight_matrix`: the tensor that the layer stores, in memory of its
    own.
    """
    shape = layer.get_parameter("weight").shape
    groups: int = getattr(layer, "groups", 1)
    if getattr(layer, "transposed", False):
        kernel = list(range(3, len(shape) + 1))
        rows = (
            matrix.reshape(*matrix.shape[:2], shape[0] // groups, *shape[2:])
            .flip(kernel)
            .transpose(1, 2)
        )
        return rows.reshape(shape).clone()
    return matrix.reshape(shape).clone()


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer multiplies rows of the last axis of its input."""
    return isinstance(layer, (nn.Linear, ExpertLinear))


def by_input(values: Tensor, groups: int, depth: int) -> Tensor:
    """A value for each channel of a layer's input, for the columns of its weight matrix:
    [groups, depth].

    >>> by_input(torch.tensor([1.0, 2.0]), 1, 4).tolist()
    [[1.0, 1.0, 2.0, 2.0]]
    """
    return values.view(groups, -1).repeat_interleave(depth * groups // len(values), 1)


def channel_rows(layer: nn.Module, output: Tensor) -> Tensor:
    """An output of the layer as [positions, channels]; a position is one place of one sample.

    >>> channel_rows(nn.Conv2d(3, 8, 1), torch.zeros(2, 8, 5, 5)).shape
    torch.Size([50, 8])
    """
    if is_linear(layer):
        return output.flatten(0, -2) if output.dim() > 1 else output[None]
    dims = _kernel_dims(layer)
    return output.movedim(-dims - 1, -1).flatten(0, -2)


def patches(layer: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    """What the layer multiplies its weight with at some positions of its output, as [groups,
    positions, depth]; of experts [1, positions, depth].

    Args:
        layer: linear or convolution, with zero padding.
        x: its input.
        positions: int64, rows of `channel_rows(layer, layer(x))`.

    >>> layer, x = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), torch.randn(2, 4, 9, 9)
    >>> expected = channel_rows(layer, layer(x))[[0, 7]] - layer.bias
    >>> found = patches(layer, x, torch.tensor([0, 7])) @ weight_matrix(layer, layer.weight).mT
    >>> torch.allclose(found.transpose(0, 1).flatten(1), expected, atol=1e-6)
    True
    """
    if is_linear(layer):
        return (x.flatten(0, -2) if x.dim() > 1 else x[None])[positions][None]
    view, dims = _windows(layer, x), _kernel_dims(layer)
    places = torch.unravel_index(positions, view.shape[: dims + 1])
    groups: int = getattr(layer, "groups", 1)
    return view[places].reshape(len(positions), groups, -1).transpose(0, 1).contiguous()


def windows(layer: nn.Module, x: Tensor, values: int) -> Iterator[Tensor]:
    """All patches of a convolution in parts [groups, positions, depth] of about so many values,
    sample by sample.

    >>> layer, x = nn.Conv1d(2, 4, 3), torch.randn(3, 2, 10)
    >>> [part.shape for part in windows(layer, x, 100)]
    [torch.Size([1, 16, 6]), torch.Size([1, 8, 6])]
    """
    view, dims = _windows(layer, x), _kernel_dims(layer)
    groups: int = getattr(layer, "groups", 1)
    for part in torch.split(view, max(1, values // max(1, view[0].numel()))):
        yield part.reshape(math.prod(part.shape[: dims + 1]), groups, -1).transpose(0, 1)


def _windows(layer: nn.Module, x: Tensor) -> Tensor:
    """What a convolution sees at each place of its output, as a view [samples, *places,
    channels, *kernel].
    """
    dims = _kernel_dims(layer)
    if x.dim() == dims + 1:
        x = x[None]
    conv: Any = layer
    x, strides = (
        _spread_out(conv, x) if conv.transposed else (F.pad(x, _padding(conv)), conv.stride)
    )
    for dim, (size, dilation, stride) in enumerate(
        zip(conv.kernel_size, conv.dilation, strides, strict=True)
    ):
        x = x.unfold(2 + dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x.movedim(1, dims + 1)


def _kernel_dims(layer: nn.Module) -> int:
    return layer.get_parameter("weight").dim() - 2


def _padding(conv: Any) -> list[int]:
    """Zeros on both sides of each dimension, last dimension first, as `F.pad` takes them."""
    if conv.padding == "valid":
        return [0, 0] * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return [side for size in reversed(conv.padding) for side in (size, size)]


def _spread_out(conv: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input over which a transposed convolution is a plain one of stride 1 with the kernel
    flipped.
    """
    sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], conv.stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    strided: tuple[Any, ...] = (..., *(slice(None, None, step) for step in conv.stride))
    spread[strided] = x
    sides = []
    for k, d, p, extra in zip(
        conv.kernel_size, conv.dilation, conv.padding, conv.output_padding, strict=True
    ):
        sides.append((d * (k - 1) - p, d * (k - 1) - p + extra))
    return F.pad(spread, [side for pair in reversed(sides) for side in pair]), (1,) * len(sizes)
