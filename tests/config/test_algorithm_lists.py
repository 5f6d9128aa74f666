"""What a file says of algorithms is what runs: the same entries in both forms, in order, with
the same defaults.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.configs import document

from quantizer import Config, Dtype, QuantizationConfig, QuantizationSpec
from quantizer.algorithms.awq.settings import AWQConfig
from quantizer.algorithms.gptq.settings import GPTQConfig, QronosConfig
from quantizer.algorithms.rotation.settings import RotationConfig
from quantizer.algorithms.smoothquant.settings import SmoothQuantConfig
from quantizer.commands.start.start import convert_config
from quantizer.config.algorithms import (
    ALGORITHMS,
    AlgoConfig,
    Algorithm,
    ScalingLayer,
    StructureNames,
    algorithm_entry,
    settings_of,
)
from quantizer.config.document.document import Document, Text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.load import LoadResult, check_document
from quantizer.config.model import ResolvedConfig as ValidConfig

GROUPS = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": 1, "group_size": 128}
CHANNELS = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}


def check(value: dict[str, Any]) -> LoadResult:
    return check_document(parse_document(Text("net.json", json.dumps(value, indent=1))))


def listed(**blocks: Any) -> tuple[Algorithm, ...]:
    return check({"global_quant_config": {"weight": GROUPS}, **blocks}).require().algorithms


def of(config: ValidConfig) -> list[AlgoConfig]:
    return [algorithm.settings for algorithm in config.algorithms]


def load(**blocks: Any) -> list[AlgoConfig]:
    return of(check({"global_quant_config": {"weight": GROUPS}, **blocks}).require())


def codes(**blocks: Any) -> list[str]:
    return [
        found.code
        for found in check({"global_quant_config": {"weight": GROUPS}, **blocks}).diagnostics
    ]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_name_alone_means_the_same_in_both_forms_and_in_python(name: str) -> None:
    entry, settings = {"name": name}, ALGORITHMS[name]()
    assert load(algo_config=entry) == load(algo_config=[entry]) == [settings]
    [layered] = check(document(algorithms=[entry])).require().algorithms
    assert layered.settings == settings
    config = Config(
        QuantizationConfig(weight=QuantizationSpec(Dtype.int8)), algo_config=[settings]
    )
    assert config.to_dict()["algo_config"] == [entry]


def test_whole_numbers_become_what_the_settings_hold() -> None:
    [found] = load(algo_config={"name": "gptq", "damp_percent": 1, "block_size": 64.0})
    assert isinstance(found, GPTQConfig)
    assert (type(found.damp_percent), type(found.block_size)) == (float, int)


def test_both_lists_run_in_order() -> None:
    found = listed(
        pre_quant_opt_config=[
            {"name": "rotation", "seed": 3},
            {"name": "smoothquant", "alpha": 0.5},
        ],
        algo_config=[
            {"name": "awq", "grid": 10},
            {"name": "gptq", "static_groups": True, "damp_percent": 1},
        ],
    )
    assert [algorithm.settings for algorithm in found] == [
        *(RotationConfig(seed=3), SmoothQuantConfig(alpha=0.5)),
        *(AWQConfig(grid=10), GPTQConfig(damp_percent=1.0)),
    ]
    assert [algorithm.label for algorithm in found] == [
        *("pre_quant_opt_config[0]", "pre_quant_opt_config[1]"),
        *("algo_config[0]", "algo_config[1]"),
    ]
    assert (
        next(algorithm.place.pointer for algorithm in found if algorithm.place)
        == "/pre_quant_opt_config/0/name"
    )


@pytest.mark.parametrize(
    ("alpha", "meant"), [(0, 0.0), ([0, 0.5, 1], [0.0, 0.5, 1.0]), ("auto", "auto")]
)
def test_strengths_of_smoothquant(alpha: Any, meant: Any) -> None:
    assert load(algo_config={"name": "smoothquant", "alpha": alpha}) == [
        SmoothQuantConfig(alpha=meant)
    ]


def test_names_override_the_graph_and_know_their_places() -> None:
    groups = [
        {"layers": ["q_proj", "k_proj"], "inp": "q_proj", "help": "attention"},
        {"prev_op": "up", "layers": ["d"]},
    ]
    [found] = listed(
        algo_config={
            "name": "awq",
            "scaling_layers": groups,
            "model_decoder_layers": "model.layers",
            "embedding_layers": ["model.embed_tokens"],
        }
    )
    assert found.names == StructureNames(
        blocks="model.layers",
        scaling=(
            ScalingLayer(("q_proj", "k_proj"), inp="q_proj"),
            ScalingLayer(("d",), prev_op="up"),
        ),
        embeddings=("model.embed_tokens",),
    )
    assert {name: place.pointer for name, place in found.names.places.items()} == {
        "blocks": "/algo_config/model_decoder_layers",
        "scaling": "/algo_config/scaling_layers",
        "embeddings": "/algo_config/embedding_layers",
    }
    assert found.names.scaling is not None
    assert [group.place.pointer for group in found.names.scaling if group.place][
        1
    ] == "/algo_config/scaling_layers/1"


def test_the_layers_of_a_block_have_an_order() -> None:
    [found] = listed(algo_config={"name": "gptaq", "inside_layer_modules": ["b", "a"]})
    assert found.names == StructureNames(inside=("b", "a"))


def test_empty_names_of_older_files_state_nothing() -> None:
    empty: dict[str, Any] = {
        "scaling_layers": [],
        "model_decoder_layers": "",
        "embedding_layers": None,
    }
    assert load(algo_config={"name": "smoothquant", **empty}) == [SmoothQuantConfig()]


GROUP_ORDER = {
    "neither": ({}, (True, True), []),
    "static": ({"static_groups": True}, (True, True), []),
    "not static": ({"static_groups": False}, (True, False), []),
    "order, not static": ({"desc_act": True, "static_groups": False}, (True, False), []),
    "no order": ({"desc_act": False}, (False, True), []),
    "order": ({"desc_act": True}, (True, True), []),
    "no order, not static": ({"desc_act": False, "static_groups": False}, (False, False), []),
    "no order, static": ({"desc_act": False, "static_groups": True}, (False, True), []),
}


@pytest.mark.parametrize("name", GROUP_ORDER)
def test_the_order_and_static_groups_are_what_the_file_states(name: str) -> None:
    stated, meant, told = GROUP_ORDER[name]
    [found] = load(algo_config={"name": "gptq", **stated})
    assert isinstance(found, GPTQConfig)
    assert (found.desc_act, found.static_groups) == meant
    assert codes(algo_config={"name": "gptq", **stated}) == told
    config = Config(
        QuantizationConfig(weight=QuantizationSpec(Dtype.int8)),
        algo_config=GPTQConfig(**stated),
    )
    assert of(check(config.to_dict()).require()) == [found]


def test_keys_about_the_codes_that_agree_are_not_told() -> None:
    agreeing = {"bit": 4, "sym": False, "group_size": 128, "static_groups": True}
    assert codes(algo_config=[{"name": "awq", "bit": 4}, {"name": "gptq", **agreeing}]) == []
    channels = {"name": "gptq", "bit": 4, "sym": True, "group_size": -1}
    assert (
        check(
            {"global_quant_config": {"weight": CHANNELS}, "algo_config": channels}
        ).diagnostics
        == ()
    )


def test_weights_of_some_layers_are_enough_to_round() -> None:
    only_one = {
        "global_quant_config": {},
        "layer_quant_config": {"fc": {"weight": GROUPS}},
        "algo_config": {"name": "awq"},
    }
    assert check(only_one).diagnostics == ()
    cast = {
        "global_quant_config": {"weight": {"dtype": "bfloat16"}},
        "algo_config": {"name": "awq"},
    }
    assert [found.code for found in check(cast).diagnostics] == ["QZ128"]


def test_a_scaled_float_is_rounded_too() -> None:
    assert (
        check(
            {
                "global_quant_config": {"weight": {"dtype": "fp4"}},
                "algo_config": {"name": "gptaq"},
            }
        ).diagnostics
        == ()
    )


EVERYTHING = {
    "pre_quant_opt_config": {
        "name": "smoothquant",
        "alpha": [0.5, 1],
        "model_decoder_layers": "layers",
    },
    "algo_config": [
        {
            "name": "awq",
            "clip_search": False,
            "scaling_layers": [{"prev_op": "norm", "layers": ["q"], "inp": "q"}],
        },
        {"name": "gptq", "inside_layer_modules": ["q", "o"]},
    ],
}


def test_conversion_keeps_algorithms_both_ways() -> None:
    config = check({"global_quant_config": {"weight": CHANNELS}, **EVERYTHING}).require()
    there = convert_config(config, "layered")
    assert not [found for found in there.findings if found.severity == "error"]
    layered = check(there.document).require()
    assert of(layered) == of(config)
    back = convert_config(layered, "hierarchical")
    assert not [found for found in back.findings if found.severity == "error"]
    assert of(check(back.document).require()) == of(config)


@pytest.mark.parametrize(
    "listed", [{"name": "cle"}, [{"name": "cle"}, {"name": "smoothquant"}]]
)
def test_equalization_is_a_switch_that_the_resolved_config_lists_too(listed: Any) -> None:
    config = check(
        {"global_quant_config": {"weight": CHANNELS}, "pre_quant_opt_config": listed}
    ).require()
    assert config.settings.include_cle
    assert [algorithm.name for algorithm in config.algorithms] == (
        [] if isinstance(listed, dict) else ["smoothquant"]
    )
    again = check(resolved_document(config)).require()
    assert (again.settings, again.algorithms == ()) == (
        config.settings,
        isinstance(listed, dict),
    )


def test_the_resolved_config_has_every_setting_that_something_reads() -> None:
    config = check({"global_quant_config": {"weight": CHANNELS}, **EVERYTHING}).require()
    resolved = resolved_document(config)
    assert [entry["name"] for key in EVERYTHING for entry in resolved[key]] == [
        "smoothquant",
        "awq",
        "gptq",
    ]
    assert resolved["algo_config"][1]["static_groups"] is True
    again = check_document(Document.of(resolved, "Config"))
    assert again.diagnostics == ()
    assert of(again.require()) == of(config)
    layered = check(document(algorithms=[{"name": "qronos"}])).require()
    assert resolved_document(layered)["algorithms"] == [algorithm_entry(QronosConfig())]


def test_a_setting_without_a_description_is_refused() -> None:
    @dataclass
    class SilentConfig(AlgoConfig):
        name: str = "silent"
        strength: float = 0.5

    with pytest.raises(ValueError, match=r"SilentConfig\.strength has no description"):
        settings_of(SilentConfig)


def test_no_algorithm_runs_on_the_dpu() -> None:
    preset = json.loads((Path(__file__).parents[2] / "configs" / "dpu.json").read_text("utf-8"))
    found = check(
        {**preset, "algorithms": [{"name": name} for name in ("smoothquant", "awq", "gptq")]}
    ).diagnostics
    assert [finding.code for finding in found if finding.severity == "error"] == ["QZ210"] * 3


def test_a_second_rotation_of_the_same_values_is_told() -> None:
    rotation = {"name": "rotation"}
    assert codes(pre_quant_opt_config=[rotation, {**rotation, "seed": 1}]) == ["QZ128"]
    halves = [{**rotation, "values": False, "online": False}, {**rotation, "residual": False}]
    assert codes(pre_quant_opt_config=halves) == []
    [found] = check(
        {
            "global_quant_config": {"weight": CHANNELS},
            "pre_quant_opt_config": [*halves, {**rotation, "residual": False}],
        }
    ).diagnostics
    assert found.message.startswith("values, online of rotation is done by an entry before")


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [("rotation", "seed", 1 << 64), ("smoothquant", "scale_clamp_min", 1e39)],
)
def test_numbers_that_torch_cannot_hold_are_findings(
    name: str, setting: str, value: Any
) -> None:
    algorithms = [{"name": name, setting: value}]
    weights = {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}
    result = check({"global_quant_config": weights, "pre_quant_opt_config": algorithms})
    assert result.config is None
    assert f"is out of range for {setting}" in result.diagnostics[0].message
