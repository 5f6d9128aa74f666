"""Scales that are stored in few bits: scales of a tensor with a common factor, scales of a
block with a common exponent.

The words are those of `QuantizationSpec.scale_type`.
"""

import torch
from torch import Tensor

from quantizer.numerics.codes import pack_bits, unpack_bits
from quantizer.numerics.formats import PAIRS, cast_round_trip_, format_named

_LARGEST_E4M3 = format_named("fp8_e4m3").largest
_LEAST_E4M3 = 2.0**-9
# With a factor between these, no scale of a group is subnormal in float32
_LEAST_GLOBAL = 2.0**-117
_LARGEST_GLOBAL = 2.0**117
_E8M0_BIAS = 127
# The largest fp8_e4m3 number with each mantissa
_TOP_CODES = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)


def with_global_scale(scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the scales nearest to `scale`, float32, that are an fp8_e4m3 number above zero
    divided by `global_scale`.

    Source: NVIDIA's NVFP4, as compressed-tensors computes it.

    >>> with_global_scale(torch.tensor([0.26, 0.0]), torch.tensor(4.0)).tolist()
    [0.25, 0.00048828125]
    """
    codes = cast_round_trip_(scale.double() * global_scale.double(), "fp8_e4m3")
    return codes.clamp_(min=_LEAST_E4M3).float() / global_scale


def global_scale_of(steps: Tensor) -> Tensor:
    """Return 448 / (the largest of `steps`), float32, which makes the largest scale of a tensor
    the largest code. It is 1 for a tensor of zeros.

    >>> global_scale_of(torch.tensor([1.0, 7.0])).item()
    64.0
    """
    largest = steps.double().max()
    factor = (_LARGEST_E4M3 / largest).clamp(_LEAST_GLOBAL, _LARGEST_GLOBAL)
    return torch.where(largest > 0, factor, 1.0).float()


def split_global(scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the fp8_e4m3 codes and the float32 `global_scale` () from which
    `with_global_scale` made `scale`.

    Return None if no codes and factor give `scale` back, bit for bit. Of several factors that
    do, the largest is returned.

    >>> codes, factor = split_global(torch.tensor([0.25, 1.75]))
    >>> codes.float().tolist(), factor.item()
    ([64.0, 448.0], 256.0)
    """
    largest = scale.max().double()
    # A factor may be multiplied by a power of two, which changes the codes' exponents alone. So
    # the largest scale can have one of these codes
    for code in _TOP_CODES:
        near = (code / largest).float()
        below = torch.nextafter(near, near.new_tensor(0.0))
        above = torch.nextafter(near, near.new_tensor(torch.inf))
        for factor in (near, below, above):
            codes = cast_round_trip_(scale.double() * factor.double(), "fp8_e4m3").float()
            if bool((codes > 0).all()) and torch.equal(codes / factor, scale):
                return codes.to(torch.float8_e4m3fn), factor
    return None


def nearest_group_scale(
    scale: Tensor, known: Tensor, scale_type: str, shared_step: float | None = None
) -> Tensor:
    """Return the scales nearest to `scale` that can be stored with those of other groups of the
    tensor.

    Args:
        scale: of some groups.
        known: of other groups, which stay.
        scale_type: as in `QuantizationSpec`.
        shared_step: the largest step of all tensors with one `global_scale`, if there are more.

    >>> nearest_group_scale(torch.tensor([0.7]), torch.tensor([1.0, 1.75]), "e4m3").tolist()
    [0.6875]
    """
    if scale_type == "e4m3" and shared_step is not None:
        return with_global_scale(scale, global_scale_of(scale.new_tensor([shared_step])))
    if scale_type == "e4m3":
        codes_and_global = split_global(known)
        if codes_and_global is not None:
            return with_global_scale(scale, codes_and_global[1])
    return scale


def with_microexponents(steps: Tensor) -> Tensor:
    """Return steps of pairs, each no less than half of the largest step of its block.

    All are powers of two. The pairs of a block, `PAIRS`, follow each other.

    Source: Rouhani et al., "With Shared Microexponents, A Little Shifting Goes a Long Way"
    (arXiv 2302.08007).

    >>> with_microexponents(torch.tensor([4.0, 2.0, 1.0, 0.5, 0.0, 4.0, 1.0, 1.0])).tolist()
    [4.0, 2.0, 2.0, 2.0, 2.0, 4.0, 2.0, 2.0]
    """
    blocks = _blocks_of_pairs(steps)
    return torch.maximum(blocks, blocks.amax(-1, keepdim=True) / 2).flatten(-2)


def pack_scales(
    scale: Tensor, scale_type: str, global_scale: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the tensors that files store for scales, by name: as many bytes as `scale_bytes`
    says, or float32 if the scales do not fit.

    Args:
        scale: of the groups of a tensor.
        scale_type: as in `QuantizationSpec`.
        global_scale: that of several tensors, from `split_global` of all their scales; None if
            the tensor has its own.

    Exponents have 127 added. After the exponent of a block comes a byte with a bit for each of
    its pairs, the first in the lowest bit. It is set if the pair's exponent is one less.
    """
    if scale_type == "e8m0":
        return {"scale": _exponents(scale)}
    if scale_type == "microexponent":
        blocks = _blocks_of_pairs(_exponents(scale))
        largest = blocks.amax(-1, keepdim=True)
        return {"scale": torch.cat([largest, pack_bits(largest - blocks, 1)], -1)}
    if scale_type == "e4m3" and global_scale is not None:
        codes = cast_round_trip_(scale.double() * global_scale.double(), "fp8_e4m3")
        return {"scale": codes.to(torch.float8_e4m3fn), "global_scale": global_scale}
    codes_and_global = split_global(scale) if scale_type == "e4m3" else None
    if codes_and_global is None:
        return {"scale": scale}
    codes, global_scale = codes_and_global
    return {"scale": codes, "global_scale": global_scale}


def unpack_scales(
    stored: Tensor, scale_type: str, global_scale: Tensor | None = None
) -> Tensor:
    """Return the scales, float32, that `pack_scales` stored.

    >>> scale = torch.tensor([2.0] * 7 + [1.0])
    >>> for scale_type in ("e8m0", "e4m3", "microexponent", "float"):
    ...     packed = pack_scales(scale, scale_type)
    ...     restored = unpack_scales(packed["scale"], scale_type, packed.get("global_scale"))
    ...     assert torch.equal(restored, scale)
    """
    if global_scale is not None:
        return stored.float() / global_scale
    if stored.dtype != torch.uint8:
        return stored
    if scale_type == "e8m0":
        return _powers(stored)
    is_halved = unpack_bits(stored[..., 1:], 1, PAIRS)
    return _powers((stored[..., :1] - is_halved).flatten(-2))


def _blocks_of_pairs(scale: Tensor) -> Tensor:
    return scale.reshape(*scale.shape[:-1], -1, PAIRS)


def _exponents(scale: Tensor) -> Tensor:
    """Return the biased exponents of powers of two, uint8."""
    return (torch.frexp(scale.double()).exponent - 1 + _E8M0_BIAS).to(torch.uint8)


def _powers(exponents: Tensor) -> Tensor:
    ones = torch.ones(exponents.shape, dtype=torch.float64)
    return torch.ldexp(ones, exponents.int() - _E8M0_BIAS).float()
