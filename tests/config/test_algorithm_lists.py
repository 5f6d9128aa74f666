"""What a file says of algorithms is what runs: the same entries in both forms, in order, with the same defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs import document
from quantizer.config.algorithm_words import defaults, written
from quantizer.config.algorithms import (
    ALGORITHMS,
    Algorithm,
    Awq,
    Gptaq,
    Gptq,
    Names,
    Qronos,
    Rotation,
    ScalingLayer,
    SmoothQuant,
)
from quantizer.config.document import Document, Text
from quantizer.config.load import LoadResult, check_document
from quantizer.config.read import parse_document
from quantizer.config.resolved import resolved_document
from quantizer.config.resources import load_resource
from quantizer.config.to_hierarchical import to_hierarchical
from quantizer.config.to_layered import to_layered

GROUPS = {"dtype": "uint4", "qscheme": "per_group", "ch_axis": 1, "group_size": 128}
CHANNELS = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}


def check(value: dict[str, Any]) -> LoadResult:
    return check_document(parse_document(Text("net.json", json.dumps(value, indent=1))))


def load(weight: dict[str, Any] = GROUPS, **blocks: Any) -> tuple[Algorithm, ...]:
    return check({"global_quant_config": {"weight": weight}, **blocks}).require().algorithms


def codes(**blocks: Any) -> list[str]:
    return [found.code for found in check({"global_quant_config": {"weight": GROUPS}, **blocks}).diagnostics]


DEFAULTS = [
    SmoothQuant(alpha=1.0),
    Rotation(),
    Awq(),
    Gptq(static_groups=True),
    Gptaq(),
    Qronos(),
]
"""As the documented format has them, but for groups, which desc_act needs static."""


@pytest.mark.parametrize("algorithm", DEFAULTS, ids=lambda algorithm: algorithm.name)
def test_a_name_alone_has_the_same_defaults_in_both_forms(algorithm: Algorithm) -> None:
    entry = {"name": algorithm.name}
    assert load(algo_config=entry) == load(algo_config=[entry]) == (algorithm,)
    layered = check(document(algorithms=[entry])).require()
    assert layered.algorithms == (algorithm,)


def test_defaults_are_of_the_settings_type() -> None:
    for algorithm in DEFAULTS:
        assert [type(value) for value in vars(algorithm).values()] == [
            type(v) for v in vars(type(algorithm)()).values()
        ]


def test_both_lists_run_in_order() -> None:
    found = load(
        pre_quant_opt_config=[{"name": "rotation", "seed": 3}, {"name": "smoothquant", "alpha": 0.5}],
        algo_config=[{"name": "awq", "grid": 10}, {"name": "gptq", "static_groups": True, "damp_percent": 1}],
    )
    assert found == (Rotation(seed=3), SmoothQuant(alpha=0.5), Awq(grid=10), Gptq(damp_percent=1.0))
    assert [algorithm.label for algorithm in found] == [
        *("pre_quant_opt_config[0]", "pre_quant_opt_config[1]"),
        *("algo_config[0]", "algo_config[1]"),
    ]
    assert next(algorithm.place.pointer for algorithm in found if algorithm.place) == "/pre_quant_opt_config/0/name"


@pytest.mark.parametrize(("alpha", "meant"), [(0, 0.0), ([0, 0.5, 1], (0.0, 0.5, 1.0)), ("auto", "auto")])
def test_strengths_of_smoothquant(alpha: Any, meant: Any) -> None:
    assert load(algo_config={"name": "smoothquant", "alpha": alpha}) == (SmoothQuant(alpha=meant),)


def test_names_override_the_graph_and_know_their_places() -> None:
    groups = [
        {"layers": ["q_proj", "k_proj"], "inp": "q_proj", "help": "attention"},
        {"prev_op": "up", "layers": ["d"]},
    ]
    [found] = load(
        algo_config={
            "name": "awq",
            "scaling_layers": groups,
            "model_decoder_layers": "model.layers",
            "embedding_layers": ["model.embed_tokens"],
        }
    )
    assert found.names == Names(
        blocks="model.layers",
        scaling=(ScalingLayer(("q_proj", "k_proj"), inp="q_proj"), ScalingLayer(("d",), prev_op="up")),
        embeddings=("model.embed_tokens",),
    )
    assert {name: place.pointer for name, place in found.names.places.items()} == {
        "blocks": "/algo_config/model_decoder_layers",
        "scaling": "/algo_config/scaling_layers",
        "embeddings": "/algo_config/embedding_layers",
    }
    assert found.names.scaling is not None
    assert [group.place.pointer for group in found.names.scaling if group.place][1] == "/algo_config/scaling_layers/1"


def test_the_layers_of_a_block_have_an_order() -> None:
    [found] = load(algo_config={"name": "gptaq", "inside_layer_modules": ["b", "a"]})
    assert found.names == Names(inside=("b", "a"))


def test_empty_names_of_older_files_state_nothing() -> None:
    empty: dict[str, Any] = {"scaling_layers": [], "model_decoder_layers": "", "embedding_layers": None}
    assert load(algo_config={"name": "smoothquant", **empty}) == (SmoothQuant(alpha=1.0),)


GROUP_ORDER = {
    "neither": ({}, (True, True), ["QZ126"]),
    "static": ({"static_groups": True}, (True, True), []),
    "not static": ({"static_groups": False}, (False, False), ["QZ126"]),
    "no order": ({"desc_act": False}, (False, False), []),
    "order": ({"desc_act": True}, (True, True), ["QZ126"]),
    "no order, static": ({"desc_act": False, "static_groups": True}, (False, True), []),
}


@pytest.mark.parametrize("name", GROUP_ORDER)
def test_of_the_order_and_of_static_groups_the_stated_one_decides(name: str) -> None:
    stated, meant, told = GROUP_ORDER[name]
    [found] = load(algo_config={"name": "gptq", **stated})
    assert isinstance(found, Gptq)
    assert (found.desc_act, found.static_groups) == meant
    assert codes(algo_config={"name": "gptq", **stated}) == told


def test_without_groups_nothing_is_said_of_them() -> None:
    assert check({"global_quant_config": {"weight": CHANNELS}, "algo_config": {"name": "gptq"}}).diagnostics == ()


def test_keys_about_the_grid_that_agree_are_not_told() -> None:
    agreeing = {"bit": 4, "sym": False, "group_size": 128, "static_groups": True}
    assert codes(algo_config=[{"name": "awq", "bit": 4}, {"name": "gptq", **agreeing}]) == []
    channels = {"name": "gptq", "bit": 4, "sym": True, "group_size": -1}
    assert check({"global_quant_config": {"weight": CHANNELS}, "algo_config": channels}).diagnostics == ()


def test_weights_of_some_layers_are_enough_to_round() -> None:
    only_one = {
        "global_quant_config": {},
        "layer_quant_config": {"fc": {"weight": GROUPS}},
        "algo_config": {"name": "awq"},
    }
    assert check(only_one).diagnostics == ()
    cast = {"global_quant_config": {"weight": {"dtype": "bfloat16"}}, "algo_config": {"name": "awq"}}
    assert [found.code for found in check(cast).diagnostics] == ["QZ128"]


def test_a_scaled_float_is_rounded_too() -> None:
    assert (
        check({"global_quant_config": {"weight": {"dtype": "fp4"}}, "algo_config": {"name": "gptaq"}}).diagnostics == ()
    )


EVERYTHING = {
    "pre_quant_opt_config": {"name": "smoothquant", "alpha": [0.5, 1], "model_decoder_layers": "layers"},
    "algo_config": [
        {"name": "awq", "clip_search": False, "scaling_layers": [{"prev_op": "norm", "layers": ["q"], "inp": "q"}]},
        {"name": "gptq", "inside_layer_modules": ["q", "o"]},
    ],
}


def test_conversion_keeps_algorithms_both_ways() -> None:
    config = check({"global_quant_config": {"weight": CHANNELS}, **EVERYTHING}).require()
    there, findings = to_layered(config)
    assert not [found for found in findings if found.severity == "error"]
    layered = check(there).require()
    assert layered.algorithms == config.algorithms
    back, findings = to_hierarchical(layered)
    assert not [found for found in findings if found.severity == "error"]
    assert check(back).require().algorithms == config.algorithms


def test_the_resolved_config_has_every_setting() -> None:
    config = check({"global_quant_config": {"weight": GROUPS}, **EVERYTHING}).require()
    resolved = resolved_document(config)
    assert [entry["name"] for key in EVERYTHING for entry in resolved[key]] == ["smoothquant", "awq", "gptq"]
    assert resolved["algo_config"][1]["static_groups"] is True
    again = check_document(Document.of(resolved, "Config"))
    assert again.diagnostics == ()
    assert again.require().algorithms == config.algorithms
    layered = check(document(algorithms=[{"name": "qronos"}])).require()
    assert resolved_document(layered)["algorithms"] == [written(Qronos())]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_is_a_key_with_a_default(name: str) -> None:
    """Damping of Qronos is `alpha`, so it has no `damp_percent`."""
    own = {key for key in vars(ALGORITHMS[name]()) if key not in ("names", "label", "place")}
    assert own - set(defaults(name)) == ({"damp_percent"} if name == "qronos" else set())


def test_both_schemas_have_the_same_algorithms() -> None:
    forms = [load_resource("schemas", f"{form}.schema.json")["definitions"] for form in ("layered", "hierarchical")]
    for name in ("algorithm", "scaling_layer", *ALGORITHMS):
        assert forms[0][name] == forms[1][name]


def test_no_algorithm_runs_on_the_dpu() -> None:
    preset = json.loads((Path(__file__).parents[2] / "configs" / "dpu.json").read_text("utf-8"))
    found = check({**preset, "algorithms": [{"name": name} for name in ("smoothquant", "awq", "gptq")]}).diagnostics
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
    assert found.message.startswith("a rotation before has turned values, online already")
