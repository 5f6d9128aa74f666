"""The rule book itself: both schemas are sound, editors and terminal agree, and generated files are fresh."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from quantizer.config.document import Text
from quantizer.config.load import check_document
from quantizer.config.model import QuantizationSpec
from quantizer.config.read import parse_document
from quantizer.config.resources import load_resource
from quantizer.config.rules import all_codes, conflicts, spec_rules

ROOT = Path(__file__).parents[2]
LAYERED = json.loads((ROOT / "schemas" / "layered.schema.json").read_text("utf-8"))
HIERARCHICAL = json.loads((ROOT / "schemas" / "hierarchical.schema.json").read_text("utf-8"))
SPEC = json.loads((ROOT / "schemas" / "quantization_spec.schema.json").read_text("utf-8"))
DPU = QuantizationSpec(
    method="diffs", round_mode="std_round", narrow_range=True, scale_type="poweroftwo", statistic="modal"
)


@pytest.mark.parametrize("schema", [LAYERED, HIERARCHICAL, SPEC], ids=["layered", "hierarchical", "quantization_spec"])
def test_schema_is_draft_07_without_one_of(schema: dict[str, Any]) -> None:
    Draft7Validator.check_schema(schema)
    assert "oneOf" not in json.dumps(schema)


def test_codes_are_unique_and_complete() -> None:
    rules = [rule["code"] for rule in (*SPEC["then"]["allOf"], *SPEC["allOf"])]
    assert len(set(rules)) == len(rules)
    assert not set(rules) & set(load_resource("schemas", "codes.json"))
    assert list(all_codes()) == sorted(all_codes())


@pytest.mark.parametrize(
    ("change", "role", "code", "fields"),
    [
        ({"method": "mse"}, "weights", "QZ201", ("method",)),
        ({"round_mode": "half_up"}, "input", "QZ202", ("round_mode",)),
        ({}, "activation", "QZ203", ("round_mode",)),
        ({"symmetric": False}, "weights", "QZ204", ("symmetric",)),
        ({"qscheme": "per_channel"}, "weights", "QZ205", ("qscheme",)),
        ({"signed": False}, "bias", "QZ206", ("signed",)),
        ({"narrow_range": False}, "bias", "QZ207", ("narrow_range",)),
        ({"scale_type": "float", "method": "maxmin"}, "bias", "QZ208", ("scale_type",)),
        ({"statistic": "max"}, "input", "QZ209", ("statistic",)),
    ],
)
def test_one_broken_restriction_is_one_conflict(change: dict[str, Any], role: Any, code: str, fields: Any) -> None:
    [conflict] = conflicts(QuantizationSpec(**{**DPU.to_json(), **change}), role, "DPU")
    assert (conflict.code, conflict.fields, conflict.on_device) == (code, fields, True)
    assert conflict.message.startswith("on the DPU, ")


def test_floating_point_formats_break_no_rule() -> None:
    assert conflicts(QuantizationSpec(dtype="bfloat16", symmetric=False, method="mse"), "weights", "DPU") == ()


@pytest.mark.parametrize("device", ["DPU", "CPU", "GPU"])
def test_editor_and_terminal_agree(device: str) -> None:
    """On a complete tensor block for weights the layered schema alone finds what the merged specs break."""
    axes = {
        "method": ["maxmin", "mse", "diffs"],
        "symmetry": [True, False],
        "per_channel": [False, True],
        "scale_type": ["float", "poweroftwo"],
        "calib_statistic_method": ["modal", "max"],
        "round_mode": ["std_round", "half_up"],
    }
    validator = Draft7Validator(LAYERED)
    preset = json.loads((ROOT / "configs" / "default.json").read_text("utf-8"))
    preset = {**preset, "target_device": device, "quantizable_data_type": ["weights"]}
    for values in itertools.product(*axes.values()):
        block = {**preset["overall_quantize_config"], **dict(zip(axes, values, strict=True))}
        document = {**preset, "tensor_quantize_config": {"weights": block}}
        document["overall_quantize_config"] = {"datatype": "float32"}
        block["datatype"] = "int"
        editor = {
            error.schema["code"]
            for error in validator.iter_errors(document)
            if isinstance(error.schema, dict) and "code" in error.schema
        }
        found = check_document(parse_document(Text("net.json", json.dumps(document)))).diagnostics
        assert editor == {diagnostic.code for diagnostic in found}, block


def test_every_rule_has_a_sentence_and_a_remedy() -> None:
    for rule in spec_rules().values():
        assert all(entry["errorMessage"] for entry in rule["then"]["properties"].values())
        assert all(rule[word] for word in ("title", "description", "help"))


def test_generated_files_are_fresh() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["generated"]()
    stale = [str(path) for path, text in generated.items() if path.read_text("utf-8") != text]
    assert stale == [], "run `python docs/generate.py`"
    pages = {path.name for path in generated}
    folder = ROOT / "docs" / "config"
    assert {path.name for path in folder.glob("*.md")} - pages == {"README.md"}
    linked = set(re.findall(r"\(([a-z0-9_]+\.md)\)", (folder / "README.md").read_text("utf-8")))
    assert linked == {path.name for path in generated if path.parent == folder}


def test_the_documented_file_is_valid() -> None:
    text = (ROOT / "docs" / "config" / "README.md").read_text("utf-8")
    [example] = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    assert check_document(parse_document(Text("README.md", example))).diagnostics == ()
