"""What every floating-point format promises: its own values stay, all others become the nearest finite one."""

import math

import pytest
import torch

from quantizer.numerics.formats import FLOAT_FORMATS, cast_round_trip_

EIGHT_AND_SIXTEEN_BITS = [name for name, row in FLOAT_FORMATS.items() if row.storage.itemsize <= 2]


@pytest.mark.parametrize("name", EIGHT_AND_SIXTEEN_BITS)
def test_every_finite_code_stays(name):
    storage = FLOAT_FORMATS[name].storage
    integer = torch.uint8 if storage.itemsize == 1 else torch.int16
    codes = torch.arange(2 ** (8 * storage.itemsize), dtype=torch.int32).to(integer)
    values = codes.view(storage).float()
    values = values[values.isfinite()]
    assert torch.equal(cast_round_trip_(values.clone(), name), values)
    assert values.max() == FLOAT_FORMATS[name].largest


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_beyond_the_largest_value_it_saturates(name):
    largest = FLOAT_FORMATS[name].largest
    x = torch.tensor([math.inf, -math.inf, 1e300, -1e300, 2 * largest], dtype=torch.float64)
    assert cast_round_trip_(x, name).tolist() == [largest, -largest, largest, -largest, largest]


@pytest.mark.parametrize("name", FLOAT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_works_in_place_for_every_dtype_and_twice_changes_nothing(name, dtype):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = cast_round_trip_(x, name)
    assert once.data_ptr() == x.data_ptr()
    assert once.dtype == dtype
    assert torch.equal(cast_round_trip_(once.clone(), name), once)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_not_a_number_stays(name):
    assert cast_round_trip_(torch.tensor([math.nan]), name).isnan().all()


def test_an_unknown_name_is_answered_with_the_closest():
    with pytest.raises(ValueError, match='did you mean "bfloat16"'):
        cast_round_trip_(torch.zeros(1), "bfloat")
