"""What `validate --fix` writes: what has one known answer, tried against all rules; the rest of
the file stays.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document.document import Document, Text, value_at
from quantizer.config.document.read import parse_document, read_document
from quantizer.config.load import check_document, fix_text, load_text

CONFIGS = Path(__file__).parents[2] / "configs"
EXAMPLE = json.loads((CONFIGS / "example.json").read_text("utf-8"))
DPU = json.loads((CONFIGS / "dpu.json").read_text("utf-8"))
PARAMETERS = EXAMPLE["overall_quantize_config"]
PRESETS = (
    "default",
    "dpu",
    "example",
    "gpu",
    "weight_int4_group",
    "dynamic_int8",
    "mxfp4",
    "awq_int4_group",
)


def fix(text: str) -> str:
    """The fixed text, which another round leaves as it is."""
    source, count = fix_text(Text("net.json", text))
    assert (count == 0) == (source.text == text)
    assert fix_text(source) == (source, 0)
    return source.text


def findings(text: str) -> tuple[Diagnostic, ...]:
    return load_text(Text("net.json", text)).diagnostics


def layered(**changes: Any) -> dict[str, Any]:
    """The smallest complete file, with other keys at its top; None leaves one out."""
    value = json.loads((CONFIGS / "default.json").read_text("utf-8")) | changes
    return {key: item for key, item in value.items() if item is not None}


# Each mutation of a valid file is a span of its text, and what is written there instead.


@cache
def mutations(name: str) -> tuple[Document, list[tuple[int, int, str]]]:
    document = read_document(CONFIGS / f"{name}.json")
    return document, list(dict.fromkeys(_mutations(document)))


def _mutations(document: Document) -> Iterator[tuple[int, int, str]]:
    text = document.source.text
    selectors = ("/layer_type_quant_config/", "/layer_quant_config/", "/exclude/")
    for pointer, (start, end) in document.keys.items():
        if (
            "//" not in text[start:end]
            and "$" not in pointer
            and not pointer.startswith(selectors)
        ):
            yield from ((start, end, word) for word in misspelt(text[start:end]))
    for pointer, (start, end) in document.values.items():
        value, key = json.loads(text[start:end]), pointer.rpartition("/")[2]
        if key in ("//", "~1~1", "$schema", "layer_type", "layer_name") or pointer.startswith(
            selectors
        ):
            continue
        if isinstance(value, bool):
            yield from ((start, end, word) for word in (str(value), f'"{text[start:end]}"'))
        elif isinstance(value, (int, float)):
            yield start, end, f'"{text[start:end]}"'
        elif isinstance(value, str):
            yield from ((start, end, word) for word in misspelt(text[start:end]))
        elif value:
            before = len(text[: end - 1].rstrip())
            yield before, before, ","


def misspelt(word: str) -> Iterator[str]:
    """Two letters swapped, one left out, or all of them in another case."""
    if len(word) >= 8:
        yield word[:3] + word[4] + word[3] + word[5:]
        yield word[:2] + word[3:]
        yield word.swapcase()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_what_has_one_answer_is_restored(data: st.DataObject) -> None:
    document, known = mutations(data.draw(st.sampled_from(PRESETS)))
    chosen = data.draw(
        st.lists(
            st.sampled_from(known), min_size=1, max_size=4, unique_by=lambda edit: edit[:2]
        )
    )
    text = document.source.text
    for start, end, word in sorted(chosen, reverse=True):
        text = text[:start] + word + text[end:]
    assert json.loads(fix(text)) == document.value


DROPPED = [
    *(
        (key,)
        for key in EXAMPLE
        if key not in ("$schema", "//", "layer_quantize_config", "tensor_quantize_config")
    ),
    *(("overall_quantize_config", key) for key in PARAMETERS),
    *(
        ("layer_quantize_config", 0, key)
        for key in ("quantizable_data_type", "overall_quantize_config")
    ),
    *(("layer_quantize_config", 1, "overall_quantize_config", key) for key in PARAMETERS),
]


@settings(derandomize=True, max_examples=40, deadline=None)
@given(
    st.sampled_from(["default", "dpu", "example"]),
    st.sets(st.sampled_from(DROPPED), min_size=1),
    st.sampled_from([None, 2, "\t"]),
)
def test_dropped_keys_come_back(
    name: str, paths: set[tuple[str | int, ...]], indent: int | str | None
) -> None:
    """With the values of the ready config for the device, where the file is that one; nothing
    else changes.
    """
    complete = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    value = json.loads(json.dumps(complete))
    for path in sorted(
        paths - {("convert_silu_to_hswish",), ("target_device",)}, key=len, reverse=True
    ):
        if isinstance(path[1] if len(path) > 1 else "", str) or name == "example":
            value_at(value, path[:-1]).pop(path[-1])
    text = json.dumps(value, indent=indent)
    written = fix(text)
    assert [found for found in findings(written) if found.severity == "error"] == []
    assert name == "example" or json.loads(written) == complete
    steps = difflib.SequenceMatcher(None, text, written, autojunk=False).get_opcodes()
    assert "delete" not in {step[0] for step in steps}


@pytest.mark.parametrize("device", ["CPU", "GPU", "DPU"])
def test_a_file_that_names_its_device_only_is_completed_without_a_finding(device: str) -> None:
    assert findings(fix(json.dumps({"target_device": device}))) == ()


@pytest.mark.parametrize("text", ["{}", "{ }", "{\n}", '{"overall_quantize_config": {}}'])
def test_empty_objects_are_filled(text: str) -> None:
    assert findings(fix(text)) == ()


@pytest.mark.parametrize(
    ("stated", "written"),
    [
        ({"symmetry": False}, {"method": "maxmin", "signed": False, "narrow_range": False}),
        (
            {"method": "mse", "scale_type": "poweroftwo"},
            {"symmetry": True, "calib_statistic_method": "max"},
        ),
    ],
)
def test_what_is_filled_in_goes_with_what_is_stated(
    stated: dict[str, Any], written: dict[str, Any]
) -> None:
    text = fix(json.dumps(layered(overall_quantize_config=stated)))
    block = json.loads(text)["overall_quantize_config"]
    assert findings(text) == ()
    assert block == PARAMETERS | stated | written


@pytest.mark.parametrize(
    "stated",
    [
        {"method": "diffs"},
        {"calib_statistic_method": "modal"},
        {"calib_statistic_method": "modal", "scale_type": "poweroftwo"},
    ],
)
def test_where_the_usual_values_break_a_rule_none_is_offered(stated: dict[str, Any]) -> None:
    text = json.dumps(layered(overall_quantize_config=stated))
    [missing] = findings(text)
    assert (missing.code, missing.fixes) == ("QZ105", ())
    assert "paste" not in str(missing.help)
    assert fix(text) == text


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "layer_type": "add",
        "layer_name": None,
        "quantizable_data_type": ["weights", "activation"],
    } | changes


@pytest.mark.parametrize(
    ("top", "stated", "written"),
    [
        ({}, {}, {"overall_quantize_config": PARAMETERS}),
        (
            {
                "tensor_quantize_config": {
                    "activation": {"method": "mse"},
                    "bias": {"bit_width": 16},
                }
            },
            {},
            {
                "overall_quantize_config": PARAMETERS,
                "tensor_quantize_config": {"activation": {"method": "mse"}},
            },
        ),
        (
            {"tensor_quantize_config": {"activation": {"method": "mse", "bit_width": 4}}},
            {"tensor_quantize_config": {"activation": {"bit_width": 16}}},
            {
                "overall_quantize_config": PARAMETERS,
                "tensor_quantize_config": {"activation": {"bit_width": 16, "method": "mse"}},
            },
        ),
        (
            {},
            {"overall_quantize_config": {"symmetry": False}},
            {
                "overall_quantize_config": PARAMETERS
                | {"symmetry": False, "signed": False, "narrow_range": False}
            },
        ),
        (
            {"overall_quantize_config": {"datatype": "bfloat16"}},
            {},
            {"overall_quantize_config": {"datatype": "bfloat16"}},
        ),
        (
            {"overall_quantize_config": {"datatype": "bfloat16"}},
            {"overall_quantize_config": {"bit_width": 4}},
            {"overall_quantize_config": PARAMETERS | {"bit_width": 4, "datatype": "int"}},
        ),
        (
            {"tensor_quantize_config": {"activation": {"datatype": "float32"}}},
            {},
            {
                "overall_quantize_config": {"datatype": "int", **PARAMETERS},
                "tensor_quantize_config": {"activation": {"datatype": "float32"}},
            },
        ),
    ],
)
def test_a_layer_entry_goes_on_with_what_holds_for_each_tensor(
    top: dict[str, Any], stated: dict[str, Any], written: dict[str, Any]
) -> None:
    value = layered(layer_quantize_config=[entry(**stated)], **top)
    text = fix(json.dumps(value))
    assert [found for found in findings(text) if found.severity == "error"] == []
    assert json.loads(text)["layer_quantize_config"] == [entry(**written)]


def test_entries_are_completed_after_the_top_is_right() -> None:
    value = layered(
        target_device="dpu",
        overall_quantize_config=None,
        layer_quantize_config=[entry()],
        include_bias_corr=None,
    )
    written = json.loads(fix(json.dumps(value)))
    [layer] = written["layer_quantize_config"]
    assert (
        layer["overall_quantize_config"]
        == written["overall_quantize_config"]
        == DPU["overall_quantize_config"]
    )
    assert layer["tensor_quantize_config"] == DPU["tensor_quantize_config"]


def test_the_layout_of_the_file_is_kept() -> None:
    text = (
        '{\r\n\t"overall_quantize_config": {"bit_width": 4},\r\n\t"target_device": '
        '"DPU"\r\n}\r\n'
    )
    written = fix(text)
    assert written.startswith(
        '{\r\n\t"overall_quantize_config": {"bit_width": 4, "method": "diffs", "round_mode": '
        '"std_round"'
    )
    assert '\r\n\t"target_device": "DPU",\r\n\t"convert_relu6_to_relu": false,\r\n\t' in written
    assert written.count("\n") == written.count("\r\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'exclude': ['a'], global_quant_config: {'weight': None,},}", {"weight": None}),
        ('{"global_quant_config": {"weight": {"dtype": "int8", "symmetric": TRUE}}}', None),
        (
            '{"global_quant_config": {"weight": {"dtype": "int8", "is_dynamic": "no", '
            '"ch_axis": "-1"}}}',
            None,
        ),
    ],
)
def test_the_syntax_of_other_languages_is_turned_into_json(text: str, value: Any) -> None:
    found = json.loads(fix(text))["global_quant_config"]
    assert found == (value or json.loads(json.dumps(found)))
    assert [f.code for f in findings(fix(text)) if f.severity == "error"] == []


def test_a_new_block_is_indented_as_the_file_is() -> None:
    written = fix(json.dumps(layered(overall_quantize_config=None), indent=1))
    assert '\n "overall_quantize_config": {\n  "bit_width": 8,\n  "method"' in written


BROKEN_BY_ITSELF = [
    (
        {"overall_quantize_config": PARAMETERS | {"method": "entropyy", "symmetry": False}},
        "QZ101",
        "entropy",
    ),
    ({"overall_quantize_config": PARAMETERS | {"bit_width": "64"}}, "QZ103", "64"),
    ({"target_device": "dpu"}, "QZ101", "DPU"),
    ({"tensor_quantize_config": {"activation": {"metod": "mse"}}, "symetry": 1}, "QZ102", None),
    (
        {"tensor_quantize_config": {"activation": {"symetry": False, "method": "mse"}}},
        "QZ102",
        "did you mean",
    ),
]


@pytest.mark.parametrize(("changes", "code", "refused"), BROKEN_BY_ITSELF)
def test_a_fix_that_breaks_a_rule_is_neither_offered_nor_written(
    changes: dict[str, Any], code: str, refused: str | None
) -> None:
    text = json.dumps(layered(**changes))
    found = next(found for found in findings(text) if found.code == code)
    if refused is None:  # the key can be corrected, though another finding stays
        assert '"method": "mse"' in fix(text)
        return
    assert found.fixes == ()
    assert found.help and refused not in found.help
    assert fix(text) == text


def test_what_can_be_fixed_is_and_the_rest_is_listed() -> None:
    value = layered(
        include_cle="yes",
        target_device="TPU",
        quantizable_data_type=["weights", "bias", "weights"],
    )
    written = fix(json.dumps(value))
    assert json.loads(written) == value | {
        "include_cle": True,
        "quantizable_data_type": ["weights", "bias"],
    }
    assert [found.code for found in findings(written)] == ["QZ101"]


def test_a_misspelt_block_is_renamed_whatever_is_wrong_in_it() -> None:
    value = layered(tensor_quantize_confg={"activation": {"method": "fast", "bit_widht": "4"}})
    written = fix(json.dumps(value))
    assert json.loads(written)["tensor_quantize_config"] == {
        "activation": {"method": "fast", "bit_width": 4}
    }
    assert [found.code for found in findings(written)] == ["QZ101"]


@pytest.mark.parametrize("form", ["algo_config", "algorithms"])
def test_the_misspelt_name_of_an_algorithm_is_an_error(form: str) -> None:
    value = {form: [{"nae": "gptq", "bit": 4}]}
    if form == "algo_config":
        value |= {"global_quant_config": {"weight": {"dtype": "int4"}}}
    else:
        value = layered(**value)
    [finding] = findings(json.dumps(value))
    assert (finding.code, finding.help) == ("QZ102", 'did you mean "name"?')


@pytest.mark.parametrize(
    ("levels", "dtype"),
    [
        ({"layer_quant_config": {"fc": {"weight": {"ch_axis": 0}}}}, "int4"),
        ({"layer_type_quant_config": {"Linear": {"weight": {"ch_axis": 0}}}}, "int4"),
        (
            {
                "layer_type_quant_config": {"Linear": {"weight": {"dtype": "int8"}}},
                "layer_quant_config": {"fc": {"weight": {"ch_axis": 0}}},
            },
            None,
        ),
        ({"layer_quant_config": {"fc": {"bias": {"symmetric": True}}}}, None),
    ],
)
def test_a_dtype_is_that_of_the_wider_levels_if_they_agree(
    levels: dict[str, Any], dtype: str | None
) -> None:
    text = json.dumps({"global_quant_config": {"weight": {"dtype": "int4"}}, **levels})
    [found] = [found for found in findings(text) if found.code == "QZ105"]
    assert str(found.help).startswith(
        f'paste "dtype": "{dtype}"' if dtype else 'for example "dtype": '
    )
    assert (fix(text) != text) == bool(dtype)


def test_examples_are_tried_too() -> None:
    """Where the first value that comes to mind breaks a rule, another one is shown."""
    spec = {
        "dtype": "wide",
        "qscheme": "per_group",
        "ch_axis": 1,
        "group_size": 32,
        "scale_format": "e8m0",
    }
    for document in (
        parse_document(Text("net.json", json.dumps({"global_quant_config": {"weight": spec}}))),
        Document.of({"global_quant_config": {"weight": spec}}, "Config"),
    ):
        [found] = check_document(document).diagnostics
        assert found.help == 'for example "dtype": "fp8_e4m3"'


def test_a_conflict_in_python_keeps_its_help_beside_a_fix() -> None:
    """Places of Python values sort by name, and those of a text by line."""
    value = layered(overall_quantize_config=PARAMETERS | {"signed": False}, include_cle="yes")
    by_code = {}
    for found in check_document(Document.of(value, "Config")).diagnostics:
        by_code[found.code] = found.help
    assert by_code["QZ103"] == "write true"
    assert str(by_code["QZ321"]).startswith('write "signed": true')
