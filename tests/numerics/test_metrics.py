"""The SQNR of numbers one can check by hand, and the laws quantization noise obeys."""

import math

import pytest
import torch
from support.positional import fake_quantize
from torch.utils._python_dispatch import TorchDispatchMode

from quantizer.numerics.formats import IntegerRange, cast_round_trip_
from quantizer.numerics.metrics import (
    VALUES_PER_SUM,
    Approximation,
    Energies,
    decibel,
    energy,
    noise_energies,
    sqnr_db,
)
from quantizer.numerics.qparams import qparams_from_range
from quantizer.tables import NUMBER_FORMATS


def quantized(x, code_range):
    qparams = qparams_from_range(x.min(), x.max(), code_range)
    return fake_quantize(
        x,
        qparams.scale,
        qparams.zero_point,
        code_range.quant_min,
        code_range.quant_max,
        "half_even",
    )


def test_energy_adds_up_over_blocks_layouts_and_dtypes():
    x = torch.full((3, VALUES_PER_SUM), 0.5)
    assert energy(x) == energy(x.T) == energy(x.half()) == 0.75 * VALUES_PER_SUM
    assert energy(torch.zeros(0)) == 0


LAYOUTS = {
    "alike": (torch.channels_last, torch.channels_last),
    "different": (torch.channels_last, torch.contiguous_format),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_energies_in_one_go_are_those_of_each_tensor(layouts, dtype):
    """Bit for bit, over several parts."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for layout in layouts:
        values = torch.randn(4, 5, 120, 130, generator=generator).to(dtype)
        tensors.append(values.contiguous(memory_format=layout))
    x, y = tensors
    assert x.numel() > VALUES_PER_SUM
    signal, energies = noise_energies(
        x, [Approximation(y), Approximation(x, torch.round), Approximation(y, None, False)]
    )
    assert signal == energy(x)
    rounded = x.round()
    assert energies == [
        Energies(energy(y), energy(x - y)),
        Energies(energy(rounded), energy(x - rounded)),
        Energies(0.0, energy(x - y)),
    ]


def test_energies_of_a_parameter_keep_no_graph():
    x = torch.nn.Parameter(torch.ones(3))
    signal, (energies,) = noise_energies(x, [Approximation(x + 1)])
    assert (signal, energies) == (3.0, Energies(12.0, 3.0))
    assert energy(torch.full((3,), 2.0)) == 12


class Operators(TorchDispatchMode):
    """The names of all operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_energy_reads_values_in_the_order_of_memory_without_a_copy_of_all(order):
    """A copy in another order takes ten times as long as the sum: that was half of test mode
    for images.
    """
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=order
    )
    with Operators() as seen:
        found = energy(x)
    assert found == pytest.approx(float(x.double().square().sum()), rel=1e-12)
    # Each part is converted by `copy_`
    assert not {"clone", "_reshape_copy", "contiguous"} & seen.names


def test_sqnr_of_a_tenth_is_twenty_decibel():
    assert sqnr_db(torch.ones(5), torch.full((5,), 1.1)) == pytest.approx(20, abs=1e-5)


def test_sqnr_at_its_ends():
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert sqnr_db(ones, ones) == math.inf
    assert sqnr_db(zeros, zeros) == math.inf
    assert sqnr_db(zeros, ones) == -math.inf
    assert decibel(1, 10) == -10


def test_different_shapes_are_an_error():
    with pytest.raises(ValueError, match="differ in shape"):
        sqnr_db(torch.zeros(2, 3), torch.zeros(3, 2))


@pytest.mark.parametrize("bits", range(2, 17))
def test_uniform_data_follow_six_decibel_per_bit(bits):
    """Min-max quantization of U(-1, 1) has 20 log10(2^b - 1) dB; an off-by-one in code_range or
    scale shows.
    """
    x = (
        torch.rand(
            1_000_000, generator=torch.Generator().manual_seed(bits), dtype=torch.float64
        )
        * 2
        - 1
    )
    expected = 20 * math.log10(2**bits - 1)
    assert sqnr_db(
        x, quantized(x, IntegerRange(0, 2**bits - 1, symmetric=False))
    ) == pytest.approx(expected, abs=0.1)


def samples():
    generator = torch.Generator().manual_seed(11)
    gauss = torch.randn(5, 1_000_000, generator=generator, dtype=torch.float64)
    uniform = torch.rand(1_000_000, generator=generator, dtype=torch.float64) - 0.5
    return {
        "gauss": gauss[0],
        "laplace": -uniform.sign() * torch.log1p(-2 * uniform.abs()),
        "student": gauss[1] / gauss[2:].square().mean(0).sqrt(),
    }


DATA = samples()


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("name", "expected"), [("fp8_e4m3", 31.5), ("fp8_e5m2", 25.6)])
def test_fp8_does_not_care_for_the_distribution(data, name, expected):
    """With scale = absmax / largest value. Source: FP8 Formats for Deep Learning, arXiv
    2209.05433.
    """
    x = DATA[data]
    scale = x.abs().max() / NUMBER_FORMATS[name].largest
    assert sqnr_db(x, cast_round_trip_(x / scale, name) * scale) == pytest.approx(
        expected, abs=0.3
    )


def test_int8_does_care_for_the_distribution():
    sqnr = {name: sqnr_db(x, quantized(x, IntegerRange(-128, 127))) for name, x in DATA.items()}
    assert sqnr["gauss"] == pytest.approx(39.2, abs=1)
    assert 25 < sqnr["laplace"] < sqnr["gauss"] - 4
    assert sqnr["student"] < 25


@pytest.mark.parametrize(("name", "expected"), [("bfloat16", 55.6), ("float16", 73.7)])
def test_sixteen_bit_floats_on_gaussian_data(name, expected):
    x = DATA["gauss"]
    assert sqnr_db(x, cast_round_trip_(x.clone(), name)) == pytest.approx(expected, abs=0.3)
