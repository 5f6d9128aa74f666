"""Formats whose scales have few bits: NVFP4 against compressed-tensors, MX6 and MX9 against the
paper in numpy.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.codes import bits_of, encode, pack
from quantizer.numerics.formats import scale_bytes
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.two_level import (
    pack_scales,
    split_global,
    unpack_scales,
    with_global_scale,
)
from quantizer.plan.size import parameter_bytes

GROUPS = QuantizationSpec(qscheme="per_group", ch_axis=1, group_size=16)
NVFP4 = replace(GROUPS, dtype="fp4", scale_type="e4m3")
MX6, MX9 = (
    replace(GROUPS, dtype=dtype, scale_type="microexponent") for dtype in ("mx6", "mx9")
)
MXFP4 = replace(GROUPS, dtype="fp4", group_size=32, scale_type="e8m0")
INT4 = replace(GROUPS, bit_width=4, scale_type="e4m3", symmetric_scale="half_range")
SPECS = {"nvfp4": NVFP4, "mx6": MX6, "mx9": MX9, "mxfp4": MXFP4, "int4": INT4}
UINT4 = replace(INT4, signed=False, symmetric=False)


def values(*shape: int, seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal values, of magnitudes that differ by rows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.exp(
        spread * torch.randn(shape[0], 1, generator=generator)
    )


def rounded(x: Tensor, spec: QuantizationSpec) -> Tensor:
    return nearest(x, spec, nearest_qparams(spec, x))


def shared_microexponents(x: np.ndarray, bits: int) -> np.ndarray:
    """Rows of 16 in the format of Rouhani et al. 2023, section 3: an exponent for 16 values,
    one bit less for pairs, and signed mantissas of `bits` with one bit before the binary
    point.
    """
    out = np.zeros_like(x)
    for at in np.ndindex(x.shape[0], x.shape[1] // 16):
        block = x[at[0], 16 * at[1] : 16 * at[1] + 16]
        if not block.any():
            continue
        shared = math.floor(math.log2(np.abs(block).max()))
        for pair in range(0, 16, 2):
            two = block[pair : pair + 2]
            exponent = shared - int(np.abs(two).max() < 2.0**shared)
            step = 2.0 ** (exponent - (bits - 2))
            codes = np.clip(np.rint(two / step), -(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)
            out[at[0], 16 * at[1] + pair : 16 * at[1] + pair + 2] = codes * step
    return out


@pytest.mark.parametrize(("spec", "bits"), [(MX6, 5), (MX9, 8)])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_shared_microexponents_are_those_of_the_paper(
    spec: QuantizationSpec, bits: int, spread: float
) -> None:
    x = values(40, 64, spread=spread)
    x[3, 16:32], x[4, 5] = 0, 8.0
    expected = shared_microexponents(x.double().numpy(), bits)
    assert np.array_equal(rounded(x, spec).double().numpy(), expected)
    assert torch.equal(rounded(x.T.contiguous(), replace(spec, ch_axis=0)), rounded(x, spec).T)
    dynamic = TensorQuantizer(replace(spec, is_dynamic=True))
    assert torch.equal(dynamic(x), rounded(x, spec))
    assert torch.equal(
        rounded(x[:, :40], spec),
        rounded(torch.cat([x[:, :40], torch.zeros(40, 8)], 1), spec)[:, :40],
    )


def test_a_block_of_mx6_by_hand() -> None:
    """The largest magnitude is 6, so the exponent is 2 and steps are 4 / 8; pairs below 4 have
    steps of 2 / 8.
    """
    x = torch.tensor([[6.0, 0.3, 3.0, 0.3, 3.99, 0.0, *[0.0] * 10]])
    assert rounded(x, MX6).tolist() == [[6.0, 0.5, 3.0, 0.25, 3.75, 0.0, *[0.0] * 10]]
    assert nearest_qparams(MX6, x).scale.tolist() == [[4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]]
    assert pack_scales(nearest_qparams(MX6, x).scale, "microexponent")["scale"].tolist() == [
        [[129, 0b11111110]]
    ]


def test_a_block_of_nvfp4_by_hand() -> None:
    """The tensor's factor is 448 * 6 / 12 = 224, so the scales are 2 = 448 / 224 and 0.5 = 112
    / 224; the third, 0.55 = 123.2 / 224, becomes 120 / 224.
    """
    x = torch.zeros(3, 16)
    x[0, :3], x[1, :3], x[2, :2] = (
        torch.tensor([12.0, 5.0, -1.0]),
        torch.tensor([3.0, 0.7, 0.3]),
        3.3,
    )
    found = nearest_qparams(NVFP4, x).scale
    assert found.flatten().tolist() == [2.0, 0.5, torch.tensor(120 / 224).item()]
    assert rounded(x, NVFP4)[:2, :3].tolist() == [[12.0, 4.0, -1.0], [3.0, 0.75, 0.25]]
    stored = pack_scales(found, "e4m3")
    assert (stored["scale"].float().flatten().tolist(), stored["global_scale"].item()) == (
        [448.0, 112.0, 120.0],
        224.0,
    )


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_nvfp4_is_that_of_compressed_tensors(spread: float) -> None:
    """Its own scales and rounding, of the version installed; its factor, a product with a
    reciprocal, is an ulp off.
    """
    pytest.importorskip("compressed_tensors", reason="needs quantizer-torch[llm]")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    kinds = dict.fromkeys(("scale_dtype", "zp_dtype"), torch.float8_e4m3fn)
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        symmetric=True,
        **kinds,
    )
    x = values(32, 64, seed=3, spread=spread)
    blocks = x.view(32, 4, 16)
    factor = torch.tensor(448 * 6.0) / x.abs().max()
    assert generate_gparam(x.min(), x.max()).item() == pytest.approx(
        factor.item(), rel=2.0**-23
    )
    scale, zero_point = calculate_qparams(blocks.amin(2), blocks.amax(2), args, factor)
    found = nearest_qparams(NVFP4, x).scale
    assert torch.equal(found, scale.float() / factor)
    theirs = fake_quantize(x, scale, zero_point, args, global_scale=factor.reshape(1))
    assert torch.equal(rounded(x, NVFP4), theirs)
    codes, ours = split_global(found) or (None, None)
    assert codes is not None and torch.equal(codes.float(), scale.float())
    assert ours is not None and torch.equal(codes.float() / ours, scale.float() / factor)


@pytest.mark.parametrize("name", [*SPECS, "uint4"])
def test_files_take_the_bits_that_the_plan_says_and_give_everything_back(name: str) -> None:
    spec = {**SPECS, "uint4": UINT4}[name]
    x = values(48, 96, seed=5, spread=2.0)
    found = nearest_qparams(spec, x)
    y = rounded(x, spec)
    codes = encode(y, spec, found.scale, found.zero_point)
    assert codes is not None
    assert found.scale.shape == scale_shape((48, 96), spec.cut)
    parts = pack_scales(found.scale, spec.scale_type)
    assert torch.equal(
        unpack_scales(parts["scale"], spec.scale_type, parts.get("global_scale")), found.scale
    )
    sizes = [tensor.nbytes for tensor in (pack(codes, spec), *parts.values())]
    zero_points = found.scale.numel() if spec.dtype == "int" else 0
    assert sum(sizes) + zero_points == parameter_bytes(x.numel(), spec, found.scale.numel())


@pytest.mark.parametrize(
    ("spec", "bits"),
    [(MX6, 6.0), (MX9, 9.0), (MXFP4, 4.25), (NVFP4, 4.5)],
    ids=["mx6", "mx9", "mxfp4", "nvfp4"],
)
def test_bits_of_a_value_are_those_of_the_definitions(
    spec: QuantizationSpec, bits: float
) -> None:
    shape = (64, 128)
    scales = math.prod(scale_shape(shape, spec.cut))
    of_tensor = 4 if spec.scale_type == "e4m3" else 0
    assert (
        8 * (parameter_bytes(math.prod(shape), spec, scales) - of_tensor) / math.prod(shape)
        == bits
    )
    assert bits_of(spec) < bits


@pytest.mark.parametrize("name", SPECS)
def test_quantizing_again_changes_nothing(name: str) -> None:
    x = values(16, 64, seed=7, spread=1.0)
    found = nearest_qparams(SPECS[name], x)
    once = nearest(x, SPECS[name], found)
    assert torch.equal(nearest(once, SPECS[name], found), once)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_all_magnitudes_are_quantized(name: str, size: float) -> None:
    x = values(4, 32).clamp(-1, 1) * size
    found = nearest_qparams(SPECS[name], x)
    y = nearest(x, SPECS[name], found)
    assert y.isfinite().all() and bool((found.scale > 0).all())
    if 1e-30 <= size <= 1e30:
        assert float((x - y).double().norm()) < 0.2 * float(x.double().norm())


def test_small_groups_beside_large_ones_keep_a_scale() -> None:
    x = torch.ones(2, 16) * torch.tensor([[1.0], [1e-9]])
    assert rounded(x, NVFP4)[1].abs().max() < 1e-6
    assert nearest_qparams(NVFP4, x).scale[1].item() == pytest.approx(2.0**-9 / (448 * 6))


@pytest.mark.parametrize("seed", range(5))
def test_the_factor_of_a_tensor_is_found_again(seed: int) -> None:
    """Also where no scale is the largest code, as after a search."""
    generator = torch.Generator().manual_seed(seed)
    codes = (0.02 + 400 * torch.rand(200, generator=generator)).to(torch.float8_e4m3fn).float()
    scale = codes / torch.rand((), generator=generator)
    found = split_global(scale)
    assert found is not None and torch.equal(found[0].float() / found[1], scale)
    assert split_global(torch.tensor([1.0, 1.03])) is None
    assert pack_scales(torch.tensor([1.0, 1.03]), "e4m3")["scale"].dtype == torch.float32
    assert torch.equal(with_global_scale(scale, found[1]), scale)


def test_sizes_in_bytes() -> None:
    assert [
        scale_bytes(kind, 32)
        for kind in ("float", "poweroftwo", "e8m0", "e4m3", "microexponent")
    ] == [*(128, 128, 32, 36, 8)]


@pytest.mark.parametrize(
    "cut", [("per_tensor", None, None), ("per_channel", 0, None), ("per_group", 1, 8)]
)
def test_microexponents_are_of_blocks_of_16(cut: tuple[str, int | None, int | None]) -> None:
    qscheme, axis, group = cut
    spec = replace(MX9, qscheme=qscheme, ch_axis=axis, group_size=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups of 16"):
        nearest_qparams(spec, values(4, 32))
