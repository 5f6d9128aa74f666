"""No dead key: changing any accepted key changes the plan or the graph, or a warning says that
the key is reserved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.configs import OVERALL, ROLES, config, document, layer
from support.toys import traced

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.load import load_config
from quantizer.config.resources import load_resource
from quantizer.graph.passes import run_passes
from quantizer.plan.resolve import resolve_plan

# For each key of a block another legal value, and what else it takes to be legal.
PARAMETERS: dict[str, dict[str, Any]] = {
    "datatype": {"datatype": "bfloat16"},
    "bit_width": {"bit_width": 4},
    "method": {"method": "entropy"},
    "percentage": {"percentage": 99.5},
    "round_mode": {"round_mode": "std_round"},
    "symmetry": {"symmetry": False},
    "per_channel": {"per_channel": True},
    "signed": {"signed": False},
    "narrow_range": {"narrow_range": True},
    "scale_type": {"scale_type": "poweroftwo"},
    "symmetric_scale": {"symmetric_scale": "half_range"},
    "calib_statistic_method": {"calib_statistic_method": "median"},
}
SWITCHES: dict[str, Any] = {
    "convert_relu6_to_relu": True,
    "convert_silu_to_hswish": True,
    "integer_activations": True,
    "include_cle": True,
    "include_bias_corr": True,
    "keep_first_last_layer_accuracy": True,
    "keep_add_layer_accuracy": True,
    "change_concat_input_fix": True,
    "change_pool_input_fix": True,
    "onnx_opset_version": 17,
    "target_device": "GPU",
    "quantizable_data_type": ["weights"],
    "exclude": ["se"],
}
ROLES_OF = {"signed": ["input", "activation"]}
"""The tensors that a parameter has another legal value for, where not for all: weights and
biases are signed.
"""
BLOCKS = ("overall_quantize_config", "tensor_quantize_config", "layer_quantize_config")
ALGORITHMS = "algorithms"  # what they do to weights is in tests/cli/test_algorithm_runs.py
ENTRY = (
    "layer_type",
    "layer_name",
    "quantizable_data_type",
    "overall_quantize_config",
    "tensor_quantize_config",
)


def outcome(
    folder: Path, content: dict[str, Any], toy: str = "mobile"
) -> tuple[Any, list[Diagnostic]]:
    """The plan without places in the file, the operators of the graph, and the findings on the
    file.
    """
    found = config(folder, content)
    graph = run_passes(traced(toy), found.settings)
    plan = resolve_plan(found, graph, traced(toy))
    made = [node.op for node in graph.nodes], graph.changes
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    findings = [*load_config(folder / "config.json").diagnostics, *plan.diagnostics]
    return (specs, plan.floats, plan.corrected, plan.to_json()["target"], made), findings


def schema() -> dict[str, Any]:
    found: dict[str, Any] = load_resource("schemas", "layered.schema.json")
    return found


def keys_of(part: Any, name: str) -> set[str]:
    """The keys of every object in the schema that has a property called `name`."""
    if isinstance(part, list):
        return set().union(*(keys_of(item, name) for item in part))
    if not isinstance(part, dict):
        return set()
    inside = set().union(*(keys_of(item, name) for item in part.values()))
    properties = part.get("properties", {})
    return inside | (set(properties) if name in properties else set())


def real(keys: set[str]) -> set[str]:
    return {key for key in keys if not key.startswith(("$", "//"))}


def test_the_tables_hold_every_key_of_the_schema() -> None:
    assert real(keys_of(schema(), "round_mode")) == set(PARAMETERS)
    properties = schema()["properties"]
    # Those with a code are keys of the other form, which are refused
    own = {key for key, entry in properties.items() if "code" not in entry}
    assert real(own) == {*SWITCHES, *BLOCKS, ALGORITHMS}
    assert real(keys_of(schema(), "layer_name")) == {*ENTRY, "required"}


@pytest.mark.parametrize("key", SWITCHES)
def test_every_switch_does_something_or_says_that_it_does_not(key: str, tmp_path: Path) -> None:
    toy = "residual" if "add" in key or "cle" in key else "mobile"
    before, _ = outcome(tmp_path, document(), toy)
    after, findings = outcome(tmp_path, document(**{key: SWITCHES[key]}), toy)
    reserved = [f for f in findings if f.code == "QZ115" and f.message.startswith(key)]
    assert bool(reserved) != (after != before)


@pytest.mark.parametrize("key", PARAMETERS)
def test_every_parameter_of_the_overall_block_changes_the_plan(
    key: str, tmp_path: Path
) -> None:
    extra = {"method": "percentile"} if key == "percentage" else {}
    roles = {"quantizable_data_type": ROLES_OF.get(key, ROLES)}
    before, _ = outcome(tmp_path, document(overall=extra, **roles))
    after, _ = outcome(tmp_path, document(overall=extra | PARAMETERS[key], **roles))
    assert after != before


@pytest.mark.parametrize(
    ("key", "role"),
    [
        (key, role)
        for key in sorted(set(PARAMETERS) - {"per_channel"})
        for role in ROLES_OF.get(key, ROLES)
    ],
)
def test_every_parameter_of_a_tensor_block_changes_that_tensor_only(
    key: str, role: str, tmp_path: Path
) -> None:
    extra = {"method": "percentile"} if key == "percentage" else {}
    (before, *_), _ = outcome(tmp_path, document(overall=extra))
    (after, *_), _ = outcome(tmp_path, document(overall=extra, tensor={role: PARAMETERS[key]}))
    assert set(after) == set(before)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name[1] == role}


@pytest.mark.parametrize("key", PARAMETERS)
def test_every_parameter_of_a_layer_entry_changes_that_layer_only(
    key: str, tmp_path: Path
) -> None:
    extra = {"method": "percentile"} if key == "percentage" else {}
    roles = ROLES_OF.get(key)
    (before, *_), _ = outcome(
        tmp_path, document(layer("se", roles=roles, **extra), overall=extra)
    )
    changes = extra | without(PARAMETERS[key], extra)
    (after, *_), _ = outcome(
        tmp_path, document(layer("se", roles=roles, **changes), overall=extra)
    )
    changed = {name for name in before if before[name] != after.get(name)}
    assert changed
    assert {name.rpartition("[")[2] for name, _ in changed} <= {"se]/conv2d"}


def without(block: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key not in extra}


def test_every_key_of_a_layer_entry_changes_the_plan(tmp_path: Path) -> None:
    base = layer("se", bit_width=4)
    (before, *_), _ = outcome(tmp_path, document(base))
    changes: dict[str, Any] = {
        "layer_name": "dw",
        "quantizable_data_type": ["weights"],
        "overall_quantize_config": OVERALL | {"bit_width": 5},
        "tensor_quantize_config": {"weights": {"bit_width": 6}},
    }
    for key, value in changes.items():
        (after, *_), _ = outcome(tmp_path, document(base | {key: value}))
        assert after != before, key
    (after, *_), _ = outcome(
        tmp_path, document(base | {"layer_name": None, "layer_type": "Linear"})
    )
    assert after != before


def test_required_decides_whether_finding_nothing_is_an_error(tmp_path: Path) -> None:
    for required, codes in ((True, ["QZ402"]), (False, [])):
        _, findings = outcome(tmp_path, document(layer("absent", required=required)))
        assert [found.code for found in findings if found.severity == "error"] == codes
