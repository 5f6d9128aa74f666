"""Missing keys: what is written for them, and that nothing else of the file changes."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.config.completion import completed
from quantizer.config.document import Text
from quantizer.config.load import check_document
from quantizer.config.read import parse_document

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLE = json.loads((CONFIGS / "example.json").read_text("utf-8"))
REMOVABLE = [
    *[
        (key,)
        for key in EXAMPLE
        if key not in ("layer_quantize_config", "tensor_quantize_config", "convert_silu_to_hswish")
    ],
    *[("overall_quantize_config", key) for key in EXAMPLE["overall_quantize_config"]],
    *[("layer_quantize_config", 0, key) for key in ("quantizable_data_type", "overall_quantize_config")],
    *[("layer_quantize_config", 1, "overall_quantize_config", key) for key in EXAMPLE["overall_quantize_config"]],
]


def fix(text: str) -> str:
    return completed(parse_document(Text("net.json", text)))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(REMOVABLE), min_size=1), st.sampled_from([None, 2, 4, "\t"]))
def test_completed_text_is_complete_and_only_grows(paths: set[tuple[str | int, ...]], indent: int | str | None) -> None:
    value = json.loads(json.dumps(EXAMPLE))
    for path in paths:
        block = value
        for part in path[:-1]:
            block = block.get(part, {}) if isinstance(block, dict) else block[part]
        block.pop(path[-1], None)
    text = json.dumps(value, indent=indent)
    fixed = fix(text)
    found = check_document(parse_document(Text("net.json", fixed))).diagnostics
    assert "QZ105" not in {diagnostic.code for diagnostic in found}
    operations = {step[0] for step in difflib.SequenceMatcher(None, text, fixed, autojunk=False).get_opcodes()}
    assert "delete" not in operations


def test_layout_of_the_file_is_kept() -> None:
    text = '{\r\n\t"overall_quantize_config": {"bit_width": 4},\r\n\t"target_device": "DPU"\r\n}\r\n'
    fixed = fix(text)
    assert fixed.startswith(
        '{\r\n\t"overall_quantize_config": {"bit_width": 4, "method": "diffs", "round_mode": "std_round"'
    )
    assert '\r\n\t"target_device": "DPU",\r\n\t"convert_relu6_to_relu": false,\r\n\t' in fixed
    assert fixed.endswith("]\r\n}\r\n")


@pytest.mark.parametrize("text", ["{}", "{ }", "{\n}", '{"overall_quantize_config": {}}'])
def test_empty_objects_are_filled(text: str) -> None:
    found = check_document(parse_document(Text("net.json", fix(text))))
    assert found.diagnostics == ()


def test_layer_parameters_are_those_of_the_overall_block() -> None:
    overall = {**EXAMPLE["overall_quantize_config"], "bit_width": 4}
    entry = {"layer_type": "add", "layer_name": None, "quantizable_data_type": ["activation"]}
    value = {**EXAMPLE, "overall_quantize_config": overall, "layer_quantize_config": [entry]}
    assert json.loads(fix(json.dumps(value)))["layer_quantize_config"] == [
        {**entry, "overall_quantize_config": overall}
    ]


def test_a_misspelt_key_is_not_written_a_second_time() -> None:
    value = json.loads((CONFIGS / "default.json").read_text("utf-8").replace('"signed"', '"singed"'))
    assert json.loads(fix(json.dumps(value))) == value
