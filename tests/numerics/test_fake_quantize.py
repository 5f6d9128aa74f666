"""To codes and back, against the definition in float64 and against ONNX Runtime."""

import math

import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st
from support.positional import fake_quantize, fake_quantize_plain

from quantizer.config.model import QuantizationSpec
from quantizer.numerics.blocks import BLOCK_SIZE
from quantizer.numerics.codes import decode, encode
from quantizer.numerics.rounding import NEAREST, ROUND_MODES


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_definition(x, scale, zero_point, low, high, mode, ch_axis=None):
    """The formula, whole tensors, float32 quotient and float64 else."""
    shape = [1] * x.ndim
    if ch_axis is not None:
        shape[ch_axis] = -1
    s, z = scale.view(shape), zero_point.view(shape)
    codes = (ROUND_MODES[mode]((x.float() / s).double()) + z).clamp(low, high)
    return ((codes - z) * s.double()).to(x.dtype)


@pytest.mark.parametrize("mode", ROUND_MODES)
@pytest.mark.parametrize("bits", range(2, 17))
def test_per_tensor_equals_the_definition(mode, bits):
    x, scale = randn(1000), torch.tensor(6.0 / 2**bits)
    x[:8] = (torch.arange(8) - 3.5) * scale  # ties
    for zero_point, low, high in (
        (0, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1),
        (2 ** (bits - 1), 0, 2**bits - 1),
    ):
        args = scale, torch.tensor(zero_point, dtype=torch.int32), low, high, mode
        assert torch.equal(fake_quantize(x, *args), by_definition(x, *args))


@pytest.mark.parametrize("mode", ROUND_MODES)
@pytest.mark.parametrize("ch_axis", [0, 1, 2, 3, -1])
def test_per_channel_equals_the_definition(mode, ch_axis):
    x = randn(3, 4, 5, 6)
    channels = x.shape[ch_axis]
    scale, zero_point = (
        torch.rand(channels) / 10 + 0.01,
        torch.arange(channels, dtype=torch.int32),
    )
    args = scale, zero_point, 0, 15, mode, ch_axis
    assert torch.equal(fake_quantize(x, *args), by_definition(x, *args))


@pytest.mark.parametrize("exponents", [(-126, -40, -3, 0, 127), (-127, -126, -3, 0, 127)])
@pytest.mark.parametrize("ch_axis", [None, 0])
def test_powers_of_two_give_the_bits_that_a_division_gives(exponents, ch_axis):
    """2^-127 is subnormal, and so is the reciprocal of 2^127."""
    x = torch.cat(
        [
            randn(5, 400) * 10,
            randn(5, 400) * 1e-38,
            torch.tensor([0.0, -0.0, 3e38, math.inf]).expand(5, -1),
        ],
        1,
    )
    scales = torch.ldexp(torch.ones(5), torch.tensor(exponents))
    for scale in scales if ch_axis is None else [scales]:
        args = scale, torch.zeros_like(scale, dtype=torch.int32), -8, 7, "half_even", ch_axis
        expected = fake_quantize_plain(x, *args)
        assert torch.equal(
            fake_quantize(x, *args).view(torch.int32), expected.view(torch.int32)
        )


LAYOUTS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "every_second": lambda x: x[:, :, ::2],
    "part_of_a_batch": lambda x: x[1:, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ch_axis", [None, 0, 1])
def test_every_layout_is_done_in_place(layout, ch_axis):
    x = LAYOUTS[layout](randn(4, 6, 8, 10))
    shape = () if ch_axis is None else (x.shape[ch_axis],)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 10 + 0.01
    args = scale, torch.zeros(shape, dtype=torch.int32), -8, 7, "half_up", ch_axis
    expected = by_definition(x, *args)
    result = fake_quantize(x, *args, inplace=True)
    assert result is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_the_copying_form_equals_the_other_for_every_layout(layout, dtype):
    x = LAYOUTS[layout](randn(4, 6, 8, 10).to(dtype))
    args = torch.tensor(0.1), torch.tensor(0), -8, 7, "half_up"
    y = fake_quantize(x, *args)
    assert y.dtype == dtype
    assert torch.equal(y, fake_quantize(x.clone(), *args, inplace=True))


@pytest.mark.parametrize(
    ("shape", "ch_axis"),
    [
        ((BLOCK_SIZE + 7,), None),
        ((3, 2, BLOCK_SIZE // 4 + 1), 1),
        ((2, BLOCK_SIZE, 2), 1),
        ((BLOCK_SIZE, 3), -1),
    ],
)
def test_tensors_of_several_blocks(shape, ch_axis):
    x = randn(*shape)
    channels = () if ch_axis is None else (shape[ch_axis],)
    scale = torch.rand(channels, generator=torch.Generator().manual_seed(1)) + 0.01
    args = scale, torch.full(channels, 3, dtype=torch.int32), 0, 15, "half_even", ch_axis
    assert torch.equal(fake_quantize(x, *args), by_definition(x, *args))


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_scalars_and_empty_tensors(shape):
    x = torch.ones(shape)
    assert torch.equal(
        fake_quantize(x, torch.tensor(0.5), torch.tensor(0), -8, 7, "half_even"), x
    )
    if shape:
        scale, zero_point = torch.ones(shape[0]), torch.zeros(shape[0], dtype=torch.int32)
        assert fake_quantize(x, scale, zero_point, -8, 7, "half_even", 0).shape == shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_computed_in_float32(dtype):
    x = randn(1000).to(dtype)
    args = torch.tensor(0.0236), torch.tensor(0), -128, 127, "half_even"
    assert torch.equal(fake_quantize(x, *args), fake_quantize(x.float(), *args).to(dtype))


def test_float64_keeps_its_precision():
    x = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64) * 0.5
    args = torch.tensor(1.0), torch.tensor(0), -8, 7, "half_even"
    assert fake_quantize(x, *args).item() == 1  # in float32 this is a tie, which goes to 0


def test_32_bit_codes_neither_wrap_nor_lose_bits():
    x = torch.tensor([-1.0, 1.0, 0.123456789, 3e9])
    args = torch.tensor(1 / (2**31 - 1)), torch.tensor(0), -(2**31), 2**31 - 1, "half_even"
    y = fake_quantize(x, *args)
    assert torch.allclose(y[:3], x[:3], rtol=1e-7, atol=0)
    codes = encode(y, QuantizationSpec(bit_width=32), *args[:2])
    assert codes[3] == 2**31 - 1
    assert torch.equal(decode(codes, QuantizationSpec(bit_width=32), *args[:2]), y)


def test_not_a_number_stays_visible():
    args = torch.tensor(1.0), torch.tensor(0), -8, 7, "half_even"
    x = torch.tensor([math.nan, math.inf, -math.inf])
    assert fake_quantize(x, *args)[0].isnan()
    assert fake_quantize(x, *args)[1:].tolist() == [7, -8]


def test_the_copying_form_leaves_its_argument():
    x = randn(10)
    kept = x.clone()
    fake_quantize(x, torch.tensor(0.5), torch.tensor(0), -8, 7, "half_even")
    encode(x, QuantizationSpec(bit_width=4), torch.tensor(0.5), torch.tensor(0))
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    ("bits", "signed", "dtype"),
    [
        (4, True, torch.int8),
        (8, False, torch.uint8),
        (10, True, torch.int16),
        (16, False, torch.int32),
    ],
)
def test_codes_come_in_the_smallest_dtype(bits, signed, dtype):
    spec, scale = (
        QuantizationSpec(bit_width=bits, signed=signed),
        (torch.tensor(0.1), torch.tensor(0)),
    )
    bounds = spec.quant_min, spec.quant_max
    codes = encode(
        fake_quantize(torch.tensor([-1e30, 0.0, 1e30]), *scale, *bounds, "half_even"),
        spec,
        *scale,
    )
    assert codes.dtype == dtype
    assert codes.tolist() == [bounds[0], 0, bounds[1]]


def test_per_channel_codes_and_values_fit_together():
    x, scale = randn(3, 4, 5), torch.tensor([0.1, 0.2, 0.3, 0.4])
    zero_point = torch.tensor([0, 3, 7, 15], dtype=torch.int32)
    spec = QuantizationSpec(bit_width=4, symmetric=False, qscheme="per_channel", ch_axis=1)
    expected = fake_quantize(x, scale, zero_point, 0, 15, "std_round", 1)
    codes = encode(expected, spec, scale, zero_point)
    assert torch.equal(
        codes.movedim(1, 0)[2], ((x[:, 2] / 0.3).round() + 7).clamp(0, 15).to(torch.uint8)
    )
    assert torch.equal(decode(codes, spec, scale, zero_point), expected)


def test_bad_arguments_are_named():
    x, scale, zero_point = torch.zeros(2, 3), torch.ones(2), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"must have shape \(3,\)"):
        fake_quantize(x, scale, zero_point, -8, 7, "half_even", 1)
    with pytest.raises(ValueError, match='did you mean "half_up"'):
        fake_quantize(x, torch.tensor(1.0), torch.tensor(0), -8, 7, "halfup")
    with pytest.raises(TypeError, match="int64"):
        fake_quantize(x.long(), torch.tensor(1.0), torch.tensor(0), -8, 7, "half_even")


@pytest.mark.slow
@given(
    x=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20),
    scale=st.floats(2.0**-20, 2.0**60, width=32),
    zero_point=st.integers(0, 255),
    mode=st.sampled_from(sorted(ROUND_MODES)),
)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_every_value_comes_back_within_half_a_step_or_one_of_its_clipped_self(
    x, scale, zero_point, mode
):
    values = torch.tensor(x)
    args = torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), 0, 255, mode
    y = fake_quantize(values, *args)
    clipped = values.double().clamp((0 - zero_point) * scale, (255 - zero_point) * scale)
    assert ((y - clipped).abs() <= scale / (2 if mode in NEAREST else 1) * (1 + 1e-4)).all()
    assert torch.equal(
        fake_quantize(y, *args[:-1], mode if mode in NEAREST else "half_even"), y
    )
    spec = QuantizationSpec(symmetric=False)
    assert torch.equal(decode(encode(y, spec, *args[:2]), spec, *args[:2]), y)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_equal_onnx_runtime(signed):
    """The division of the definition, not a product with 1 / scale, gives ONNX Runtime's codes,
    ties included.
    """
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    helper, tensor_type = onnx.helper, onnx.TensorProto
    code_type, low, high, z = (
        (tensor_type.INT8, -128, 127, 0) if signed else (tensor_type.UINT8, 0, 255, 117)
    )
    scale = 0.0236
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])],
        "quantize",
        [helper.make_tensor_value_info("x", tensor_type.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", code_type, ["n"])],
        [
            helper.make_tensor("s", tensor_type.FLOAT, [], [scale]),
            helper.make_tensor("z", code_type, [], [z]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )

    ties = (torch.arange(-120, 120) + 0.5) * torch.tensor(scale)
    x = torch.cat([randn(2_000_000, seed=3), ties, torch.tensor([1e30, -1e30])])
    (theirs,) = session.run(None, {"x": x.numpy()})
    qparams = torch.tensor(scale), torch.tensor(z, dtype=torch.int32)
    ours = encode(
        fake_quantize(x, *qparams, low, high, "half_even"),
        QuantizationSpec(symmetric=signed),
        *qparams,
    )
    assert torch.equal(ours, torch.from_numpy(theirs))
