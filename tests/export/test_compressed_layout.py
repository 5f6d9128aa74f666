"""The tensors of a compressed layer, byte for byte as the library that defines them writes and
reads them.
"""

from __future__ import annotations

import pytest
import torch
from support.deployments import fitted

from quantizer.algorithms.round_to_nearest import nearest_qparams
from quantizer.config.model import QuantizationSpec
from quantizer.export.compressed_tensors.schemes import CompressedLayer
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer

helpers = pytest.importorskip(
    "compressed_tensors.compressors.pack_quantized.helpers", reason="needs quantizer-torch[llm]"
)


def layer(spec: QuantizationSpec, shape: tuple[int, int] = (5, 37)) -> CompressedLayer:
    """Of a normal weight of sizes that no word divides."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(spec.bit_width))
    tensor = fitted(value, spec)
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
    value = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    qparams = nearest_qparams(spec, value)
    tensor = QuantizedTensor(spec, qparams.scale, qparams.zero_point)
    made = CompressedLayer(tensor.encoded(TensorQuantizer.of(tensor)(value)))
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


def test_the_scale_of_a_tensor_is_one_for_each_row_of_packed_codes() -> None:
    found = layer(QuantizationSpec(bit_width=4)).tensors()["weight_scale"]
    assert found.shape == (5, 1)
    assert len(set(found.flatten().tolist())) == 1


def test_a_weight_without_codes_is_an_error() -> None:
    with pytest.raises(ValueError, match="encoded"):
        CompressedLayer(fitted(torch.ones(2, 2), QuantizationSpec())).tensors()
