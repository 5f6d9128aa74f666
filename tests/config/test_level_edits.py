"""Single settings are changed at every level that states them, in either form."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from support.configs import document, layer

from quantizer.config.document.document import Document
from quantizer.config.forms.level_edits import (
    group_sizes,
    with_algorithm,
    with_channels,
    with_group_size,
    with_method,
    with_setting,
)
from quantizer.config.load import check_document
from quantizer.config.model import ResolvedConfig
from quantizer.config.resources import load_resource, presets
from quantizer.errors import UsageError

Edit = Callable[[Mapping[str, Any]], dict[str, Any]]
EDITS: dict[str, Edit] = {
    "mse": lambda value: with_method(value, ("input", "activation"), "mse"),
    "percentile": lambda value: with_method(value, ("input", "activation"), "percentile"),
    "weights mse": lambda value: with_method(value, ("weights",), "mse"),
    "channels": with_channels,
    "groups": lambda value: with_group_size(value, 32),
    "bias": lambda value: with_setting(value, "include_bias_corr", "bias correction"),
    "equalization": lambda value: with_algorithm(value, {"name": "cle"}),
    "smoothquant": lambda value: with_algorithm(value, {"name": "smoothquant", "alpha": 0.5}),
    "awq": lambda value: with_algorithm(value, {"name": "awq"}),
    "gptq": lambda value: with_algorithm(value, {"name": "gptq"}),
    "qronos": lambda value: with_algorithm(value, {"name": "qronos"}),
}
INT8 = {"dtype": "int8", "observer_cls": "PerTensorMinMaxObserver", "qscheme": "per_tensor"}
INT4 = {
    "dtype": "int4",
    "observer_cls": "PerGroupMinMaxObserver",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 128,
}


def loaded(value: Mapping[str, Any]) -> ResolvedConfig | None:
    return check_document(Document.of(value, "config")).config


def test_comments_between_entries_are_no_entries() -> None:
    value = {
        "global_quant_config": {"weight": INT8},
        "layer_quant_config": {"// fc": "by its name", "fc": {"weight": INT8}},
    }
    changed = with_method(value, ("weights",), "mse")
    assert changed["layer_quant_config"]["// fc"] == "by its name"
    assert changed["layer_quant_config"]["fc"]["weight"]["observer_cls"] == (
        "PerTensorMSEObserver"
    )


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_of_a_preset_is_valid_or_refused_and_done_once(edit: Edit) -> None:
    changed = 0
    for name in presets():
        before = load_resource("configs", f"{name}.json")
        original = copy.deepcopy(before)
        try:
            after = edit(before)
        except UsageError:
            continue
        assert before == original
        assert edit(after) == after
        assert after["//"] == before["//"]
        changed += after != before
        if loaded(after) is None:
            # Only the device's restrictions, or an algorithm's, may refuse it
            findings = check_document(Document.of(after, name)).diagnostics
            assert {finding.code[:3] for finding in findings} <= {"QZ2", "QZ3", "QZ4"}, findings
    assert changed


def test_all_levels_of_the_layered_form_get_a_method_except_those_in_float() -> None:
    value = document(
        layer("a", method="percentile", tensor={"activation": {"percentage": 99.0}}),
        layer("b", roles=["weights"]),
        layer("c", roles=[]),
        tensor={"activation": {"method": "mse"}},
    )
    changed = with_method(value, ("activation",), "mse")
    first, second, third = changed["layer_quantize_config"]
    assert first["tensor_quantize_config"] == {"activation": {"method": "mse"}}
    assert (second, third) == tuple(value["layer_quantize_config"][1:])
    assert changed["tensor_quantize_config"] == value["tensor_quantize_config"]
    assert loaded(changed) is not None


def test_all_levels_of_the_hierarchical_form_get_a_scale_per_channel() -> None:
    value = {
        "global_quant_config": {"weight": INT8, "input_tensors": {**INT8}},
        "layer_type_quant_config": {"Linear": {"weight": {"dtype": "int4"}}},
        "layer_quant_config": {
            "a": {"weight": {**INT8, "observer_cls": "PerTensorMSEObserver"}},
            "b": {"weight": INT4},
        },
    }
    changed = with_channels(value)
    assert changed["global_quant_config"]["weight"]["qscheme"] == "per_channel"
    assert changed["global_quant_config"]["input_tensors"] == INT8
    assert changed["layer_type_quant_config"] == value["layer_type_quant_config"]
    observer = changed["layer_quant_config"]["a"]["weight"]["observer_cls"]
    assert observer == "PerChannelMinMaxObserver"
    assert changed["layer_quant_config"]["b"] == {"weight": INT4}
    assert loaded(changed) is not None


def test_what_a_form_has_no_word_for_is_refused() -> None:
    value = {"global_quant_config": {"weight": INT4, "input_tensors": INT8}}
    with pytest.raises(UsageError, match="no observer for entropy"):
        with_method(value, ("input",), "entropy")
    with pytest.raises(UsageError, match="no bias correction"):
        with_setting(value, "include_bias_corr", "bias correction")
    assert with_method(value, ("weights",), "group_mse")["global_quant_config"]["weight"] == {
        **INT4,
        "observer_cls": "PerGroupMSEObserver",
    }


def test_groups_get_smaller_only() -> None:
    value = {
        "global_quant_config": {"weight": INT4},
        "layer_quant_config": {"a": {"weight": {**INT4, "group_size": 32}}},
    }
    assert group_sizes(value) == [128, 32]
    assert group_sizes(with_group_size(value, 64)) == [64, 32]
    assert group_sizes(document()) == []


def test_algorithms_keep_their_order_and_exclude_each_other() -> None:
    value: dict[str, Any] = document()
    for name in ("gptq", "awq", "smoothquant", "qronos"):
        value = with_algorithm(value, {"name": name})
    names = [entry["name"] for entry in value["algorithms"]]
    assert names == ["smoothquant", "awq", "qronos"]
    form: dict[str, Any] = {"global_quant_config": {"weight": INT4, "input_tensors": INT8}}
    for name in ("gptq", "awq", "smoothquant"):
        form = with_algorithm(form, {"name": name})
    form = with_algorithm(form, {"name": "cle"})
    assert [entry["name"] for entry in form["pre_quant_opt_config"]] == ["cle", "smoothquant"]
    assert [entry["name"] for entry in form["algo_config"]] == ["awq", "gptq"]
    assert loaded(form) is not None and loaded(value) is not None


def test_a_scale_per_channel_leaves_no_percentage_that_nothing_reads() -> None:
    weight = {**INT8, "observer_cls": "PerTensorPercentileObserver", "percentage": 99.9}
    changed = with_channels({"global_quant_config": {"weight": weight}})
    assert not check_document(Document.of(changed, "config")).diagnostics


def test_groups_with_a_decimal_point_get_smaller() -> None:
    value = {"global_quant_config": {"weight": {**INT4, "group_size": 128.0}}}
    assert loaded(value) is not None
    assert group_sizes(value) == [128]
    whole = {"global_quant_config": {"weight": {**INT4, "group_size": -1}}}
    assert group_sizes(whole) == []
    assert group_sizes(with_group_size(value, 64)) == [64]
