"""What a file of the hierarchical form says once it is loaded. Sentences in docstrings are
those of the form's page.

Source: AMD Quark for PyTorch, "Configuration Description" and the API page of
`quark.torch.quantization.config.config`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document, Text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.form import SPEC_KEYS
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.forms.types import DeviceType, Dtype, QSchemeType, RoundType, ScaleType
from quantizer.config.load import LoadResult, check_document, load_config
from quantizer.config.model import ConfigRule, QuantizationSpec, ResolvedConfig, Settings
from quantizer.config.resources import load_resource
from quantizer.config.roles import ROLE_OF

CONFIGS = Path(__file__).parents[2] / "configs"
INT8 = {"dtype": "int8"}
SCHEMA = load_resource("schemas", "hierarchical.schema.json")
SPEC = SCHEMA["definitions"]["spec"]["properties"]


def check(value: dict[str, Any]) -> LoadResult:
    return check_document(parse_document(Text("net.json", json.dumps(value, indent=1))))


def load(**blocks: Any) -> ResolvedConfig:
    return check(blocks).require()


def codes(**blocks: Any) -> list[str]:
    return [found.code for found in check(blocks).diagnostics]


def rule(config: ResolvedConfig, label: str) -> ConfigRule:
    return next(rule for rule in config.rules if rule.label.startswith(label))


def merged(config: ResolvedConfig, *labels: str, role: Any = "weights") -> QuantizationSpec:
    """The spec where the levels with these labels meet, the narrowest last."""
    fields = {
        name: s.value
        for label in labels
        for name, s in rule(config, label).fields.get(role, {}).items()
    }
    return QuantizationSpec(**fields)


def spec(role: str = "weight", **keys: Any) -> QuantizationSpec:
    config = load(global_quant_config={role: keys})
    return merged(config, "global", role=ROLE_OF[role])


def test_all_but_the_global_config_is_optional_and_empty() -> None:
    """All instances are optional except global_quant_config. Default is an empty dictionary /
    an empty list / None.
    """
    assert SCHEMA["required"] == ["global_quant_config"]
    defaults = {
        key: SCHEMA["properties"][key]["default"]
        for key in SCHEMA["properties"]
        if "quant_config" in key
    }
    assert defaults["layer_type_quant_config"] == defaults["layer_quant_config"] == {}
    assert SCHEMA["properties"]["exclude"]["default"] == []
    assert SCHEMA["properties"]["algo_config"]["default"] is None
    assert SCHEMA["properties"]["pre_quant_opt_config"]["default"] is None
    assert [rule.label for rule in load(global_quant_config={"weight": INT8}).rules] == [
        "default",
        "global_quant_config",
    ]


def test_global_config_reaches_every_layer_with_weights() -> None:
    """Global quantization configuration applied to the entire model unless overridden at the
    layer level.
    """
    config = load(global_quant_config={"weight": INT8, "input_tensors": INT8})
    nothing, everywhere = config.rules
    assert (nothing.selector.kind, nothing.roles) == ("all", frozenset())
    assert (everywhere.selector.kind, everywhere.adds) == ("weighted", {"weights", "input"})
    assert everywhere.roles is None


def test_levels_become_rules_in_order() -> None:
    config = load(
        exclude=["lm_head", "*.gate"],
        layer_quant_config={"*.fc1": {"weight": INT8}, "fc": {"bias": INT8}},
        layer_type_quant_config={"Conv2d": {"output_tensors": INT8}},
        global_quant_config={"weight": INT8},
    )
    assert [(r.label, r.selector.kind, r.selector.text) for r in config.rules[1:]] == [
        ("global_quant_config", "weighted", ""),
        ('layer_type_quant_config["Conv2d"]', "type", "Conv2d"),
        ('layer_quant_config["*.fc1"]', "name", "*.fc1"),
        ('layer_quant_config["fc"]', "name", "fc"),
        ("exclude[0]", "exclude", "lm_head"),
        ("exclude[1]", "exclude", "*.gate"),
    ]
    assert rule(config, "layer_type").adds == {"activation"}
    assert rule(config, "exclude[1]").roles == frozenset()
    assert config.form == "hierarchical"


@pytest.mark.parametrize(("key", "role"), ROLE_OF.items())
def test_each_tensor_of_a_layer_has_its_key(key: str, role: str) -> None:
    """input_tensors, output_tensors, weight, bias: quantization specification of each. Defaults
    to None.
    """
    config = load(global_quant_config={key: INT8})
    assert rule(config, "global").adds == {role}
    assert SCHEMA["definitions"]["level"]["properties"][key]["default"] is None


def test_none_inherits_from_the_wider_level() -> None:
    """If the input_tensors in layer_type_quant_config is None, the configuration from
    global_quant_config will be used instead. If None in global_quant_config, input_tensors are
    not quantized.
    """
    config = load(
        global_quant_config={"input_tensors": INT8, "weight": None},
        layer_type_quant_config={
            "Linear": {"input_tensors": None, "weight": {"dtype": "int4"}}
        },
    )
    linear = rule(config, "layer_type")
    assert linear.adds == {"weights"}
    assert "input" not in linear.fields
    assert rule(config, "global").adds == {"input"}


@pytest.mark.parametrize(
    "null", [{}, {"symmetric": None, "round_method": None, "scale_type": None}]
)
def test_a_key_that_is_none_inherits_too(null: dict[str, None]) -> None:
    """If None, it defers to a higher-level or global setting."""
    wide = {
        "dtype": "int8",
        "symmetric": False,
        "round_method": "half_up",
        "scale_type": "pof2",
    }
    config = load(
        global_quant_config={"weight": wide},
        layer_quant_config={"fc": {"weight": {"dtype": "int4", **null}}},
    )
    narrow = merged(config, "global", 'layer_quant_config["fc"]')
    assert (narrow.bit_width, narrow.symmetric, narrow.round_mode, narrow.scale_type) == (
        4,
        False,
        "half_up",
        "poweroftwo",
    )
    changed = {"dtype", "bit_width", "signed", "symmetric_scale"}
    assert set(rule(config, 'layer_quant_config["fc"]').fields["weights"]) == changed


def test_what_nobody_states_has_defaults() -> None:
    """Default is None: static, MinMax, per tensor, symmetric where codes are signed, half_even,
    a float scale.
    """
    assert all(SPEC[key]["default"] is None for key in SPEC_KEYS)
    assert spec(dtype="int8") == QuantizationSpec()
    assert spec(dtype="uint8") == QuantizationSpec(signed=False, symmetric=False)
    assert load(global_quant_config={"weight": INT8}).settings == Settings(target_device="CPU")


@pytest.mark.parametrize(("device", "word"), [(d.name, d.value) for d in DeviceType])
def test_target_device_is_that_of_the_global_config(device: str, word: str) -> None:
    """target_device: the target device (e.g., CPU, GPU, IPU) for the quantized model."""
    assert (
        load(
            global_quant_config={"weight": INT8, "target_device": device}
        ).settings.target_device
        == word
    )


def test_documented_specs() -> None:
    """The examples per tensor, per channel (should set ch_axis) and per group (should set
    ch_axis and group_size).
    """
    common = {
        "symmetric": True,
        "scale_type": "float",
        "round_method": "half_even",
        "is_dynamic": False,
    }
    per_tensor = {
        "dtype": "int8",
        "qscheme": "per_tensor",
        "observer_cls": "PerTensorMinMaxObserver",
        **common,
    }
    channels = {
        "dtype": "int4",
        "observer_cls": "PerChannelMinMaxObserver",
        "ch_axis": 0,
        **common,
    }
    assert spec(**per_tensor) == QuantizationSpec()
    int4 = QuantizationSpec(bit_width=4, symmetric_scale="half_range")
    assert spec(**channels, qscheme="per_channel") == replace(
        int4, qscheme="per_channel", ch_axis=0
    )
    groups = replace(int4, qscheme="per_group", ch_axis=1, group_size=128)
    assert spec(**channels, qscheme="per_group", group_size=128) == groups


@pytest.mark.parametrize("role", ROLE_OF)
@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({"dtype": "int2"}, "half_range"),
        ({"dtype": "int4", "scale_type": "float"}, "half_range"),
        ({"dtype": "int4", "symmetric_scale": "quant_max"}, "quant_max"),
        ({"dtype": "int4", "symmetric": False}, "quant_max"),
        ({"dtype": "int4", "scale_type": "pof2"}, "quant_max"),
        ({"dtype": "int8"}, "quant_max"),
        ({"dtype": "int8", "symmetric_scale": "half_range"}, "half_range"),
        ({"dtype": "int16"}, "quant_max"),
        ({"dtype": "fp4"}, "quant_max"),
    ],
)
def test_few_bits_divide_by_half_the_range_of_codes(
    role: str, keys: dict[str, Any], rule: str
) -> None:
    """As the public tool does for every width (torch/quantization/utils: amax / ((quant_max -
    quant_min) / 2)).
    """
    assert spec(role, **keys).symmetric_scale == rule


def test_a_stated_rule_for_symmetric_scales_is_inherited() -> None:
    config = load(
        global_quant_config={
            "weight": {"dtype": "int8", "symmetric_scale": "quant_max"},
            "input_tensors": INT8,
        },
        layer_quant_config={
            "a": {"weight": {"dtype": "int4"}, "input_tensors": {"dtype": "int4"}},
            "b": {"weight": {"dtype": "int4", "symmetric_scale": "half_range"}},
        },
    )
    everywhere, a, b = "global", 'layer_quant_config["a"]', 'layer_quant_config["b"]'
    assert merged(config, everywhere, a).symmetric_scale == "quant_max"
    assert merged(config, everywhere, b).symmetric_scale == "half_range"
    assert merged(config, everywhere, a, role="input").symmetric_scale == "half_range"


@pytest.mark.parametrize(
    "other", [{"symmetric": False}, {"scale_type": "pof2"}, {"dtype": "fp4"}]
)
def test_a_rule_for_symmetric_scales_that_nothing_reads_is_reported(
    other: dict[str, Any],
) -> None:
    keys = {"dtype": "int4", "symmetric_scale": "half_range", **other}
    assert codes(global_quant_config={"weight": keys}) == ["QZ111"]


@pytest.mark.parametrize(
    ("observer", "method", "qscheme"),
    [
        ("PerTensorMinMaxObserver", "maxmin", "per_tensor"),
        ("PerChannelMinMaxObserver", "maxmin", "per_channel"),
        ("PerTensorPercentileObserver", "percentile", "per_tensor"),
        ("PerTensorMSEObserver", "mse", "per_tensor"),
    ],
)
def test_observers(observer: str, method: str, qscheme: str) -> None:
    """MinMax (per tensor/channel/group), Percentile and MSE (per tensor); an observer without a
    scheme implies it.
    """
    found = spec(dtype="int8", observer_cls=observer)
    assert (found.method, found.qscheme) == (method, qscheme)
    assert found.statistic == "max"  # there is one batch of a weight


def test_observers_that_count_see_all_batches_of_an_activation_as_one() -> None:
    counting, extremes = "PerTensorPercentileObserver", "PerTensorMinMaxObserver"
    for role in ("input_tensors", "output_tensors"):
        assert spec(role, dtype="int8", observer_cls=counting).statistic == "pooled"
        assert spec(role, dtype="int8", observer_cls=extremes).statistic == "max"
    config = load(
        global_quant_config={
            "input_tensors": {"dtype": "int8", "observer_cls": "PerTensorMSEObserver"}
        },
        layer_quant_config={
            "fc": {"input_tensors": {"dtype": "int4"}},
            "conv": {"input_tensors": {"dtype": "int8", "observer_cls": extremes}},
        },
    )
    fc, conv = (
        merged(config, "global", f'layer_quant_config["{name}"]', role="input")
        for name in ("fc", "conv")
    )
    assert (fc.method, fc.statistic) == ("mse", "pooled")
    assert (conv.method, conv.statistic) == ("maxmin", "max")


def test_percentile_reads_its_percentage() -> None:
    observer = {"dtype": "int8", "observer_cls": "PerTensorPercentileObserver"}
    assert spec(**observer).percentage == 99.99
    assert spec(**observer, percentage=99).percentage == 99.0


INTEGERS = {
    **{f"int{bits}": (bits, True, True) for bits in (2, 3, 4, 8, 16)},
    **{f"uint{bits}": (bits, False, False) for bits in (4, 8, 16)},
}
FLOATS = ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_dtypes(dtype: str) -> None:
    found = spec(dtype=dtype)
    assert (found.bit_width, found.signed, found.symmetric) == INTEGERS[dtype]


def test_32_bits_are_for_biases() -> None:
    """Sums of products of 8-bit codes have 32 bits; a weight or an activation of 32 is
    refused.
    """
    found = spec("bias", dtype="int32")
    assert (found.bit_width, found.signed, found.symmetric) == (32, True, True)
    for role in set(ROLE_OF) - {"bias"}:
        assert codes(global_quant_config={role: {"dtype": "int32"}}) == ["QZ305"]


def test_asymmetric_codes_begin_at_zero_whatever_the_sign_in_the_name() -> None:
    assert spec(dtype="int8", symmetric=False) == spec(dtype="uint8", symmetric=False)
    assert spec(dtype="int8", symmetric=False).quant_min == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_point_dtypes(dtype: str) -> None:
    assert spec(dtype=dtype) == QuantizationSpec(dtype=dtype)


@pytest.mark.parametrize(
    "element", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4", "int8"]
)
def test_mx_is_an_element_format_with_a_shared_exponent(element: str) -> None:
    found = spec(dtype="mx", mx_element_dtype=element, ch_axis=1)
    assert found == QuantizationSpec(
        dtype="mx_int8" if element == "int8" else element,
        scale_type="e8m0",
        qscheme="per_group",
        ch_axis=1,
        group_size=32,
    )
    written = spec(
        dtype="mx",
        mx_element_dtype=element,
        ch_axis=1,
        group_size=16,
        scale_calculation_mode="even",
    )
    assert (written.group_size, written.scale_mode) == (16, "even")


def test_other_block_formats() -> None:
    assert spec(dtype="bfp16", ch_axis=-1) == QuantizationSpec(
        dtype="bfp16",
        scale_type="e8m0",
        scale_mode="even",
        qscheme="per_group",
        ch_axis=-1,
        group_size=8,
    )
    newer = spec(
        dtype="fp4", qscheme="per_group", ch_axis=-1, group_size=32, scale_format="e8m0"
    )
    assert newer == spec(dtype="mx", mx_element_dtype="fp4", ch_axis=-1)


def test_every_word_of_the_enumerations_is_read() -> None:
    """Schema and Python API have the same words."""
    words = {
        "dtype": Dtype,
        "qscheme": QSchemeType,
        "round_method": RoundType,
        "scale_type": ScaleType,
    }
    for key, kind in words.items():
        assert {member.name for member in kind} == {word for word in SPEC[key]["enum"] if word}
    devices = SCHEMA["definitions"]["level"]["properties"]["target_device"]["enum"]
    assert {member.name for member in DeviceType} == {word for word in devices if word}
    for method in RoundType:
        assert spec(dtype="int8", round_method=method.name).round_mode == method.value


@pytest.mark.parametrize("role", ["weight", "bias"])
def test_weights_are_quantized_ahead_of_time(role: str) -> None:
    """Post training dynamic quantization: quantizes the weights ahead of time, activations at
    runtime.
    """
    assert not spec(role, dtype="int8", is_dynamic=True).is_dynamic
    assert spec("input_tensors", dtype="int8", is_dynamic=True).is_dynamic


def test_dynamic_per_channel_of_an_activation_is_per_token() -> None:
    channels = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}
    assert spec("input_tensors", **channels) == QuantizationSpec(
        qscheme="per_token", is_dynamic=True
    )
    assert spec("weight", **channels) == QuantizationSpec(qscheme="per_channel", ch_axis=1)


@pytest.mark.parametrize(("axis", "along"), [(0, 1), (1, 0)])
def test_groups_of_a_channel_run_along_the_other_axis(axis: int, along: int) -> None:
    groups = {"dtype": "int4", "qscheme": "per_group", "group_size": 32}
    assert (
        spec(**groups, ch_axis=axis, observer_cls="PerChannelMinMaxObserver").ch_axis == along
    )
    assert spec(**groups, ch_axis=axis, observer_cls="PerGroupMinMaxObserver").ch_axis == axis
    assert spec(**groups, ch_axis=-1).ch_axis == -1


def test_a_layer_with_another_format_leaves_nothing_of_the_wider_one() -> None:
    blocks = {"dtype": "mx", "mx_element_dtype": "fp4", "ch_axis": 1}
    config = load(
        global_quant_config={"weight": blocks},
        layer_quant_config={"fc": {"weight": INT8}, "head": {"weight": {"dtype": "bfp16"}}},
    )
    assert merged(config, "global", 'layer_quant_config["fc"]') == QuantizationSpec()
    assert merged(config, "global", 'layer_quant_config["head"]') == spec(
        dtype="bfp16", ch_axis=1
    )
    config = load(
        global_quant_config={"weight": {**INT8, "symmetric": False}},
        layer_quant_config={
            "fc": {"weight": {"dtype": "bfloat16"}},
            "head": {"weight": {"dtype": "uint4"}},
        },
    )
    assert merged(config, "global", 'layer_quant_config["fc"]') == QuantizationSpec(
        dtype="bfloat16"
    )
    assert merged(config, "global", 'layer_quant_config["head"]').symmetric is False


def test_every_value_knows_its_key() -> None:
    path = CONFIGS / "weight_int4_group.json"
    lines = path.read_text("utf-8").splitlines()
    keys = {
        "bit_width": "dtype",
        "signed": "dtype",
        "symmetric_scale": "dtype",
        "round_mode": "round_method",
        "method": "observer_cls",
    }
    fields = rule(load_config(path).require(), "global").fields["weights"]
    assert len(fields) == 11
    for name, sourced in fields.items():
        assert sourced.place is not None
        assert lines[sourced.place.line - 1].strip().startswith(f'"{keys.get(name, name)}"')


def test_an_inherited_value_keeps_the_place_of_the_wider_level() -> None:
    text = (
        '{"global_quant_config": {"weight": {"dtype": "int8", "ch_axis": '
        '0}},\n"layer_quant_config": {"fc": {"weight": '
        '{"dtype": "int8", "qscheme": "per_channel"}}}}'
    )
    config = check_document(parse_document(Text("net.json", text))).require()
    found = rule(config, 'layer_quant_config["fc"]').fields["weights"]
    assert found["ch_axis"].value == 0
    assert found["ch_axis"].origin.startswith("net.json:1:")
    assert found["qscheme"].origin.startswith("net.json:2:")


ALGORITHMS = {
    "smoothquant": {
        "alpha": 1,
        "scale_clamp_min": 1e-3,
        "scaling_layers": None,
        "embedding_layers": None,
        "model_decoder_layers": None,
    },
    "awq": {
        "bit": 4,
        "sym": False,
        "group_size": 128,
        "scaling_layers": None,
        "model_decoder_layers": None,
        "embedding_layers": None,
    },
    "gptq": {
        "bit": 4,
        "sym": False,
        "group_size": 128,
        "damp_percent": 0.01,
        "desc_act": True,
        # The documented False goes with the documented desc_act in no version
        "static_groups": True,
        "true_sequential": True,
        "inside_layer_modules": None,
        "model_decoder_layers": None,
        "embedding_layers": None,
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_have_the_documented_fields_and_defaults(name: str) -> None:
    properties = SCHEMA["definitions"][name]["properties"]
    assert {key: properties[key]["default"] for key in ALGORITHMS[name]} == ALGORITHMS[name]
    assert properties["name"]["default"] == name
    group = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": 1, "group_size": 128}
    read = {"weight": group, "input_tensors": {"dtype": "int8", "is_dynamic": True}}
    assert codes(global_quant_config=read, algo_config={"name": name, **ALGORITHMS[name]}) == []


def test_a_document_without_text_names_its_values_by_path() -> None:
    value = {
        "global_quant_config": {"weight": {"dtype": "int7"}},
        "layer_quant_config": {"model.layers.0": {"weight": {**INT8, "qscheme": "per_chanel"}}},
        "exclude": ["a", 1],
    }
    with pytest.raises(ConfigError) as error:
        check_document(Document.of(value, "Config")).require()
    assert [str(found.place) for found in error.value.diagnostics] == [
        "Config.exclude[1]",
        "Config.global_quant_config.weight.dtype",
        'Config.layer_quant_config["model.layers.0"].weight.qscheme',
    ]
    config = check_document(
        Document.of({"global_quant_config": {"weight": INT8}}, "Config")
    ).require()
    assert (
        rule(config, "global").fields["weights"]["dtype"].origin
        == "Config.global_quant_config.weight.dtype"
    )


HIERARCHICAL = [
    path
    for path in sorted(CONFIGS.glob("*.json"))
    if "global_quant_config" in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", HIERARCHICAL, ids=lambda path: path.stem)
def test_resolved_document_means_the_same_and_is_complete(path: Path) -> None:
    config = load_config(path).require()
    again = resolved_document(config)
    assert set(again) == {
        *("global_quant_config", "layer_type_quant_config", "layer_quant_config"),
        *("exclude", "algo_config", "pre_quant_opt_config"),
    }
    assert set(again["global_quant_config"]["weight"]) == set(SPEC_KEYS)
    resolved = load(**again)
    for role in rule(config, "global").adds:
        assert merged(resolved, "global", role=role) == merged(config, "global", role=role)
    assert resolved_document(resolved) == again


def test_resolved_levels_inherit_as_before() -> None:
    config = load(
        global_quant_config={"weight": {"dtype": "uint4"}},
        layer_quant_config={"fc": {"weight": INT8}},
    )
    resolved = load(**resolved_document(config))
    labels = ("global", 'layer_quant_config["fc"]')
    assert merged(resolved, *labels) == merged(config, *labels) == QuantizationSpec()
