"""Scales that are stored in few bits: those of a tensor have a common factor, those of a block
a common exponent.

Finds no ranges. The words are those of `QuantizationSpec.scale_type`.
"""

import torch
from torch import Tensor

from quantizer.numerics.codes import pack_bits, unpack_bits
from quantizer.numerics.formats import FLOAT_FORMATS, cast_round_trip_

E4M3_LARGEST, E4M3_LEAST = FLOAT_FORMATS["fp8_e4m3"].largest, 2.0**-9
"""The ends of the scales before they are divided by the tensor's own; zero is none."""
GLOBAL_BOUNDS = 2.0**-117, 2.0**117
"""Of a tensor's scale, for the scales of its groups to be normal float32."""
PAIRS = 8
"""Pairs of values in a block of 16 that share an exponent."""
_E8M0_BIAS = 127
_TOP_CODES = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0, 240.0)
"""One code with each mantissa, the largest there is."""


def on_global_grid(scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the scales next to `scale`, float32, that are an fp8_e4m3 number above zero,
    divided by `global_scale`.

    Source: NVIDIA's NVFP4, as compressed-tensors computes it.

    >>> on_global_grid(torch.tensor([0.26, 0.0]), torch.tensor(4.0)).tolist()
    [0.25, 0.00048828125]
    """
    codes = cast_round_trip_(scale.double() * global_scale.double(), "fp8_e4m3").clamp_(
        min=E4M3_LEAST
    )
    return codes.float() / global_scale


def global_scale_of(steps: Tensor) -> Tensor:
    """Return 448 / (the largest of `steps`), float32: what makes the largest scale of a tensor
    the largest code.

    It is 1 for a tensor of zeros.

    >>> global_scale_of(torch.tensor([1.0, 7.0])).item()
    64.0
    """
    largest = steps.double().max()
    found = (E4M3_LARGEST / largest).clamp(*GLOBAL_BOUNDS)
    return torch.where(largest > 0, found, 1.0).float()


def split_global(scale: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return fp8_e4m3 codes and the float32 `global_scale` () that they were divided by, for
    scales `on_global_grid`.

    None if there are none that give `scale` back, bit for bit. The factor is not unique; it is
    the largest that does.

    >>> codes, factor = split_global(torch.tensor([0.25, 1.75]))
    >>> codes.float().tolist(), factor.item()
    ([64.0, 448.0], 256.0)
    """
    largest = scale.max()
    for code in _TOP_CODES:
        near = (code / largest.double()).float()
        below, above = near.new_tensor(0.0), near.new_tensor(torch.inf)
        for factor in (near, torch.nextafter(near, below), torch.nextafter(near, above)):
            codes = cast_round_trip_(scale.double() * factor.double(), "fp8_e4m3").float()
            if bool((codes > 0).all()) and torch.equal(codes / factor, scale):
                return codes.to(torch.float8_e4m3fn), factor
    return None


def beside(scale: Tensor, known: Tensor, scale_type: str) -> Tensor:
    """Return the scales next to `scale` that groups of a tensor may have where others have
    those in `known`.

    >>> beside(torch.tensor([0.7]), torch.tensor([1.0, 1.75]), "e4m3").tolist()
    [0.6875]
    """
    found = split_global(known) if scale_type == "e4m3" else None
    return on_global_grid(scale, found[1]) if found else scale


def with_microexponents(steps: Tensor) -> Tensor:
    """Return powers of two, those of the pairs of one block after another, no less than half of
    the largest of a block.

    Source: Rouhani et al., "With Shared Microexponents, A Little Shifting Goes a Long Way"
    (arXiv 2302.08007).

    >>> with_microexponents(torch.tensor([4.0, 2.0, 1.0, 0.5, 0.0, 4.0, 1.0, 1.0])).tolist()
    [4.0, 2.0, 2.0, 2.0, 2.0, 4.0, 2.0, 2.0]
    """
    blocks = steps.reshape(*steps.shape[:-1], -1, PAIRS)
    return torch.maximum(blocks, blocks.amax(-1, keepdim=True) / 2).flatten(-2)


def scale_bytes(scale_type: str, scales: int) -> int:
    """Return the bytes of the scales of one tensor.

    >>> scale_bytes("e4m3", 16), scale_bytes("microexponent", 16), scale_bytes("float", 16)
    (20, 4, 64)
    """
    whole = {"e8m0": scales, "e4m3": scales + 4, "microexponent": 2 * scales // PAIRS}
    return whole.get(scale_type, 4 * scales)


def pack_scales(scale: Tensor, scale_type: str) -> dict[str, Tensor]:
    """Return what files hold of scales, by name: as many bytes as `scale_bytes` says, or
    float32 where they do not fit.

    Exponents have 127 added; after that of a block comes a byte with a bit for each of its
    pairs, the first in the lowest one, that is set where its exponent is one less.
    """
    if scale_type == "e4m3" and (found := split_global(scale)) is not None:
        return {"scale": found[0], "global_scale": found[1]}
    if scale_type == "e8m0":
        return {"scale": _exponents(scale)}
    if scale_type == "microexponent":
        blocks = _exponents(scale).reshape(*scale.shape[:-1], -1, PAIRS)
        largest = blocks.amax(-1, keepdim=True)
        return {"scale": torch.cat([largest, pack_bits(largest - blocks, 1)], -1)}
    return {"scale": scale}


def unpack_scales(
    stored: Tensor, scale_type: str, global_scale: Tensor | None = None
) -> Tensor:
    """Return the scales, float32, that `pack_scales` was given.

    >>> kinds = {
    ...     "e8m0": [0.5, 2.0],
    ...     "e4m3": [0.5, 2.0],
    ...     "microexponent": [2.0] * 7 + [1.0],
    ...     "float": [0.3],
    ... }
    >>> for kind, scales in kinds.items():
    ...     packed = pack_scales(torch.tensor(scales), kind)
    ...     assert torch.equal(
    ...         unpack_scales(packed["scale"], kind, packed.get("global_scale")),
    ...         torch.tensor(scales),
    ...     )
    """
    if global_scale is not None:
        return stored.float() / global_scale
    if stored.dtype != torch.uint8:
        return stored
    if scale_type == "e8m0":
        return _powers(stored)
    return _powers((stored[..., :1] - unpack_bits(stored[..., 1:], 1, PAIRS)).flatten(-2))


def _exponents(scale: Tensor) -> Tensor:
    return (torch.frexp(scale.double()).exponent - 1 + _E8M0_BIAS).to(torch.uint8)


def _powers(exponents: Tensor) -> Tensor:
    return torch.ldexp(
        torch.ones(exponents.shape, dtype=torch.float64), exponents.int() - _E8M0_BIAS
    ).float()
