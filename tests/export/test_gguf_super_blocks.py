"""Blocks of Q4_K, Q5_K, Q6_K and IQ4_NL: gguf reads back what test mode computes with, and the
search of scales loses less than llama.cpp's own quantizers, which xllamacpp contains.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.targets import EXPORTERS
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.granularity import scale_shape, to_rows
from quantizer.numerics.group_search import searched_scales
from quantizer.numerics.qparams import QParams
from quantizer.observers import searched_format

for package in EXPORTERS["gguf"].needs:
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
import gguf

from quantizer.export.gguf.blocks import block_type, packed_blocks, with_float16_scale

GROUPS = {"q4_k": 32, "q5_k": 32, "q6_k": 16, "iq4_nl": 32}


def spec_of(name: str, method: str = "group_mse") -> QuantizationSpec:
    return QuantizationSpec(
        name,
        qscheme="per_group",
        ch_axis=1,
        group_size=GROUPS[name],
        scale_type="float" if name == "iq4_nl" else "superblock",
        method=method,
    )


SPECS = {name: spec_of(name) for name in GROUPS} | {
    "q4_0": QuantizationSpec(
        bit_width=4, qscheme="per_group", ch_axis=1, group_size=32, symmetric_scale="quant_min"
    )
}


def encoded(weight: Tensor, spec: QuantizationSpec) -> QuantizedTensor:
    qparams = nearest_qparams(spec, weight)
    tensor = QuantizedTensor(spec, qparams.scale, qparams.zero_point)
    return tensor.encoded(nearest(weight, spec, qparams))


def read_back(blocks: Tensor, name: str) -> Tensor:
    kind = gguf.GGMLQuantizationType[name.upper()]
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), kind).copy())


def drawn(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("method", ["group_mse", "maxmin"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    exponent=st.integers(-30, 15),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
    zeros=st.integers(0, 3),
)
def test_gguf_reads_the_values_of_test_mode(
    name: str, method: str, seed: int, exponent: int, shift: float, zeros: int
) -> None:
    """Of any size, on one side of zero or both, with rows of zeros."""
    weight = (drawn(4, 512, seed) + shift) * 2.0**exponent
    weight[:zeros] = 0
    tensor = encoded(weight, spec_of(name, method))
    assert tensor.codes is not None
    if name == "iq4_nl":
        tensor = with_float16_scale(tensor)
    kind = block_type(tensor.spec)
    assert kind is not None
    assert kind.name == name.upper()
    assert torch.equal(read_back(packed_blocks(tensor), name), tensor.decoded())


@pytest.mark.parametrize("name", GROUPS)
def test_a_search_is_never_worse_than_the_extremes(name: str) -> None:
    weight = drawn(8, 256)
    errors = []
    for method in ("group_mse", "maxmin"):
        values = encoded(weight, spec_of(name, method)).decoded()
        errors.append(float((values - weight).square().sum()))
    assert errors[0] < errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", GROUPS)
def test_codes_give_back_weights_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    weight = drawn(2, 256).to(dtype)
    tensor = encoded(weight, spec_of(name))
    qparams = QParams(tensor.scale, tensor.zero_point)
    assert tensor.codes is not None
    assert torch.equal(tensor.decoded(), nearest(weight, tensor.spec, qparams))


def of_llama_cpp(weight: Tensor, name: str, importance: Tensor | None) -> Tensor:
    """The values that llama.cpp's quantizer chooses."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp")
    [library] = Path(xllamacpp.__file__).parent.glob("*.so")
    function = getattr(ctypes.CDLL(str(library)), f"quantize_{name.replace('_k', '_K')}")
    function.restype = ctypes.c_size_t
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    rows, width = weight.shape
    blocks = torch.zeros(rows, width // block * size, dtype=torch.uint8)
    importance_pointer = None
    if importance is not None:
        importance_pointer = ctypes.c_void_p(importance.data_ptr())
    function(
        ctypes.c_void_p(weight.data_ptr()),
        ctypes.c_void_p(blocks.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(width),
        importance_pointer,
    )
    return read_back(blocks, name)


def searched(weight: Tensor, spec: QuantizationSpec, importance: Tensor | None) -> Tensor:
    """The values that the search chooses."""
    found = searched_format(spec)
    assert found is not None
    weights = None
    if importance is not None:
        weights = to_rows(importance.expand_as(weight), spec.cut)
    scale, minimum = searched_scales(to_rows(weight, spec.cut), weights, found)
    shape = scale_shape(tuple(weight.shape), spec.cut)
    zero_point = torch.zeros(shape, dtype=torch.int32)
    if found.row.has_minimum:
        zero_point = minimum.view(shape)
    return nearest(weight, spec, QParams(scale.view(shape), zero_point))


def heavy_tailed(rows: int, width: int) -> Tensor:
    """Student's t with four degrees of freedom."""
    generator = torch.Generator().manual_seed(1)
    squares = torch.randn(rows, width, 4, generator=generator).square()
    return drawn(rows, width) / squares.mean(-1).sqrt()


@pytest.mark.parametrize("draw", [drawn, heavy_tailed])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_scales_lose_less_than_those_of_llama_cpp(
    name: str, is_weighted: bool, draw: Callable[[int, int], Tensor]
) -> None:
    """By 0.05 to 0.9 dB."""
    weight = draw(32, 512) * 0.02
    importance = drawn(1, 512, seed=2).mul(1.5).exp()
    weights = importance if is_weighted else torch.ones_like(importance)
    given_importance = importance if is_weighted else None
    errors = []
    for values in (
        searched(weight, SPECS[name], given_importance),
        of_llama_cpp(weight, name, given_importance),
    ):
        errors.append(float(((values - weight).square() * weights).sum()))
    assert errors[0] < 0.99 * errors[1]
