"""Other widths for single layers, written into a document."""

from __future__ import annotations

import pytest

from quantizer.config.forms.level_edits import with_layer_entries
from quantizer.config.model import QuantizationSpec, SymmetricScale

GLOBAL = {"weight": {"dtype": "int8"}}


def test_a_null_weight_gets_the_width() -> None:
    document = {
        "global_quant_config": GLOBAL,
        "layer_quant_config": {"fc": {"weight": None, "bias": None}},
    }
    changed = with_layer_entries(
        document,
        {"fc": {"weights": QuantizationSpec(bit_width=4, symmetric_scale="half_range")}},
    )
    assert changed["layer_quant_config"] == {
        "fc": {"weight": {"dtype": "int4", "symmetric": True}, "bias": None}
    }


@pytest.mark.parametrize("rule", ["quant_max", "half_range"])
def test_the_rule_for_symmetric_scales_is_the_specs_whatever_the_file_says_elsewhere(
    rule: SymmetricScale,
) -> None:
    document = {"overall_quantize_config": {"bit_width": 8, "symmetric_scale": "half_range"}}
    changed = with_layer_entries(
        document, {"fc": {"weights": QuantizationSpec(bit_width=4, symmetric_scale=rule)}}
    )
    [entry] = changed["layer_quantize_config"]
    blocks = entry["overall_quantize_config"] | entry["tensor_quantize_config"].get(
        "weights", {}
    )
    assert blocks["symmetric_scale"] == rule
    hierarchical = with_layer_entries(
        {"global_quant_config": GLOBAL},
        {"fc": {"weights": QuantizationSpec(symmetric_scale=rule)}},
    )
    stated = hierarchical["layer_quant_config"]["fc"]["weight"].get(
        "symmetric_scale", "quant_max"
    )
    assert stated == rule


def test_a_comment_that_names_a_key_states_nothing() -> None:
    comment = {"//": "symmetric_scale has its default"}
    blocks = {"overall_quantize_config": {"bit_width": 8}}
    changed = with_layer_entries(
        {**comment, **blocks}, {"fc": {"weights": QuantizationSpec(bit_width=4)}}
    )
    [entry] = changed["layer_quantize_config"]
    assert "symmetric_scale" not in entry["overall_quantize_config"]
    assert entry["tensor_quantize_config"] == {}


def test_nothing_to_change_changes_nothing() -> None:
    assert with_layer_entries({"global_quant_config": GLOBAL}, {}) == {
        "global_quant_config": GLOBAL
    }
