"""TensorQuantizer on every format and granularity, static and dynamic."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.extended import extended, extended_except
from torch.export import Dim, export

from quantizer.config.model import QuantizationSpec
from quantizer.nn.dynamic import VALUES_AT_ONCE
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics import fake_quantize, rounding
from quantizer.observers import NegativeValuesError, ObservationError, Observer

FORMATS = {
    "int8": QuantizationSpec(),
    "uint4": QuantizationSpec(bit_width=4, symmetric=False),
    "int2": QuantizationSpec(bit_width=2),
    "int16_pof2": QuantizationSpec(bit_width=16, scale_type="poweroftwo"),
    "int32": QuantizationSpec(bit_width=32),
    "int8_floor": QuantizationSpec(round_mode="floor"),
    "fp8_e4m3": QuantizationSpec("fp8_e4m3"),
    "fp8_e5m2": QuantizationSpec("fp8_e5m2", scale_type="poweroftwo"),
    "mxfp4": QuantizationSpec("fp4", scale_type="e8m0", scale_mode="even"),
    "mxfp6": QuantizationSpec("fp6_e2m3", scale_type="e8m0"),
    "bfp16": QuantizationSpec("bfp16", scale_type="e8m0", scale_mode="even"),
}
CUTS = [
    ("per_tensor", None, None),
    ("per_channel", 0, None),
    ("per_channel", -2, None),
    ("per_group", -1, 8),
    ("per_group", 1, 3),
    ("per_group", 2, -1),
    ("per_group", 0, 3),  # the last group is shorter
    ("per_token", -1, None),
    ("per_token", 1, None),
]
TWO_LEVELS = {
    "nvfp4": QuantizationSpec("fp4", scale_type="e4m3"),
    "mx9": QuantizationSpec("mx9", scale_type="microexponent"),
}
"""Formats in which scales depend on each other."""
BLOCKS = [("per_group", -1, 16), ("per_group", 0, 16)]
ROWS = [*product(FORMATS, CUTS), *product(TWO_LEVELS, BLOCKS)]
ALL = [pytest.param(name, cut, id=f"{name}-{cut[0]}-{cut[1]}") for name, cut in ROWS]


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + 0.2


def spec_of(name, cut):
    qscheme, axis, group = cut
    return replace(
        {**FORMATS, **TWO_LEVELS}[name], qscheme=qscheme, ch_axis=axis, group_size=group
    )


def static(spec, x, **kwargs):
    observer = Observer(spec)
    observer.observe(x)
    found = observer.qparams()
    return TensorQuantizer(spec, found.scale, found.zero_point, **kwargs)


def dynamic(spec, **kwargs):
    return TensorQuantizer(replace(spec, is_dynamic=True), **kwargs)


def assert_like_calibration(out, expected, spec):
    """Compare values; engines round the length of an asymmetric range to float32, and
    calibration does not.
    """
    rounds = spec.dtype == "int" and not spec.symmetric
    torch.testing.assert_close(out, expected, rtol=2**-22 if rounds else 0, atol=0)


def test_asymmetric_rows_are_rounded_as_by_engines():
    spec = replace(FORMATS["uint4"], qscheme="per_token", ch_axis=-1)
    x = values(2000, 16)
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / torch.tensor(15.0)
    least = torch.round(low / scale)
    units = torch.round(x / scale).clamp(least, least + 15)
    assert torch.equal(dynamic(spec)(x), units * scale)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cut"), ALL)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, *extended(torch.float64)], ids=str
)
def test_dynamic_is_static_calibrated_on_the_tensor_at_hand(name, cut, dtype):
    spec, x = spec_of(name, cut), values(4, 6, 16).to(dtype)
    expected = static(spec, x)(x)
    assert (expected.dtype, expected.shape) == (dtype, x.shape)
    out = dynamic(spec)(x)
    assert_like_calibration(out, expected, spec)
    assert torch.equal(dynamic(spec, inplace=True)(x.clone()), out)
    assert torch.equal(static(spec, x, inplace=True)(x.clone()), expected)


SEVERAL_SCALES = [(name, cut) for name, cut in product(FORMATS, CUTS) if cut[0] != "per_tensor"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cut"),
    # By turns: each cut with half of the formats
    extended_except(SEVERAL_SCALES, *SEVERAL_SCALES[::3], *SEVERAL_SCALES[1::6]),
    ids=str,
)
def test_every_index_of_the_scale_is_quantized_by_itself(name, cut):
    """One row of `to_rows` alone, per tensor, gives the same values."""
    spec, x = spec_of(name, cut), values(4, 6, 16)
    y = dynamic(spec)(x)
    qscheme, axis, group = cut
    alone = dynamic(FORMATS[name])
    for one, other in (
        ((x, y), (x.transpose(0, 1), y.transpose(0, 1))) if axis == -1 else ((x, y),)
    ):
        pairs = zip(
            pieces(one, qscheme, axis, group), pieces(other, qscheme, axis, group), strict=True
        )
        assert all(torch.equal(alone(piece), found) for piece, found in pairs)


def pieces(x, qscheme, axis, group):
    """What each scale is for, by indexing alone."""
    if qscheme == "per_channel":
        return list(x.unbind(axis))
    lines = x.movedim(axis, -1).reshape(-1, x.shape[axis])
    return [
        part
        for line in lines
        for part in line.split(line.numel() if group in (None, -1) else group)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_of_the_whole_axis_is_a_channel_of_the_other(name):
    weight = values(8, 32)
    channels = replace(FORMATS[name], qscheme="per_channel", ch_axis=0)
    groups = replace(FORMATS[name], qscheme="per_group", ch_axis=1, group_size=-1)
    assert torch.equal(static(channels, weight)(weight), static(groups, weight)(weight))


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_does_not_depend_on_its_batch_mates(name):
    quantizer, x = (
        dynamic(replace(FORMATS[name], qscheme="per_token", ch_axis=-1)),
        values(3, 700, 64),
    )
    loud = x.clone()
    loud[1:] *= 50
    loud[0, 1:] *= 50
    assert torch.equal(quantizer(loud)[0, 0], quantizer(x)[0, 0])
    assert torch.equal(quantizer(x[:1, :1])[0, 0], quantizer(x)[0, 0])


@pytest.mark.parametrize("name", [*FORMATS, *TWO_LEVELS])
def test_zeros_stay_zeros(name):
    for cut in CUTS if name in FORMATS else BLOCKS:
        assert not dynamic(spec_of(name, cut))(torch.zeros(3, 5, 8)).any()


@pytest.mark.parametrize("layout", ["channels_last", "strided", "transposed"])
@pytest.mark.parametrize(
    "cut", [("per_token", 1, None), ("per_token", -1, None), ("per_tensor", None, None)]
)
def test_every_layout_gives_the_same(layout, cut):
    x = values(2, 8, 6, 10)
    other = {
        "channels_last": x.to(memory_format=torch.channels_last),
        "strided": torch.stack([x, x + 9], -1)[..., 0],
        "transposed": x.transpose(1, 3).contiguous().transpose(1, 3),
    }[layout]
    assert torch.equal(dynamic(spec_of("int8", cut))(other), dynamic(spec_of("int8", cut))(x))
    assert torch.equal(
        dynamic(spec_of("int8", cut), inplace=True)(other.clone()),
        dynamic(spec_of("int8", cut))(x),
    )


@pytest.mark.parametrize(
    "cut", [("per_tensor", None, None), ("per_token", -1, None), ("per_group", -1, 8)]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_an_error_at_run_time(cut, value):
    x = values(3, 16)
    x[1, 2] = value
    for name, of in [*product(FORMATS, [cut]), *product(TWO_LEVELS, BLOCKS)]:
        with pytest.raises(ObservationError, match="NaN or infinity"):
            dynamic(spec_of(name, of))(x)


def test_negative_values_need_a_sign():
    unsigned = QuantizationSpec(signed=False, qscheme="per_token", ch_axis=-1)
    assert dynamic(unsigned)(torch.tensor([[0.0, 255.0]])).tolist() == [[0, 255]]
    with pytest.raises(NegativeValuesError, match="make it signed"):
        dynamic(unsigned)(torch.tensor([[0.0, -1.0]]))


ROWS = 2 * VALUES_AT_ONCE // 4096 - 100
"""Of 4096 values each: two rounds, the second of them shorter."""


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["uint4", *extended("int8", "mxfp4")])
def test_rows_of_several_rounds_are_what_calibration_finds(name, dtype, inplace):
    x = torch.randn(ROWS, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    spec = replace(FORMATS[name], qscheme="per_token", ch_axis=-1)
    expected = static(spec, x)(x)
    given = x.clone()
    out = dynamic(spec, inplace=inplace)(given)
    assert_like_calibration(out, expected, spec)
    assert torch.equal(given, out if inplace else x)


def test_rows_without_a_range_are_counted_over_all_rounds():
    x = torch.rand(ROWS, 4096, generator=torch.Generator().manual_seed(0))
    x[-1, 5] = -1
    spec = QuantizationSpec(signed=False, qscheme="per_token", ch_axis=-1)
    with pytest.raises(NegativeValuesError, match="smallest value is -1"):
        dynamic(spec)(x)
    x[1, 7], x[-1, 9] = float("nan"), float("inf")
    with pytest.raises(
        ObservationError, match=f"2 of {ROWS} rows of this tensor hold NaN or infinity"
    ):
        dynamic(spec)(x)


def test_what_has_no_values_or_is_not_floating_point_passes():
    quantizer = dynamic(spec_of("int8", ("per_token", -1, None)))
    assert quantizer(torch.empty(0, 4)).shape == (0, 4)
    codes = torch.tensor([1, 2])
    assert quantizer(codes) is codes
    assert quantizer("text") == "text"


@pytest.mark.parametrize("inplace", [False, True])
def test_a_quantized_copy_leaves_its_input(inplace):
    x = values(4, 6)
    quantizers = [
        static(QuantizationSpec(bit_width=4), x, inplace=inplace),
        dynamic(spec_of("int8", ("per_token", -1, None)), inplace=inplace),
        dynamic(QuantizationSpec(bit_width=4), inplace=inplace),
        TensorQuantizer(QuantizationSpec(dtype="bfloat16"), inplace=inplace),
    ]
    for quantizer in quantizers:
        given = x.clone()
        copy = quantizer.quantized_copy(given)
        assert torch.equal(given, x)
        assert not torch.equal(copy, x)
        assert torch.equal(copy, quantizer(given))
    codes = torch.tensor([1, 2])
    assert quantizers[0].quantized_copy(codes) is codes


def test_a_static_quantizer_needs_scales_and_an_axis():
    with pytest.raises(ValueError, match="needs a scale and a zero point"):
        TensorQuantizer(QuantizationSpec())
    with pytest.raises(ValueError, match="per_token needs ch_axis"):
        TensorQuantizer(QuantizationSpec(qscheme="per_token", is_dynamic=True))
    assert (
        TensorQuantizer(QuantizationSpec(dtype="bfloat16"))(torch.tensor([1.001])).item() == 1
    )


PER_TENSOR, PER_TOKEN, PER_GROUP = (
    ("per_tensor", None, None),
    ("per_token", -1, None),
    ("per_group", -1, 6),
)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("int8", PER_TENSOR),
        ("uint4", PER_TOKEN),
        ("mxfp4", PER_GROUP),
        *extended(
            ("int8", PER_TOKEN),
            ("int8", PER_GROUP),
            ("fp8_e4m3", PER_TENSOR),
            ("bfp16", PER_TOKEN),
            ("bfp16", PER_GROUP),
        ),
    ],
)
def test_a_traced_program_gives_the_same_for_any_batch(name, cut):
    quantizer = dynamic(spec_of(name, cut))
    program = export(
        quantizer, (values(4, 3, 16),), dynamic_shapes=({0: Dim.DYNAMIC},)
    ).module()
    x = values(7, 3, 16, seed=1)
    assert torch.equal(program(x), quantizer(x))


@pytest.mark.parametrize("name", ["int8", "mxfp4", *extended("uint4", "fp8_e4m3")])
@pytest.mark.parametrize(
    "cut", [("per_channel", 0, None), ("per_group", -1, 8), ("per_group", 0, 3)]
)
def test_a_traced_program_has_the_static_values(name, cut):
    x = values(4, 3, 16)
    quantizer = static(spec_of(name, cut), x)
    assert torch.equal(export(quantizer, (x,)).module()(x), quantizer(x))


def test_modules_that_read_one_value_share_what_is_made_of_it_until_it_is_written_to() -> None:
    spec = QuantizationSpec(is_dynamic=True)
    first, second = TensorQuantizer(spec), TensorQuantizer(spec)
    x = torch.tensor([[-1.0, 0.3], [0.2, 2.0]])
    found = first(x)
    assert second(x) is found
    assert TensorQuantizer(replace(spec, bit_width=4))(x) is not found
    x[0, 0] = 5.0
    again = second(x)
    assert again is not found and again[0, 0] == 5.0
    again.zero_()
    assert first(x)[0, 0] == 5.0, "a module may have written to what it was given"
    assert TensorQuantizer(spec, inplace=True)(x) is not again
    with torch.inference_mode():
        y = torch.tensor([[-1.0, 0.3]])
        torch.testing.assert_close(first(y), second(y))


def test_a_round_mode_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls, and quantizers with the same codes, share one kernel."""
    looked_up = []

    def rounding_named(name: str) -> rounding.RoundMode:
        looked_up.append(name)
        return rounding.rounding_named(name)

    monkeypatch.setattr(fake_quantize, "rounding_named", rounding_named)
    spec = QuantizationSpec(bit_width=13, narrow_range=True, round_mode="half_down")
    for axis in (0, 1):
        along = replace(spec, qscheme="per_channel", ch_axis=axis)
        quantizer = TensorQuantizer(along, torch.ones(4), torch.zeros(4, dtype=torch.int32))
        for _ in range(3):
            quantizer(values(4, 4))
    assert looked_up == ["half_down"]
