"""Blocks byte by byte, as the package gguf reads them, and as they are written by hand."""

from __future__ import annotations

import struct

import pytest
import torch

from quantizer.config.model import QuantizationSpec
from quantizer.export.gguf.blocks import (
    BLOCK_TYPES,
    GGUF_BLOCK,
    packed_blocks,
    short_scale,
    with_float16_scale,
)
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.codes import code_dtype

ROWS, COLUMNS = 3, 128


def quantized(spec: QuantizationSpec, seed: int = 0) -> QuantizedTensor:
    """Every code, also the ends of the range, with scales and zero points of a matrix of the
    spec's groups.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(
        spec.quant_min, spec.quant_max + 1, (ROWS, COLUMNS), generator=generator
    )
    codes[:, 0], codes[:, -1] = spec.quant_min, spec.quant_max
    shape = {"per_tensor": (), "per_channel": (ROWS,)}.get(
        spec.qscheme, (ROWS, COLUMNS // (spec.group_size or 1))
    )
    zero_point = (
        torch.zeros(shape) if spec.symmetric else torch.randint(0, spec.quant_max + 1, shape)
    )
    scale = torch.rand(shape, generator=generator) + 0.01
    return QuantizedTensor(
        spec, scale, zero_point.int(), codes.to(code_dtype(spec.quant_min, spec.quant_max))
    )


CUTS = {
    "groups of 32": {"qscheme": "per_group", "ch_axis": 1, "group_size": 32},
    "groups of 64": {"qscheme": "per_group", "ch_axis": 1, "group_size": 64},
    "rows": {"qscheme": "per_channel", "ch_axis": 0},
    "one scale": {},
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda kind: kind.name)
def test_the_package_gguf_reads_what_the_codes_stand_for(kind: object, cut: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs quantizer-torch[llm]")
    row = next(each for each in BLOCK_TYPES if each is kind)
    for bits in {row.bits, 3 if row.bits == 4 else row.bits}:
        spec = QuantizationSpec(bit_width=bits, symmetric=not row.has_minimum, **CUTS[cut])  # type: ignore[arg-type]
        tensor = with_float16_scale(quantized(spec))
        found = gguf.dequantize(
            packed_blocks(tensor).numpy(), gguf.GGMLQuantizationType[row.name]
        )
        assert torch.equal(torch.from_numpy(found), tensor.decoded())


def test_a_block_is_scale_minimum_fifth_bits_and_nibbles() -> None:
    spec = QuantizationSpec(
        bit_width=5, symmetric=False, qscheme="per_group", ch_axis=1, group_size=GGUF_BLOCK
    )
    codes = torch.arange(GGUF_BLOCK, dtype=torch.uint8)[None]
    tensor = QuantizedTensor(
        spec, torch.tensor([[0.5]]), torch.tensor([[3]], dtype=torch.int32), codes
    )
    # Codes j and j + 16 have the same low bits
    nibbles = bytes(low | low << 4 for low in range(16))
    assert (
        bytes(packed_blocks(tensor)[0].tolist())
        == struct.pack("<eeI", 0.5, -1.5, 0xFFFF0000) + nibbles
    )
    symmetric = QuantizationSpec(
        bit_width=4, qscheme="per_group", ch_axis=1, group_size=GGUF_BLOCK
    )
    codes = torch.tensor([[-8] * 16 + [7] * 16], dtype=torch.int8)
    tensor = QuantizedTensor(
        symmetric, torch.tensor([[2.0]]), torch.zeros((1, 1), dtype=torch.int32), codes
    )
    assert bytes(packed_blocks(tensor)[0].tolist()) == struct.pack("<e", 2.0) + b"\xf0" * 16


def test_scales_are_halfs_and_so_are_minimums() -> None:
    """For every zero point of 4 and 5 bits; the nearest of them, within half of the last bit
    that is left.
    """
    zero_point = torch.arange(32)[:, None]
    scale = torch.logspace(-4, 1, 1001)[None].expand(32, -1)
    found = short_scale(scale, zero_point)
    for value in (found, found * zero_point):
        assert torch.equal(value, value.half().float())
    assert float(((found - scale) / scale).abs().max()) <= 2.0**-6  # of 6 significant bits
    assert torch.equal(found[0], scale[0].half().float())
