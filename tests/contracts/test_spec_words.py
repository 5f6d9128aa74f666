"""The words of a `QuantizationSpec` are those that can be carried out: types, registries and
schema agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args, get_type_hints

import pytest

from quantizer.config.forms.types import DeviceType, QSchemeType, RoundType, ScaleType
from quantizer.config.model import CAST_ONLY, POOLED, Device, QuantizationSpec, Role
from quantizer.config.resources import load_resource
from quantizer.numerics.formats import SCALE_MODES, SHARED_EXPONENTS, SYMMETRIC_SCALES
from quantizer.numerics.rounding import ROUND_MODES
from quantizer.observers.methods import BATCH_STATISTICS
from quantizer.tables import NUMBER_FORMATS, RANGE_METHODS

WORDS = get_type_hints(QuantizationSpec)
SCHEMA = load_resource("schemas", "quantization_spec.schema.json")["properties"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("method", RANGE_METHODS),
        ("round_mode", ROUND_MODES),
        ("round_mode", [member.value for member in RoundType]),
        ("statistic", [*BATCH_STATISTICS, POOLED]),
        ("scale_mode", SCALE_MODES),
        ("symmetric_scale", SYMMETRIC_SCALES),
        (
            "scale_type",
            [*(member.value for member in ScaleType), "e4m3", "superblock", *SHARED_EXPONENTS],
        ),
        ("qscheme", [member.value for member in QSchemeType]),
    ],
)
def test_each_word_of_a_spec_is_known_where_it_is_carried_out(
    name: str, known: Iterable[str]
) -> None:
    assert set(get_args(WORDS[name])) == set(known) == set(SCHEMA[name]["enum"])


def test_devices_and_roles_are_those_of_the_rules() -> None:
    assert set(get_args(Device)) == {"DPU", *(member.value for member in DeviceType)}
    assert set(get_args(Device)) == set(SCHEMA["target_device"]["enum"])
    assert set(get_args(Role)) == set(SCHEMA["tensor"]["enum"])


def test_a_dtype_may_be_registered_at_run_time_so_only_those_that_are_shipped_are_listed() -> (
    None
):
    assert WORDS["dtype"] is str
    assert set(SCHEMA["dtype"]["enum"]) == {"int", *NUMBER_FORMATS}
    assert set(NUMBER_FORMATS) >= CAST_ONLY
