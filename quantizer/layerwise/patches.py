"""View a convolution or linear layer as one matrix product per group: its weight as rows, and
the inputs that it sees as patches. Gathers and reshapes; solves nothing.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.nn import ExpertLinear


def weight_matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the layer's weight as [groups, outputs of a group, inputs of a group times kernel
    positions].

    >>> layer = nn.ConvTranspose2d(4, 6, 3, groups=2)
    >>> weight_matrix(layer, layer.weight).shape
    torch.Size([2, 3, 18])
    """
    groups = _groups(layer)
    if not getattr(layer, "transposed", False):
        return weight.reshape(groups, len(weight) // groups, -1)
    kernel_dims = list(range(3, weight.dim() + 1))
    by_group = weight.reshape(groups, -1, *weight.shape[1:])
    return by_group.transpose(1, 2).flip(kernel_dims).flatten(2)


def matrix_shape(layer: nn.Module) -> torch.Size:
    """Return the shape of the layer's weight matrix, without reading the weight."""
    return weight_matrix(layer, layer.get_parameter("weight").to("meta")).shape


def matrix_weight(layer: nn.Module, matrix: Tensor) -> Tensor:
    """Return the weight that the layer stores for a matrix of `weight_matrix`, as a copy."""
    shape = layer.get_parameter("weight").shape
    if not getattr(layer, "transposed", False):
        return matrix.reshape(shape).clone()
    groups = _groups(layer)
    kernel_dims = list(range(3, len(shape) + 1))
    by_group = matrix.reshape(*matrix.shape[:2], shape[0] // groups, *shape[2:])
    return by_group.flip(kernel_dims).transpose(1, 2).reshape(shape).clone()


def is_linear(layer: nn.Module) -> bool:
    """Check whether a layer multiplies rows of the last axis of its input."""
    return isinstance(layer, (nn.Linear, ExpertLinear))


def by_input(values: Tensor, groups: int, depth: int) -> Tensor:
    """Spread a value for each channel of a layer's input over the columns of its weight matrix:
    [groups, depth].

    >>> by_input(torch.tensor([1.0, 2.0]), 1, 4).tolist()
    [[1.0, 1.0, 2.0, 2.0]]
    """
    columns_per_channel = depth * groups // len(values)
    return values.view(groups, -1).repeat_interleave(columns_per_channel, 1)


def channel_rows(layer: nn.Module, output: Tensor) -> Tensor:
    """Return an output of the layer as [positions, channels]. A position is one place of one
    sample.

    >>> channel_rows(nn.Conv2d(3, 8, 1), torch.zeros(2, 8, 5, 5)).shape
    torch.Size([50, 8])
    """
    if is_linear(layer):
        return _rows(output)
    channels_axis = -_kernel_dims(layer) - 1
    return output.movedim(channels_axis, -1).flatten(0, -2)


def patches(layer: nn.Module, x: Tensor, positions: Tensor) -> Tensor:
    """Return what the layer multiplies its weight with at some positions of its output, as
    [groups, positions, depth]; for experts [1, positions, depth].

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
        return _rows(x)[positions][None]
    view = _windows(layer, x)
    places_shape = view.shape[: _kernel_dims(layer) + 1]
    places = torch.unravel_index(positions, places_shape)
    by_position = view[places].reshape(len(positions), _groups(layer), -1)
    return by_position.transpose(0, 1).contiguous()


def position_count(layer: nn.Module, x: Tensor) -> int:
    """Return how many positions the layer's output for an input has.

    >>> position_count(nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 5, 5))
    18
    """
    if is_linear(layer):
        return x.numel() // x.shape[-1]
    return math.prod(_windows(layer, x).shape[: _kernel_dims(layer) + 1])


def windows(layer: nn.Module, x: Tensor, values: int) -> Iterator[Tensor]:
    """Yield all patches of a convolution in parts [groups, positions, depth] of about so many
    values, sample by sample.

    >>> layer, x = nn.Conv1d(2, 4, 3), torch.randn(3, 2, 10)
    >>> [part.shape for part in windows(layer, x, 100)]
    [torch.Size([1, 16, 6]), torch.Size([1, 8, 6])]
    """
    view = _windows(layer, x)
    samples = max(1, values // max(1, view[0].numel()))
    for part in torch.split(view, samples):
        positions = math.prod(part.shape[: _kernel_dims(layer) + 1])
        yield part.reshape(positions, _groups(layer), -1).transpose(0, 1)


def _rows(x: Tensor) -> Tensor:
    """Return a linear layer's input or output as [positions, channels]."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _groups(layer: nn.Module) -> int:
    groups: int = getattr(layer, "groups", 1)
    return groups


def _windows(layer: nn.Module, x: Tensor) -> Tensor:
    """Return what a convolution sees at each place of its output, as a view [samples, *places,
    channels, *kernel].
    """
    dims = _kernel_dims(layer)
    if x.dim() == dims + 1:
        x = x[None]
    conv: Any = layer
    if conv.transposed:
        x = _spread_out(conv, x)
        strides = [1] * dims
    else:
        # Torch's layers have their zeros for `F.pad`, also those of "same" and "valid"
        x = F.pad(x, conv._reversed_padding_repeated_twice)
        strides = conv.stride
    for dim in range(dims):
        dilation = conv.dilation[dim]
        length = dilation * (conv.kernel_size[dim] - 1) + 1
        x = x.unfold(2 + dim, length, strides[dim])[..., ::dilation]
    return x.movedim(1, dims + 1)


def _kernel_dims(layer: nn.Module) -> int:
    return layer.get_parameter("weight").dim() - 2


def _spread_out(conv: Any, x: Tensor) -> Tensor:
    """Return the input over which a transposed convolution is a plain one of stride 1 with the
    kernel flipped: zeros between its values and around them.
    """
    dims = len(conv.kernel_size)
    sizes = []
    steps = []
    sides: list[int] = []
    for dim in range(dims):
        stride = conv.stride[dim]
        sizes.append((x.shape[2 + dim] - 1) * stride + 1)
        steps.append(slice(None, None, stride))
        length = conv.dilation[dim] * (conv.kernel_size[dim] - 1)
        zeros = length - conv.padding[dim]
        # `F.pad` takes the last dimension first
        sides = [zeros, zeros + conv.output_padding[dim], *sides]
    spread = x.new_zeros(*x.shape[:2], *sizes)
    strided: tuple[Any, ...] = (..., *steps)
    spread[strided] = x
    return F.pad(spread, sides)
