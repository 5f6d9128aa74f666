"""What a config says once it is loaded: settings, rules in the file's order, and where each
value stands.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quantizer.config.diagnostics import ConfigError, Sourced
from quantizer.config.document.document import Text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.layered import FIELDS
from quantizer.config.load import check_document, default_config, load_config
from quantizer.config.model import ROLES, QuantizationSpec, ResolvedConfig, Settings

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLE = json.loads((CONFIGS / "example.json").read_text("utf-8"))


def load(value: dict[str, Any]) -> ResolvedConfig:
    return check_document(parse_document(Text("net.json", json.dumps(value)))).require()


def plain(fields: Any) -> dict[str, Any]:
    return {name: sourced.value for name, sourced in fields.items()}


def test_documented_example_becomes_four_rules_in_order() -> None:
    config = load_config(CONFIGS / "example.json").require()
    assert [rule.label for rule in config.rules] == [
        "overall_quantize_config",
        "tensor_quantize_config",
        "layer_quantize_config[0]",
        "layer_quantize_config[1]",
    ]
    overall, tensor, conv, conv1 = config.rules
    assert overall.roles == set(ROLES)
    assert plain(overall.fields["bias"]) == {
        "bit_width": 8,
        "method": "maxmin",
        "round_mode": "half_even",
        "symmetric": True,
        "qscheme": "per_tensor",
        "signed": True,
        "narrow_range": False,
        "scale_type": "float",
        "statistic": "max",
    }
    assert {role: plain(fields) for role, fields in tensor.fields.items()} == {
        "activation": {"method": "mse"}
    }
    assert (conv.selector.kind, conv.selector.text) == ("type", "torch.nn.Conv2d")
    assert conv.roles == {"weights", "bias", "activation"}
    assert conv.fields["weights"]["qscheme"].value == "per_channel"
    assert conv.fields["activation"]["method"].value == "entropy"
    assert (conv1.selector.kind, conv1.selector.text) == (
        "name",
        "ResNet::ResNet/Conv2d[conv1]/input.2",
    )
    assert conv1.fields["activation"]["round_mode"].value == "half_up"
    assert conv1.fields["weights"]["qscheme"].value == "per_tensor"


def test_every_value_knows_its_line() -> None:
    config = load_config(CONFIGS / "example.json").require()
    lines = (CONFIGS / "example.json").read_text("utf-8").splitlines()
    words = {field: word for word, field in FIELDS.items()}
    for rule in config.rules:
        for fields in rule.fields.values():
            for field, sourced in fields.items():
                assert sourced.place is not None
                assert lines[sourced.place.line - 1].strip().startswith(f'"{words[field]}"')
                assert (
                    sourced.origin
                    == f"{CONFIGS / 'example.json'}:{sourced.place.line}:{sourced.place.column}"
                )
    assert (
        lines[config.settings.places["target_device"].line - 1].strip()
        == '"target_device": "CPU",'
    )


def test_built_in_default_is_the_documented_table() -> None:
    config = default_config()
    overall, tensor = config.rules
    spec = QuantizationSpec(
        **plain({**overall.fields["activation"], **tensor.fields["activation"]})
    )
    assert spec == QuantizationSpec(
        method="diffs",
        round_mode="half_up",
        scale_type="poweroftwo",
        statistic="modal",
        narrow_range=False,
    )
    assert overall.fields["weights"]["round_mode"] == Sourced("std_round")
    assert overall.fields["weights"]["round_mode"].origin == "default"
    assert config.settings == Settings(
        include_cle=True, include_bias_corr=True, target_device="DPU"
    )


def test_integral_floats_become_integers() -> None:
    overall = {**EXAMPLE["overall_quantize_config"], "bit_width": 4.0, "percentage": 99}
    fields = load({**EXAMPLE, "overall_quantize_config": overall}).rules[0].fields["weights"]
    assert [type(fields[name].value) for name in ("bit_width", "percentage")] == [int, float]


def test_overall_per_channel_reaches_the_weights_only() -> None:
    overall = {**EXAMPLE["overall_quantize_config"], "per_channel": True}
    fields = load({**EXAMPLE, "overall_quantize_config": overall}).rules[0].fields
    assert [role for role in ROLES if "qscheme" in fields[role]] == ["weights"]


def test_an_entry_says_nothing_about_roles_it_does_not_list() -> None:
    entry = {**EXAMPLE["layer_quantize_config"][0], "quantizable_data_type": ["weights"]}
    entry["tensor_quantize_config"] = {}
    rule = load({**EXAMPLE, "layer_quantize_config": [{**entry, "required": False}]}).rules[2]
    assert set(rule.fields) == {"weights"}
    assert rule.selector.required is False


CHANGES = {
    "datatype": "bfloat16",
    "bit_width": 5,
    "method": "percentile",
    "percentage": 98.5,
    "round_mode": "std_round",
    "symmetry": False,
    "per_channel": True,
    "signed": False,
    "narrow_range": True,
    "scale_type": "poweroftwo",
    "symmetric_scale": "half_range",
    "calib_statistic_method": "mean",
}


@pytest.mark.parametrize("word", FIELDS)
def test_every_parameter_changes_the_rules(word: str) -> None:
    base = {
        key: value for key, value in EXAMPLE.items() if not key.endswith("r_quantize_config")
    }
    base["quantizable_data_type"] = (
        ["activation"] if word == "signed" else base["quantizable_data_type"]
    )
    changed = {
        **base,
        "overall_quantize_config": {**EXAMPLE["overall_quantize_config"], word: CHANGES[word]},
    }
    fields = load(changed).rules[0].fields["weights"]
    before = load(base).rules[0].fields["weights"]
    assert fields[FIELDS[word]].value != before.get(FIELDS[word], Sourced(None)).value


@pytest.mark.parametrize(
    "field", [field for field in dataclasses.fields(Settings) if field.name != "places"]
)
def test_every_setting_is_read_or_reserved(field: dataclasses.Field[Any]) -> None:
    other = {"target_device": "GPU", "onnx_opset_version": 17}.get(field.name, True)
    assert getattr(load({**EXAMPLE, field.name: other}).settings, field.name) == other


def test_a_config_that_cannot_be_used_raises_with_all_findings() -> None:
    result = check_document(parse_document(Text("net.json", '{"target_device": "TPU"}')))
    with pytest.raises(ConfigError) as error:
        result.require()
    assert error.value.exit_code == 2
    assert {found.code for found in error.value.diagnostics} == {"QZ101", "QZ105"}
    assert error.value.message.startswith("net.json:1:1: 7 keys are missing here")


@pytest.mark.parametrize("value", [["int8"], {"x": 1}, True, None, 1e308])
def test_any_value_in_place_of_a_word_is_a_finding(value: Any) -> None:
    """Also where what is missing, or meant, is looked up by it."""
    entry = {
        "layer_type": "Linear",
        "quantizable_data_type": ["weights"],
        "overall_quantize_config": {},
    }
    overall = {**EXAMPLE["overall_quantize_config"], "datatype": value}
    layered = {**EXAMPLE, "overall_quantize_config": overall, "layer_quantize_config": [entry]}
    weight = {"weight": {"dtype": "int8"}}
    for document in (
        layered,
        {**EXAMPLE, "algorithms": [{"name": value}]},
        {"global_quant_config": weight, "algo_config": {"name": value}},
    ):
        assert any(
            found.severity == "error"
            for found in check_document(
                parse_document(Text("net.json", json.dumps(document)))
            ).diagnostics
        )


def test_a_whole_number_may_be_written_with_a_decimal_point() -> None:
    spec = {"dtype": "int8", "qscheme": "per_group", "ch_axis": 1.0, "group_size": 32.0}
    fields = load({"global_quant_config": {"weight": spec}}).rules[1].fields["weights"]
    assert [
        (type(fields[key].value), fields[key].value) for key in ("ch_axis", "group_size")
    ] == [(int, 1), (int, 32)]


@pytest.mark.slow
def test_every_invalid_value_is_reported_though_there_are_many() -> None:
    entries = [
        {**EXAMPLE["layer_quantize_config"][0], "layer_type": f"T{at}", "layer_name": at}
        for at in range(40)
    ]
    document = parse_document(
        Text("net.json", json.dumps({**EXAMPLE, "layer_quantize_config": entries}, indent=1))
    )
    found = check_document(document).diagnostics
    assert len(found) == 40
    assert list(found) == sorted(
        found, key=lambda diagnostic: diagnostic.place or pytest.fail("no place")
    )
