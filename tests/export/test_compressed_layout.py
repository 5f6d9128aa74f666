"""The tensors of a compressed layer, byte for byte as the library that defines them writes and
reads them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.deployments import fitted

from quantizer.config.model import QuantizationSpec
from quantizer.export.compressed_tensors.schemes import CompressedLayer
from quantizer.layerwise.round_to_nearest import nearest_qparams
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer

helpers = pytest.importorskip(
    "compressed_tensors.compressors.pack_quantized.helpers", reason="needs quantizer-torch[llm]"
)


def layer(spec: QuantizationSpec, shape: tuple[int, int] = (5, 37)) -> CompressedLayer:
    """Of a normal weight of sizes that no word divides."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(spec.bit_width))
    tensor = fitted(value, spec)
    return CompressedLayer(tensor.encoded(TensorQuantizer.of(tensor)(value)))


def scaled_layer(spec: QuantizationSpec, shape: tuple[int, int]) -> CompressedLayer:
    """Of a normal weight in a floating-point format."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    qparams = nearest_qparams(spec, value)
    tensor = QuantizedTensor(spec, qparams.scale, qparams.zero_point)
    return CompressedLayer(tensor.encoded(TensorQuantizer.of(tensor)(value)))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_packed_codes_are_the_librarys_own(bits: int, symmetric: bool) -> None:
    made = layer(
        QuantizationSpec(bit_width=bits, symmetric=symmetric, qscheme="per_channel", ch_axis=0)
    )
    found, codes = made.tensors(), made.weight.codes
    assert codes is not None
    middle = 0 if symmetric else 1 << (bits - 1)
    signed = (codes.int() - middle).to(torch.int8)
    assert torch.equal(found["weight_packed"], helpers.pack_to_int32(signed, bits))
    assert found["weight_shape"].tolist() == [5, 37]
    assert found["weight_scale"].shape == (5, 1)
    assert ("weight_zero_point" in found) == (not symmetric), (
        "engines cannot load one of symmetric weights"
    )
    if not symmetric:
        zero_points = (made.weight.zero_point[:, None] - middle).to(torch.int8)
        expected = helpers.pack_to_int32(zero_points, bits, packed_dim=0)
        assert torch.equal(found["weight_zero_point"], expected)
    assert made.scheme == {
        "format": "pack-quantized",
        "input_activations": None,
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": symmetric,
            "strategy": "channel",
            "group_size": None,
            "dynamic": False,
        },
    }


def test_nvfp4_is_what_the_library_writes_of_the_same_values() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    spec = QuantizationSpec(
        "fp4", qscheme="per_group", ch_axis=1, group_size=16, scale_type="e4m3"
    )
    made = scaled_layer(spec, (6, 64))
    found = made.tensors()
    words = quantization.QuantizationArgs(**made.scheme["weights"])
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=words)
    scale, factor = found["weight_scale"].float(), found["weight_global_scale"]
    given = {
        "weight": made.weight.decoded(),
        "weight_scale": scale,
        "weight_global_scale": factor,
    }
    theirs = compressors.NVFP4PackedCompressor.compress(given, scheme)
    assert found.keys() == theirs.keys()
    assert all(
        torch.equal(found[name].view(torch.uint8), theirs[name].view(torch.uint8))
        for name in found
    )
    restored = compressors.NVFP4PackedCompressor.decompress(found, scheme)["weight"]
    assert torch.equal(restored, made.weight.decoded().bfloat16()), (
        "the library decodes in bfloat16"
    )


FP8_GROUPS = QuantizationSpec(
    "fp8_e4m3", qscheme="per_group", ch_axis=-1, group_size=32, is_dynamic=True
)
INPUTS = {
    "fp8 in groups": (
        FP8_GROUPS,
        QuantizationSpec("fp8_e4m3", qscheme="per_block", group_size=32),
    ),
    "mxfp8": (
        replace(FP8_GROUPS, scale_type="poweroftwo"),
        replace(FP8_GROUPS, ch_axis=1, scale_type="e8m0", is_dynamic=False),
    ),
    "mxfp4": (
        replace(FP8_GROUPS, dtype="fp4", scale_type="e8m0", scale_mode="even"),
        replace(FP8_GROUPS, dtype="fp4", ch_axis=1, scale_type="e8m0", is_dynamic=False),
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_what_the_library_computes_at_run_time(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    spec, weight = INPUTS[name]
    made = CompressedLayer(scaled_layer(weight, (64, 64)).weight, QuantizedTensor(spec))
    words = quantization.QuantizationArgs(**made.scheme["input_activations"])
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 9, 64, generator=generator)
    x *= torch.randn(4, 9, 64, generator=generator).mul(3).exp()
    x[0, 0] = 0.0
    scale, zero_point = utils.compute_dynamic_scales_and_zp(x, words, torch.nn.Identity())
    theirs = forward.fake_quantize(x, scale, zero_point, words)
    assert torch.equal(TensorQuantizer(spec)(x), theirs)


def test_mxfp8_is_what_the_library_reads() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    _, spec = INPUTS["mxfp8"]
    made = scaled_layer(spec, (6, 64))
    assert made.format == "mxfp8-quantized"
    words = quantization.QuantizationArgs(**made.scheme["weights"])
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=words)
    compressor = compressors.BaseCompressor.get_value_from_registry(made.format)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    found = made.tensors()
    assert (found["weight_scale"].dtype, found["weight_scale"].shape) == (torch.uint8, (6, 2))
    restored = compressor.decompress(found, scheme)["weight"]
    assert torch.equal(restored, made.weight.decoded().bfloat16())


def test_the_scale_of_a_tensor_is_one_for_each_row_of_packed_codes() -> None:
    found = layer(QuantizationSpec(bit_width=4)).tensors()["weight_scale"]
    assert found.shape == (5, 1)
    assert len(set(found.flatten().tolist())) == 1


def test_a_weight_without_codes_is_an_error() -> None:
    with pytest.raises(ValueError, match="encoded"):
        CompressedLayer(fitted(torch.ones(2, 2), QuantizationSpec())).tensors()
