"""What a level of the hierarchical form inherits and what it does not; where conflicts between
levels are told.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.toys import traced

from quantizer.config.document.document import Text
from quantizer.config.document.read import parse_document
from quantizer.config.load import LoadResult, check_document
from quantizer.config.model import QuantizationSpec
from quantizer.graph.passes import run_passes
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

FC = "Residual::Residual/Linear[fc]/linear"
GROUPS = {"dtype": "int4", "qscheme": "per_group", "group_size": 2}
MSE = {"dtype": "int8", "observer_cls": "PerTensorMSEObserver"}
ASYMMETRIC = {"dtype": "int8", "symmetric": False}
MX = {"dtype": "mx", "mx_element_dtype": "fp4", "ch_axis": 1}
ALONG = {**GROUPS, "observer_cls": "PerGroupMinMaxObserver"}
CHANNELS = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}


def check(
    everywhere: dict[str, Any], fc: dict[str, Any], linear: dict[str, Any] | None = None
) -> LoadResult:
    """A file whose lines are: 2 the global weight, 3 that of the type, 4 that of the layer."""
    types = {"Linear": {"weight": linear}} if linear else {}
    text = f"""{{
"global_quant_config": {{"weight": {json.dumps(everywhere)}}},
"layer_type_quant_config": {json.dumps(types)},
"layer_quant_config": {{"fc": {{"weight": {json.dumps(fc)}}}}}
}}"""
    return check_document(parse_document(Text("net.json", text)))


def plan(result: LoadResult) -> Plan:
    config = result.require()
    return resolve_plan(
        config, run_passes(traced("residual"), config.settings), traced("residual")
    )


def weights(
    everywhere: dict[str, Any], fc: dict[str, Any], linear: dict[str, Any] | None = None
) -> QuantizationSpec:
    found = plan(check(everywhere, fc, linear))
    assert [f for f in found.diagnostics if f.severity == "error"] == []
    return found.tensors[FC, "weights"].spec


@pytest.mark.parametrize(
    ("everywhere", "fc", "code", "related"),
    [
        ({**ALONG, "ch_axis": 1}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "QZ117", [2]),
        (MSE, ASYMMETRIC, "QZ302", [2]),
        (ASYMMETRIC, MSE, "QZ302", [2]),
        ({"dtype": "fp8_e4m3"}, {"dtype": "fp8_e5m2", "symmetric": False}, "QZ311", []),
        ({"dtype": "int8"}, {"dtype": "fp8_e5m2", "round_method": "half_up"}, "QZ312", []),
        (CHANNELS, {"dtype": "int8", "qscheme": "per_group"}, "QZ316", []),
        ({"dtype": "int8", "qscheme": "per_tensor"}, MX, "QZ319", [2]),
        (MSE, {"dtype": "bfp16", "ch_axis": 1}, "QZ117", [2]),
    ],
)
def test_a_conflict_is_told_at_the_level_where_it_arises(
    everywhere: dict[str, Any], fc: dict[str, Any], code: str, related: list[int]
) -> None:
    errors = [found for found in check(everywhere, fc).diagnostics if found.severity == "error"]
    assert [(found.code, found.place and found.place.line) for found in errors] == [(code, 4)]
    assert [place.line for place, _ in errors[0].related if place.line != 4] == related


def test_a_conflict_of_the_wider_level_is_told_there_alone() -> None:
    errors = check({**MSE, **ASYMMETRIC}, {"dtype": "int4"})
    assert [(found.code, found.place and found.place.line) for found in errors.diagnostics] == [
        ("QZ302", 2)
    ]


def test_a_conflict_of_name_and_type_is_told_at_the_name() -> None:
    result = check({"dtype": "int8"}, ASYMMETRIC, MSE)
    [error] = [found for found in plan(result).diagnostics if found.severity == "error"]
    assert (error.code, error.place and error.place.line) == ("QZ302", 4)
    assert [place.line for place, _ in error.related] == [3]


INTEGER = {"dtype": "uint4", "symmetric": False, "round_method": "half_up"}


@pytest.mark.parametrize("between", [None, INTEGER])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp4", "float16"])
def test_words_about_integers_are_not_inherited_by_floating_point(
    dtype: str, between: dict[str, Any] | None
) -> None:
    assert weights(
        INTEGER if between is None else {"dtype": "int8"}, {"dtype": dtype}, between
    ) == QuantizationSpec(dtype=dtype)


def test_words_about_floating_point_are_not_inherited_by_integers() -> None:
    blocks = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "ch_axis": 1,
        "group_size": 2,
        "scale_format": "e8m0",
    }
    found = weights({**blocks, "symmetric": True}, {"dtype": "uint8"})
    assert found == QuantizationSpec(
        signed=False,
        symmetric=False,
        qscheme="per_group",
        ch_axis=1,
        group_size=2,
        method="maxmin",
    )


def test_integers_inherit_from_integers_across_a_level_in_floating_point() -> None:
    found = weights(INTEGER, {"dtype": "int8"}, {"dtype": "fp8_e4m3"})
    assert (found.symmetric, found.signed, found.round_mode) == (False, False, "half_up")


def test_a_placeholder_is_not_inherited_by_a_format_with_a_scale() -> None:
    found = weights(
        {"dtype": "bfloat16", "observer_cls": "PlaceholderObserver"}, {"dtype": "int8"}
    )
    assert found == QuantizationSpec()


@pytest.mark.parametrize(
    ("everywhere", "fc", "linear", "qscheme", "axis"),
    [
        (
            {**ALONG, "ch_axis": 1},
            {"dtype": "int8", "observer_cls": "PerChannelMinMaxObserver"},
            None,
            "per_group",
            1,
        ),
        (
            {**ALONG, "ch_axis": 0},
            {"dtype": "int8", "observer_cls": "PerChannelMinMaxObserver"},
            None,
            "per_group",
            0,
        ),
        (
            {**GROUPS, "observer_cls": "PerChannelMinMaxObserver", "ch_axis": 0},
            {"dtype": "int8", "observer_cls": "PerGroupMinMaxObserver"},
            None,
            "per_group",
            1,
        ),
        (CHANNELS, GROUPS, None, "per_group", 1),
        (
            {**GROUPS, "ch_axis": 1},
            {"dtype": "int8", "qscheme": "per_channel"},
            None,
            "per_channel",
            0,
        ),
        (
            {**GROUPS, "ch_axis": -1},
            {"dtype": "int8", "qscheme": "per_channel"},
            None,
            "per_channel",
            0,
        ),
        (
            CHANNELS,
            {"dtype": "int8", "qscheme": "per_channel"},
            {**GROUPS, "ch_axis": 1},
            "per_channel",
            0,
        ),
        (
            {"dtype": "int8", "ch_axis": 1},
            {"dtype": "int8", "qscheme": "per_channel"},
            None,
            "per_channel",
            1,
        ),
        (CHANNELS, {"dtype": "int8", "ch_axis": 1}, None, "per_channel", 1),
    ],
)
def test_an_inherited_axis_stays_the_axis_that_was_meant(
    everywhere: dict[str, Any],
    fc: dict[str, Any],
    linear: dict[str, Any] | None,
    qscheme: str,
    axis: int,
) -> None:
    config = check(everywhere, fc, linear).require()
    graph = run_passes(traced("residual"), config.settings)
    fitting = resolve_plan(config, graph, traced("residual")).tensors[FC, "weights"].spec
    assert (fitting.qscheme, fitting.ch_axis) == (qscheme, axis)


def test_the_channel_axis_is_told_where_it_is_stated() -> None:
    stated = check(
        {**GROUPS, "observer_cls": "PerChannelMinMaxObserver", "ch_axis": 0}, {"dtype": "int8"}
    )
    assert [(found.code, found.place and found.place.line) for found in stated.diagnostics] == [
        ("QZ122", 2)
    ]
    inherited = check(
        {**ALONG, "ch_axis": 1}, {"dtype": "int8", "observer_cls": "PerChannelMinMaxObserver"}
    )
    assert inherited.diagnostics == ()
