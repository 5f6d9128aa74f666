"""Compute how far the outputs of layers with other weights are off, from the Gram matrices of
their inputs. Rounds nothing.
"""

import torch
from torch import Tensor

_POWER_STEPS = 2
"""Steps of the power method towards a direction that need not be the leading one."""
_TILE_COLUMNS = 256
"""Columns of a symmetric matrix that are multiplied at once. What is above its diagonal tiles
is not read.
"""


def output_error(gram: Tensor, difference: Tensor) -> float:
    """Return tr(d H d^T), the squared error of a layer's outputs summed over the inputs.

    Args:
        gram: H of these inputs, [groups, depth, depth].
        difference: d of two weights, [groups, rows, depth].

    >>> import torch
    >>> output_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [0.0, 3.0]]]))
    14.0
    """
    dtype = torch.promote_types(difference.dtype, torch.float64)
    total = 0.0
    for start in range(0, difference.shape[2], _TILE_COLUMNS):
        stop = start + _TILE_COLUMNS
        tile = difference[..., start:stop]
        columns = gram[..., start:stop]
        products = tile @ columns[:, start:stop]
        # Twice what is below the diagonal tile, as H is symmetric
        products.baddbmm_(difference[..., stop:], columns[:, stop:], alpha=2)
        errors = products.mul_(tile).sum(-1)
        total += float(errors.sum(dtype=dtype))
    return total


def estimated_error(gram: Tensor, difference: Tensor, stride: int) -> float:
    """Estimate `output_error` from every `stride`-th row, and from what all rows do to the
    inputs' largest direction.

    With h = H u for any u, tr(d H d^T) is |d h|^2 / u h plus a remainder. The first part costs
    little. Rows differ less in the remainder, as one direction often has most of the energy.

    Args:
        gram: H, positive semidefinite, [groups, depth, depth].
        difference: d of two weights, [groups, rows, depth].
        stride: with 1 nothing is estimated.

    Source: Sun et al. 2024, "Massive Activations in Large Language Models", for that direction.

    >>> import torch
    >>> estimated_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), 2)
    10.0
    """
    u = leading(gram, _POWER_STEPS)
    h = gram @ u
    u_h = (u.double() * h.double()).sum(1, keepdim=True)
    along_u = (difference @ h).double().square() / u_h.clamp(min=1e-300)
    sample = difference[:, ::stride]
    sampled_along_u = float(along_u[:, ::stride].sum())
    remainder = max(output_error(gram, sample) - sampled_along_u, 0.0)
    return float(along_u.sum()) + remainder * difference.shape[1] / sample.shape[1]


def leading(gram: Tensor, steps: int) -> Tensor:
    """Estimate the leading eigenvector of each symmetric matrix [..., depth, depth] by the
    power method, as a column times its eigenvalue.

    >>> import torch
    >>> leading(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), 30).round().tolist()
    [[2.0], [0.0]]
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    vector = (diagonal + diagonal.mean(-1, keepdim=True))[..., None]
    for _ in range(steps):
        norm = vector.norm(dim=-2, keepdim=True).clamp(min=1e-30)
        vector = gram @ (vector / norm)
    return vector
