"""The rule book itself: both schemas are sound, editors and terminal agree, and generated files
are fresh.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from quantizer.config.document.document import Document, Text
from quantizer.config.document.read import parse_document
from quantizer.config.forms.form import block_of
from quantizer.config.load import check_document
from quantizer.config.model import ROLES, QuantizationSpec
from quantizer.config.pages import key_names, key_page
from quantizer.config.resources import load_resource
from quantizer.config.rules.spec_rules import all_codes, conflicts, spec_rules
from quantizer.errors import QuantizerError

ROOT = Path(__file__).parents[2]
LAYERED = json.loads((ROOT / "schemas" / "layered.schema.json").read_text("utf-8"))
HIERARCHICAL = json.loads((ROOT / "schemas" / "hierarchical.schema.json").read_text("utf-8"))
SPEC = json.loads((ROOT / "schemas" / "quantization_spec.schema.json").read_text("utf-8"))
DPU = QuantizationSpec(
    method="diffs",
    round_mode="std_round",
    narrow_range=True,
    scale_type="poweroftwo",
    statistic="modal",
)


@pytest.mark.parametrize(
    "schema",
    [LAYERED, HIERARCHICAL, SPEC],
    ids=["layered", "hierarchical", "quantization_spec"],
)
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
def test_one_broken_restriction_is_one_conflict(
    change: dict[str, Any], role: Any, code: str, fields: Any
) -> None:
    [conflict] = conflicts(QuantizationSpec(**{**DPU.to_json(), **change}), role, "DPU")
    assert (conflict.code, conflict.fields, conflict.on_device) == (code, fields, True)
    assert conflict.message.startswith("on the DPU, ")


def test_floating_point_formats_break_no_rule() -> None:
    assert (
        conflicts(
            QuantizationSpec(dtype="bfloat16", symmetric=False, method="mse"), "weights", "DPU"
        )
        == ()
    )


WORDS: dict[str, list[Any]] = {
    "method": ["maxmin", "percentile", "entropy", "mse", "diffs"],
    "symmetry": [True, False],
    "signed": [True, False],
    "narrow_range": [True, False],
    "per_channel": [False, True],
    "scale_type": ["float", "poweroftwo"],
    "calib_statistic_method": ["modal", "max", "mean", "median"],
    "round_mode": ["std_round", "half_up"],
    "bit_width": [8, 32],
}
PRESET = json.loads((ROOT / "configs" / "default.json").read_text("utf-8"))
EDITOR = Draft7Validator(LAYERED)


def told(document: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The codes of the errors of the editor's schema, and of `validate`."""
    editor = {
        error.schema.get("code", "?")
        for error in EDITOR.iter_errors(document)
        if isinstance(error.schema, dict)
    }
    found = check_document(Document.of(document, "net")).diagnostics
    return editor, {diagnostic.code for diagnostic in found if diagnostic.severity == "error"}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["DPU", "CPU", "GPU"])
def test_editor_and_terminal_agree_on_an_overall_block(device: str) -> None:
    """The 384 combinations of these words, or every fifth, each a whole file for weights."""
    words = {
        **WORDS,
        "method": ["maxmin", "mse", "diffs"],
        "round_mode": ["std_round"],
        "bit_width": [8],
    }
    combinations = list(itertools.product(*words.values()))
    if device != "DPU":
        # These have fewer rules of their own; the step shares no factor with any count of words
        combinations = combinations[::5]
    verdicts = set()
    for values in combinations:
        block = {**PRESET["overall_quantize_config"], **dict(zip(words, values, strict=True))}
        file = {**PRESET, "target_device": device, "quantizable_data_type": ["weights"]}
        editor, terminal = told(
            file | {"overall_quantize_config": block, "tensor_quantize_config": {}}
        )
        assert editor == terminal, block
        verdicts.add(not editor)
    assert verdicts == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["DPU", "CPU"])
def test_editor_and_terminal_agree_where_blocks_are_merged(device: str) -> None:
    """At the top and in an entry: overall blocks, blocks of some tensors, lists of tensors,
    drawn at random.
    """
    draw = random.Random(device)
    verdicts = Counter[bool]()
    for _ in range(120):
        entry = {"layer_type": "Linear", "layer_name": None, **level(draw, device)}
        file = {
            **PRESET,
            "target_device": device,
            **level(draw, device),
            "layer_quantize_config": [entry],
        }
        editor, terminal = told(file)
        assert editor == terminal, file
        verdicts[not editor] += 1
    assert min(verdicts[True], verdicts[False]) > 12


def level(draw: random.Random, device: str) -> dict[str, Any]:
    """The blocks of a file or of an entry; half of the words are those that every device
    takes.
    """
    sound = json.loads(
        (ROOT / "configs" / f"{'dpu' if device == 'DPU' else 'default'}.json").read_text(
            "utf-8"
        )
    )
    usual, tensors = sound["overall_quantize_config"], sound.get("tensor_quantize_config", {})

    def changed(words: dict[str, Any]) -> dict[str, Any]:
        return words | {
            word: draw.choice(WORDS[word])
            for word in draw.sample(sorted(WORDS), draw.choice([0, 0, 1, 2]))
        }

    roles = draw.sample(ROLES, draw.randint(0, 3))
    return {
        "quantizable_data_type": roles,
        "overall_quantize_config": changed(usual),
        "tensor_quantize_config": {role: changed(tensors.get(role, {})) for role in roles},
    }


def test_editors_know_which_blocks_are_integers() -> None:
    """Words under a floating-point datatype break no rule, wherever the datatype stands."""
    mse = {"symmetry": False, "method": "mse"}
    floating = {
        **PRESET,
        "quantizable_data_type": ["weights", "activation"],
        "overall_quantize_config": {"datatype": "bfloat16"},
    }
    for tensor, codes in (
        ({"datatype": "float16", **mse}, set()),
        ({"datatype": "int", **mse}, {"QZ302"}),
    ):
        editor, terminal = told(floating | {"tensor_quantize_config": {"weights": tensor}})
        assert editor == terminal == codes


def test_the_hierarchical_schema_is_not_stricter_than_the_terminal() -> None:
    validator = Draft7Validator(HIERARCHICAL)
    words = {
        "dtype": ["int4", "uint8", "int32", "fp8_e4m3", "mx6", "bfloat16"],
        "symmetric": [None, True, False],
        "qscheme": [None, "per_tensor", "per_channel", "per_group", "per_token"],
        "observer_cls": [
            None,
            "PerTensorMSEObserver",
            "PerChannelMinMaxObserver",
            "PlaceholderObserver",
        ],
        "round_method": [None, "floor"],
        "is_dynamic": [None, True],
    }
    accepted = 0
    for values in itertools.product(*words.values()):
        spec = dict(zip(words, values, strict=True)) | {"ch_axis": 1, "group_size": 16}
        file = {"global_quant_config": {"input_tensors": spec}}
        if check_document(Document.of(file, "Config")).config is not None:
            accepted += 1
            assert validator.is_valid(file), file
    assert accepted > 50


def test_every_rule_has_a_sentence_and_a_remedy() -> None:
    for rule in spec_rules().values():
        assert all(entry["errorMessage"] for entry in rule["then"]["properties"].values())
        assert all(rule[word] for word in ("title", "description", "help"))


def test_generated_files_are_fresh() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["generated"]()
    stale = [str(path) for path, text in generated.items() if path.read_text("utf-8") != text]
    assert stale == [], "run `python docs/generate.py`"


def test_the_page_on_the_config_lists_every_key() -> None:
    text = (ROOT / "docs" / "config" / "README.md").read_text("utf-8")
    listed = re.findall(r"`(\w+)`", text.partition("## Keys\n")[2].partition("\n`$schema`")[0])
    assert set(key_names()) <= set(listed)


def test_an_option_without_a_description_is_reported_with_its_key() -> None:
    options = block_of("layered", "parameters")["properties"]["method"]["enum"]
    described = len(options)
    options.append("median")
    message = f"method has {described + 1} options and {described} descriptions"
    try:
        with pytest.raises(QuantizerError, match=message):
            key_page("method")
    finally:
        options.remove("median")


def test_the_documented_file_is_valid() -> None:
    text = (ROOT / "docs" / "config" / "README.md").read_text("utf-8")
    [example] = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    assert check_document(parse_document(Text("README.md", example))).diagnostics == ()
