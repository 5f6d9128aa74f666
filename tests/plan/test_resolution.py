"""From a config file and a graph to the spec of each tensor, with the place every value came
from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configs import config, document, layer
from support.toys import traced

from quantizer.config.diagnostics import Diagnostic, Place, Sourced
from quantizer.config.model import (
    ConfigRule,
    QuantizationSpec,
    ResolvedConfig,
    Selector,
    Settings,
)
from quantizer.graph.passes import run_passes
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

ROOT = "Residual::Residual/"
STEM = ROOT + "Conv2d[conv1]/conv2d"
RELU = ROOT + "relu"
FC = ROOT + "Linear[fc]/linear"
BLOCK = ROOT + "Sequential[layer1]/Block[0]/"
CONV1, CONV2, ADD = (
    BLOCK + "Conv2d[conv1]/conv2d",
    BLOCK + "Conv2d[conv2]/conv2d",
    BLOCK + "add",
)
OUT = "ReLU[relu]/relu.1"
ALL = ["input", "weights", "bias", "activation"]


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """Plans a toy with a config made of layer entries and changes."""

    def make(*layers: dict[str, Any], toy: str = "residual", **changes: Any) -> Plan:
        found = config(tmp_path, document(*layers, **changes))
        return resolve_plan(found, run_passes(traced(toy), found.settings), traced(toy))

    return make


def spec(plan: Plan, name: str, role: str) -> QuantizationSpec:
    return plan.tensors[name, role].spec


def codes(plan: Plan) -> list[str]:
    return [found.code for found in plan.diagnostics]


def only(plan: Plan, code: str) -> Diagnostic:
    (found,) = [found for found in plan.diagnostics if found.code == code]
    return found


def test_everything_is_planned_without_layer_entries(planned: Any) -> None:
    plan = planned()
    assert plan.diagnostics == ()
    assert set(plan.of_layer(STEM)) == {"weights", "bias"}
    assert set(plan.of_layer(RELU)) == {"activation"}
    assert set(plan.of_layer(FC)) == {"weights", "bias", "activation"}
    assert set(plan.of_layer("Residual::input_0")) == {"input"}
    assert plan.floats[STEM] == f"quantized at {RELU}"


def test_a_type_entry_reaches_the_relu_its_convolution_is_quantized_after(planned: Any) -> None:
    plan = planned(layer(type="Conv2d", tensor={"activation": {"bit_width": 6}}))
    assert spec(plan, RELU, "activation").bit_width == 6
    assert spec(plan, FC, "activation").bit_width == 8
    assert plan.tensors[RELU, "activation"].members == (STEM, RELU)


@pytest.mark.parametrize(
    ("toy", "point"),
    [
        ("mobile", "Mobile::Mobile/ReLU6[act]/relu6"),
        ("functional", "Functional::Functional/relu6"),
    ],
)
def test_a_type_entry_reaches_the_relu6_too(planned: Any, toy: str, point: str) -> None:
    plan = planned(layer(type="Conv2d", tensor={"activation": {"bit_width": 6}}), toy=toy)
    assert spec(plan, point, "activation").bit_width == 6


def test_the_stronger_selector_wins_whatever_the_order(planned: Any) -> None:
    entries = [
        layer(STEM, bit_width=3),
        layer("conv1", bit_width=4),
        layer("con?1", bit_width=5),
        layer(type="Conv2d", bit_width=6),
    ]
    for last in range(len(entries)):
        plan = planned(*entries[last:])
        assert spec(plan, STEM, "weights").bit_width == 3 + last
        assert spec(plan, STEM, "weights") == spec(
            planned(*reversed(entries[last:])), STEM, "weights"
        )
        assert spec(plan, CONV1, "weights").bit_width == 6
        assert spec(plan, FC, "weights").bit_width == 8


def test_the_later_of_two_equal_selectors_wins_and_says_so(planned: Any) -> None:
    plan = planned(layer("layer1.0.conv1", bit_width=4), layer("layer1.0", bit_width=5))
    assert spec(plan, CONV1, "weights").bit_width == 5
    found = only(plan, "QZ403")
    assert found.severity == "warning"
    assert found.message == (
        "layer_quantize_config[1] overrides layer_quantize_config[0]: both select by path"
    )


def test_tensor_blocks_and_fields_are_inherited_one_by_one(planned: Any) -> None:
    entry = layer(
        type="Conv2d",
        tensor={"weights": {"per_channel": True}, "activation": {"round_mode": "half_up"}},
    )
    plan = planned(
        entry,
        tensor={
            "activation": {"percentage": 99.5, "method": "percentile"},
            "bias": {"bit_width": 16},
        },
    )
    weights, activation = spec(plan, STEM, "weights"), spec(plan, RELU, "activation")
    assert (weights.qscheme, weights.ch_axis, weights.round_mode) == (
        "per_channel",
        0,
        "half_even",
    )
    # The entry's own complete block sets method again; it does not mention percentage.
    assert (activation.round_mode, activation.method, activation.percentage) == (
        "half_up",
        "maxmin",
        99.5,
    )
    assert (spec(plan, FC, "activation").method, spec(plan, FC, "activation").percentage) == (
        "percentile",
        99.5,
    )
    assert (spec(plan, FC, "bias").bit_width, spec(plan, STEM, "bias").bit_width) == (16, 8)


def test_every_value_has_its_place(planned: Any, tmp_path: Path) -> None:
    plan = planned(layer(type="Conv2d", tensor={"weights": {"narrow_range": True}}))
    lines = (tmp_path / "config.json").read_text("utf-8").splitlines()
    origins = plan.tensors[STEM, "weights"].origins
    file, line, column = origins["narrow_range"].rsplit(":", 2)
    assert lines[int(line) - 1].strip() == '"narrow_range": true'
    assert lines[int(line) - 1][int(column) - 1 :].startswith("true")
    assert file.endswith("config.json")
    assert int(origins["bit_width"].rsplit(":", 2)[1]) < int(line)
    assert origins["percentage"] == "default"
    overall = plan.tensors[FC, "weights"].origins["bit_width"]
    assert '"bit_width": 8' in lines[int(overall.rsplit(":", 2)[1]) - 1]


@pytest.mark.parametrize("role", ALL)
def test_roles_that_the_model_does_not_list_stay_float(planned: Any, role: str) -> None:
    plan = planned(quantizable_data_type=[other for other in ALL if other != role])
    assert {found for _, found in plan.tensors} == set(ALL) - {role}


def test_no_role_at_all_is_a_float_network(planned: Any) -> None:
    assert planned(quantizable_data_type=[]).tensors == {}


def test_an_empty_list_leaves_a_layer_float(planned: Any) -> None:
    plan = planned(layer("fc", roles=[]))
    assert plan.of_layer(FC) == {}
    assert plan.floats[FC] == "the config leaves it float"
    assert set(plan.of_layer(STEM)) == {"weights", "bias"}


def test_a_layer_list_wins_over_the_models(planned: Any) -> None:
    plan = planned(layer("fc", roles=["weights"]), quantizable_data_type=["input"])
    assert set(plan.tensors) == {("Residual::input_0", "input"), (FC, "weights")}
    plan = planned(layer(type="Conv2d", roles=["activation"]))
    assert plan.of_layer(CONV1) == {}
    assert set(plan.of_layer(RELU)) == {"activation"}


def test_an_input_of_its_own_only_where_it_differs(planned: Any) -> None:
    same = planned(layer("fc", roles=ALL))
    assert set(same.of_layer(FC)) == {"weights", "bias", "activation"}
    other = planned(layer("fc", roles=ALL, tensor={"input": {"bit_width": 4}}))
    assert spec(other, FC, "input").bit_width == 4
    assert other.tensors[FC, "input"].source.endswith("/flatten")
    assert "QZ405" not in codes(other)


def test_a_word_that_nothing_reads_makes_no_input_of_its_own(planned: Any) -> None:
    entry = layer(
        type="Conv2d", roles=["input", "activation"], tensor={"activation": {"percentage": 99}}
    )
    plan = planned(entry, quantizable_data_type=[])
    assert (f"{BLOCK}ReLU[relu]/relu", "activation") in plan.tensors
    assert (CONV2, "input") not in plan.tensors


def test_an_input_that_keeps_its_producers_scale_through_a_relu(planned: Any) -> None:
    plan = planned(layer("layer1.0.conv1", roles=ALL))
    assert "input" not in plan.of_layer(CONV1)


def test_first_and_last_layers_can_be_kept_float(planned: Any) -> None:
    plan = planned(keep_first_last_layer_accuracy=True)
    for name in (STEM, RELU, FC, "Residual::input_0"):
        assert plan.of_layer(name) == {}
        assert plan.floats[name]
    assert set(plan.of_layer(CONV1)) == {"weights", "bias"}


def test_a_layer_that_is_kept_float_has_no_input_of_its_own_for_a_join(planned: Any) -> None:
    last = next(node.name for node in reversed(traced("branches").nodes) if node.op == "conv2d")
    assert (last, "input") in planned(toy="branches").tensors
    plan = planned(toy="branches", keep_first_last_layer_accuracy=True)
    assert plan.of_layer(last) == {}


def test_add_layers_can_be_kept_float(planned: Any) -> None:
    plan = planned(keep_add_layer_accuracy=True)
    kept = [name for name, reason in plan.floats.items() if reason == "keep_add_layer_accuracy"]
    assert kept == [
        f"{ROOT}Sequential[layer1]/Block[{index}]/{op}"
        for index in (0, 1)
        for op in ("add", OUT)
    ]
    assert len(plan.tensors) == len(planned().tensors) - 2


def test_a_selector_without_a_match_points_at_its_line(planned: Any, tmp_path: Path) -> None:
    found = only(planned(layer("layer1.0.conv7")), "QZ402")
    assert found.severity == "error"
    assert found.message == "layer_name 'layer1.0.conv7' matches no layer"
    assert found.help is not None
    assert "layer1.0.conv1" in found.help
    assert found.place is not None
    line = (tmp_path / "config.json").read_text("utf-8").splitlines()[found.place.line - 1]
    assert line[found.place.column - 1 :].startswith('"layer1.0.conv7"')


def test_a_type_without_a_match_names_the_closest(planned: Any) -> None:
    found = only(planned(layer(type="torch.nn.Conv3d")), "QZ402")
    assert found.help is not None
    assert "torch.nn.Conv2d" in found.help


def test_a_type_that_is_folded_away_is_an_error_that_says_so(planned: Any) -> None:
    found = only(planned(layer(type="BatchNorm2d")), "QZ402")
    assert "folded into the layers before them" in found.message


def test_an_entry_that_may_find_nothing(planned: Any) -> None:
    assert planned(layer("layer1.0.conv7", required=False)).diagnostics == ()


def test_an_old_name_is_a_note(planned: Any) -> None:
    plan = planned(
        layer(ROOT + "Conv2d[conv1]/input.2", tensor={"activation": {"round_mode": "half_up"}})
    )
    assert only(plan, "QZ404").severity == "note"
    assert spec(plan, RELU, "activation").round_mode == "half_up"


def test_an_entry_that_changes_nothing_is_a_warning(planned: Any) -> None:
    found = only(planned(layer(type="torch.flatten")), "QZ405")
    assert found.severity == "warning"
    assert "changes no tensor" in found.message


def test_matches_are_counted(planned: Any) -> None:
    plan = planned(layer(type="Conv2d"), layer("fc", roles=["weights"]))
    assert [(rule.label, len(rule.layers), rule.took_effect) for rule in plan.rules[2:]] == [
        ("layer_quantize_config[0]", 5, 15),
        ("layer_quantize_config[1]", 1, 3),  # sets one, leaves two float
    ]


def rule(text: str, line: int, **fields: Any) -> ConfigRule:
    """A partial rule about activations, each field on a line of its own."""
    places = {name: Place("net.json", line + at, 7) for at, name in enumerate(fields)}
    values = {name: Sourced(value, places[name]) for name, value in fields.items()}
    return ConfigRule(Selector("name", text), f"rule at {line}", fields={"activation": values})


def test_a_conflict_that_only_merging_shows_points_at_both_lines() -> None:
    partial = ResolvedConfig(
        Settings(), (rule("layer1.*", 10, symmetric=False), rule("layer1.0", 20, method="mse"))
    )
    plan = resolve_plan(
        partial, run_passes(traced("residual"), partial.settings), traced("residual")
    )
    found = only(plan, "QZ302")  # told once, though several tensors have it
    assert found.severity == "error"
    assert found.place is not None
    assert {found.place.line, *(place.line for place, _ in found.related)} == {10, 20}
    assert "activation of" in found.message


def test_integer_values_under_an_inherited_floating_point_datatype_are_an_error(
    planned: Any,
) -> None:
    plan = planned(
        layer(type="Conv2d", datatype="bfloat16"), layer("layer1.0.conv1", bit_width=4)
    )
    found = only(plan, "QZ306")
    assert found.severity == "error"
    assert "the datatype is bfloat16" in found.message
    assert [remark for _, remark in found.related] == ["inherited from here"]
    plan = planned(
        layer(type="Conv2d", datatype="bfloat16"),
        layer("layer1.0.conv1", bit_width=4, datatype="int"),
    )
    assert "QZ306" not in codes(plan)
    assert spec(plan, CONV1, "weights").bit_width == 4


def test_a_depthwise_convolution_is_a_convolution(planned: Any) -> None:
    plan = planned(
        layer(type="Conv2d", tensor={"weights": {"per_channel": True}}), toy="mobile"
    )
    found = plan.tensors["Mobile::Mobile/Conv2d[dw]/conv2d", "weights"]
    assert (found.spec.ch_axis, found.scales) == (0, 4)


def test_the_channels_of_a_transposed_convolution_are_on_axis_one(planned: Any) -> None:
    plan = planned(overall={"per_channel": True}, toy="transposed")
    axes = {name.rpartition("/")[2]: (t.spec.ch_axis, t.scales) for (name, role), t in plan.tensors.items()
            if role == "weights"}  # fmt: skip
    assert axes == {"conv_transpose2d": (1, 6), "conv1d": (0, 4), "conv3d": (0, 2)}, (
        "two groups have three each"
    )
    assert {t.spec.qscheme for (_, role), t in plan.tensors.items() if role != "weights"} == {
        "per_tensor"
    }


@pytest.mark.parametrize("datatype", ["float16", "bfloat16"])
def test_floating_point_formats_are_planned_and_float32_is_left_alone(
    planned: Any, datatype: str
) -> None:
    plan = planned(tensor={"weights": {"datatype": datatype}, "bias": {"datatype": "float32"}})
    assert spec(plan, STEM, "weights").dtype == datatype
    assert "bias" not in plan.of_layer(STEM)
    assert spec(plan, RELU, "activation").dtype == "int"


def test_an_entry_whose_datatype_is_float32_leaves_its_layer_float_and_takes_effect(
    planned: Any,
) -> None:
    plan = planned(layer("fc", datatype="float32"))
    assert plan.of_layer(FC) == {}
    assert "QZ405" not in codes(plan)


def test_the_plan_prints_as_json(planned: Any) -> None:
    content = planned(layer("fc", roles=[])).to_json()
    assert content["layers"][0]["name"] == "Residual::input_0"
    last = content["layers"][-1]
    assert (last["name"], last["activation_is_float"]) == (FC, "the config leaves it float")
    assert content["rules"][2] == {
        "rule": "layer_quantize_config[0]",
        "selector": "fc",
        "place": content["rules"][2]["place"],
        "layers": [FC],
        "tensors_set": 3,
    }
