"""What every floating-point format promises: its own values stay, all others become the nearest
finite one.
"""

import json
import math

import pytest
import torch

from quantizer.config.forms.types import Dtype
from quantizer.config.model import QuantizationSpec
from quantizer.config.resources import load_resource
from quantizer.numerics.codes import pack, storage_dtype
from quantizer.numerics.formats import cast_round_trip_, storage_of
from quantizer.tables import NUMBER_FORMATS

# Finite values >= 0 of OCP MX v1.0, tables 3 to 6 (E3M2 by exponent: subnormals, then four
# values each).
GRIDS = {
    "fp4": [0, 0.5, 1, 1.5, 2, 3, 4, 6],
    "fp6_e2m3": [k / 8 for k in range(16)]
    + [k / 4 for k in range(8, 16)]
    + [k / 2 for k in range(8, 16)],
    "fp6_e3m2": [k / 16 for k in range(4)]
    + [k / 16 * 2**e for e in range(7) for k in range(4, 8)],
    "mx_int8": [k / 64 for k in range(128)],
    "bfp16": [k / 64 for k in range(128)],
    "mx6": [k / 8 for k in range(16)],
    "mx9": [k / 64 for k in range(128)],
}
# All values, of formats whose values above and below zero differ. Source: ggml's tables
LEVELS = {
    "q4_k": range(16),
    "q5_k": range(32),
    "q6_k": range(-32, 32),
    "iq4_nl": [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
}
# All values of float32 are too many to list
LISTED = [name for name in NUMBER_FORMATS if name != "float32"]


def values_of(name):
    """Every finite value of a format, negative ones too, ascending."""
    if name in LEVELS:
        return torch.tensor([*LEVELS[name]], dtype=torch.float32)
    if name in GRIDS:
        positive = torch.tensor(GRIDS[name])
        return torch.cat([-positive.flip(0), positive[1:]])
    storage = storage_of(NUMBER_FORMATS[name])
    integer = torch.uint8 if storage.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * storage.itemsize), dtype=torch.int32).to(integer)
    values = codes.view(storage).float()
    return values[values.isfinite()].unique()


def test_a_format_that_does_not_fill_its_storage_has_its_values_here():
    for name, row in NUMBER_FORMATS.items():
        storage = storage_of(row)
        fills = storage.is_floating_point and row.bits == 8 * storage.itemsize
        assert fills != (name in GRIDS or name in LEVELS), name


@pytest.mark.parametrize("name", LISTED)
def test_every_finite_value_stays_and_is_stored_exactly(name):
    values, row = values_of(name), NUMBER_FORMATS[name]
    assert torch.equal(cast_round_trip_(values.clone(), name), values)
    assert torch.equal((values * row.factor).to(storage_of(row)).float() / row.factor, values)
    assert values.max() == row.largest
    assert 2.0**row.emax <= row.largest < 2.0 ** (row.emax + 1)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_a_file_holds_a_code_in_as_many_bits_as_the_row_says(name):
    spec = QuantizationSpec(dtype=name)
    codes = torch.zeros(64, dtype=storage_dtype(spec))
    assert 8 * pack(codes, spec).nbytes == 64 * NUMBER_FORMATS[name].bits


def test_files_can_name_every_format():
    spec, form = (
        load_resource("schemas", f"{name}.schema.json")
        for name in ("quantization_spec", "hierarchical")
    )
    assert {*spec["properties"]["dtype"]["enum"]} == {"int", *NUMBER_FORMATS}
    words = set(json.dumps(form).split('"'))
    assert {*NUMBER_FORMATS} - {"mx_int8"} <= words
    assert {dtype.name for dtype in Dtype} >= {*NUMBER_FORMATS} - {"mx_int8"}


@pytest.mark.parametrize(
    ("name", "emax"),
    [
        ("fp4", 2),
        ("fp6_e2m3", 2),
        ("fp6_e3m2", 4),
        ("fp8_e4m3", 8),
        ("fp8_e5m2", 15),
        ("mx_int8", 0),
    ],
)
def test_exponents_of_the_largest_values(name, emax):
    """OCP MX v1.0, section 6.3 and table 1."""
    assert NUMBER_FORMATS[name].emax == emax


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in LISTED]
    + [
        (name, torch.float64)
        for name, row in NUMBER_FORMATS.items()
        if row.mantissa is not None or row.levels
    ],
    ids=str,
)
def test_between_two_values_the_nearer_one_is_taken_and_of_a_tie_every_second(name, dtype):
    values = values_of(name).to(dtype)
    low, high = values[:-1], values[1:]
    middle = (low + high) / 2
    # In float32 the middle of two bfloat16 subnormals is none
    exact = (middle - low == high - middle) & (middle > low)
    for toward, nearest in ((low, low), (high, high)):
        beside = torch.nextafter(middle, toward)
        assert torch.equal(cast_round_trip_(beside[exact].clone(), name), nearest[exact])
    even = torch.arange(len(values)) % 2 == int(torch.argmin(values.abs())) % 2
    if name == "iq4_nl":
        # Its levels are no neighbouring numbers: the lower one is taken
        even[:] = True
    expected = torch.where(even[:-1], low, high)
    assert torch.equal(cast_round_trip_(middle[exact].clone(), name), expected[exact])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_the_rounding_is_that_of_torch(name):
    row = NUMBER_FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=generator) * 10.0 ** (
        torch.rand(100_000, generator=generator) * 12 - 9
    )
    expected = x.clamp(-row.largest, row.largest).to(storage_of(row)).float()
    assert torch.equal(cast_round_trip_(x, name), expected)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_beyond_the_largest_value_it_saturates(name):
    largest = NUMBER_FORMATS[name].largest
    least = min(LEVELS.get(name, [-largest]))
    x = torch.tensor([math.inf, -math.inf, 1e300, -1e300, 2 * largest], dtype=torch.float64)
    assert cast_round_trip_(x, name).tolist() == [largest, least, largest, least, largest]


@pytest.mark.parametrize("name", NUMBER_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_works_in_place_for_every_dtype_and_twice_changes_nothing(name, dtype):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = cast_round_trip_(x, name)
    assert once.data_ptr() == x.data_ptr()
    assert once.dtype == dtype
    assert torch.equal(cast_round_trip_(once.clone(), name), once)


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_not_a_number_stays(name):
    assert cast_round_trip_(torch.tensor([math.nan]), name).isnan().all()


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(ValueError, match='did you mean "bfloat16"'):
        cast_round_trip_(torch.zeros(1), "bfloat")
