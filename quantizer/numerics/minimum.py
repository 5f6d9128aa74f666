"""Rounds groups that have a minimum: a value is scale * code - minimum, in float32.

Integers with a zero point have scale * (code - zero_point) instead, where the minimum is a
whole number of steps.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantizer.numerics.blocks import BLOCK_SIZE, GPU_BLOCK_SIZE
from quantizer.numerics.formats import cast_round_trip_

_Part = tuple[Tensor, Tensor, Tensor, Tensor]
"""Some rows of two matrices, with their scales and their minima as columns."""


def fake_cast_with_minimum(rows: Tensor, scale: Tensor, minimum: Tensor, name: str) -> Tensor:
    """Return for each value of `rows` the nearest one that a code of the format `name` has.

    Args:
        rows: floating point [rows, values].
        scale, minimum: of each row, float32 [rows].
        name: of a format that `has_minimum`.

    >>> x = torch.tensor([[-0.6, 0.1, 1.1]])
    >>> fake_cast_with_minimum(x, torch.tensor([0.5]), torch.tensor([0.75]), "q4_k").tolist()
    [[-0.75, 0.25, 1.25]]
    """
    values = torch.empty_like(rows)
    for part, target, step, offset in _parts(rows, values, scale, minimum):
        target.copy_(_restored(_rounded(part, step, offset, name), step, offset))
    return values


def encode_with_minimum(
    rows: Tensor, scale: Tensor, minimum: Tensor, name: str
) -> Tensor | None:
    """Return the codes of values that `fake_cast_with_minimum` has returned, int8, or None if
    no codes give them back exactly.
    """
    codes = torch.empty_like(rows, dtype=torch.int8)
    for part, target, step, offset in _parts(rows, codes, scale, minimum):
        rounded = _rounded(part, step, offset, name)
        target.copy_(rounded)
        if not torch.equal(_restored(rounded, step, offset).to(part.dtype), part):
            return None
    return codes


def decode_with_minimum(codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return the values of codes [rows, values], float32."""
    return _restored(codes.float(), scale.reshape(-1, 1), minimum.reshape(-1, 1))


def _parts(rows: Tensor, twin: Tensor, scale: Tensor, minimum: Tensor) -> Iterator[_Part]:
    """Yield some rows of both matrices at a time."""
    size = BLOCK_SIZE if rows.is_cpu else GPU_BLOCK_SIZE
    height = max(1, size // rows.shape[1])
    yield from zip(
        torch.split(rows, height),
        torch.split(twin, height),
        torch.split(scale.reshape(-1, 1), height),
        torch.split(minimum.reshape(-1, 1), height),
        strict=True,
    )


def _rounded(part: Tensor, step: Tensor, offset: Tensor, name: str) -> Tensor:
    """Return codes as floating point, float32 at least."""
    return cast_round_trip_((part.float() + offset).div_(step), name)


def _restored(codes: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    """Replace codes by their values. The product is exact, and the difference is rounded."""
    return codes.mul_(step).sub_(offset)
