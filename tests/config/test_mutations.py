"""Every key of a valid file, misspelt, of a wrong type or with another's value: an error on its
line, and a hint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st

from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document.document import Document, Text, path_from
from quantizer.config.document.read import parse_document, read_document
from quantizer.config.load import check_document, fix_text

CONFIGS = Path(__file__).parents[2] / "configs"
HIERARCHICAL = ("weight_int4_group", "dynamic_int8", "mxfp4")
WORDS = [
    "half_up",
    "percentile",
    "poweroftwo",
    "median",
    "DPU",
    "weights",
    "bfloat16",
    True,
    8,
    0.5,
    None,
    [],
    {},
    "x",
]
# A file of each form; the others have the same keys, so a third does, as it does for a key that
# stands in the file again
EVERY_WORD = ("example", "weight_int4_group")
MAY_BE = {
    "onnx_opset_version": {8},
    "percentage": {8, 0.5},
    "datatype": {"bfloat16"},
    "dtype": {"bfloat16"},
    "scale_type": {"poweroftwo"},
    "round_method": {"half_up"},
    "group_size": {8},
}
NULLABLE = {
    *(
        "input_tensors",
        "weight",
        "target_device",
        "is_dynamic",
        "observer_cls",
        "qscheme",
        "ch_axis",
        "group_size",
    ),
    *("symmetric", "round_method", "scale_type", "mx_element_dtype"),
}


def members() -> Iterator[Any]:
    for name in ("example", "dpu", *HIERARCHICAL):
        document = read_document(CONFIGS / f"{name}.json")
        for pointer in document.keys:
            if not pointer.endswith(("/$schema", "//", "~1~1")):
                yield pytest.param(document, pointer, id=f"{name}{pointer}")


def with_replaced(
    document: Document, span: tuple[int, int], text: str
) -> tuple[Diagnostic, ...]:
    start, end = span
    source = document.source
    changed = source.text[:start] + text + source.text[end:]
    return check_document(parse_document(Text(source.name, changed))).diagnostics


def errors_at(diagnostics: tuple[Diagnostic, ...], line: int) -> list[Diagnostic]:
    return [
        found
        for found in diagnostics
        if found.severity == "error" and found.place and found.place.line == line
    ]


def line_at(document: Document, pointer: str, *, key: bool = False) -> int:
    place = document.place(*path_from(pointer), key=key)
    assert place
    return place.line


@pytest.mark.parametrize(("document", "pointer"), list(members()))
def test_misspelt_key(document: Document, pointer: str) -> None:
    key = pointer.rpartition("/")[2]
    misspelt = key[:-2] + key[-1] + key[-2] + "x"
    found = with_replaced(document, document.keys[pointer], json.dumps(misspelt))
    [error] = errors_at(found, line_at(document, pointer, key=True))
    assert error.code == "QZ102"
    assert key in str(error.help)


@pytest.mark.slow
@pytest.mark.parametrize(("document", "pointer"), list(members()))
def test_value_of_another_kind(document: Document, pointer: str) -> None:
    key, line = pointer.rpartition("/")[2], line_at(document, pointer)
    start, end = document.values[pointer]
    now = json.loads(document.source.text[start:end])
    first = next(
        other for other in document.keys if block_and_key(other) == block_and_key(pointer)
    )
    words = WORDS[len(pointer) % 3 :: 3]
    if Path(document.source.name).stem in EVERY_WORD and pointer == first:
        words = WORDS
    for word in words:
        if fits(key, word, now):
            continue
        errors = errors_at(with_replaced(document, (start, end), json.dumps(word)), line)
        assert errors, (key, word)
        assert all(error.help for error in errors)


def block_and_key(pointer: str) -> list[str]:
    """Return the names of a key and of the block that it stands in."""
    names = [name for name in pointer.split("/") if not name.isdigit()]
    return names[-2:]


def fits(key: str, word: Any, now: Any) -> bool:
    """Whether `word` is a legal value of `key`, so that no error is due."""
    if word in ({}, []):
        return isinstance(now, type(word))
    if key in NULLABLE and word is None:
        return True
    if isinstance(now, bool) or isinstance(word, bool):
        return isinstance(now, bool) and isinstance(word, bool)
    if key == "ch_axis" and word == 8:
        return False
    if key in ("layer_type", "layer_name"):
        return isinstance(word, str) or word is None
    options = {
        "method": {"percentile"},
        "round_mode": {"half_up"},
        "scale_type": {"poweroftwo"},
        "calib_statistic_method": {"median"},
        "target_device": {"DPU"},
        "bit_width": {8},
    }
    return word is not None and word in {**options, **MAY_BE}.get(key, set())


CONFIG_LIKE = st.recursive(
    st.sampled_from([*WORDS, "maxmin", "torch.nn.Conv2d"]) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "overall_quantize_config",
                    "tensor_quantize_config",
                    "layer_quantize_config",
                    "quantizable_data_type",
                    "weights",
                    "method",
                    "symmetry",
                    "per_channel",
                    "datatype",
                    "target_device",
                    "layer_name",
                    "layer_type",
                    "bit_width",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(CONFIG_LIKE.filter(lambda value: isinstance(value, dict)))
def test_any_json_value_gives_diagnostics_only(value: dict[str, Any]) -> None:
    document = parse_document(Text("net.json", json.dumps(value)))
    result = check_document(document)
    assert result.config is None
    assert all(found.place for found in result.diagnostics)
    assert_fixes_end(document.source, result.diagnostics)


def assert_fixes_end(source: Text, before: tuple[Diagnostic, ...]) -> None:
    """What fixes leave was there before, or inside what they made readable, and there is
    nothing more to fix.
    """
    text, count = fix_text(source)
    left = check_document(parse_document(text)).diagnostics
    assert [found.fixes for found in left if found.fixes] == []
    assert count or left == before


HIERARCHICAL_LIKE = st.recursive(
    st.sampled_from(
        [
            *WORDS,
            "int4",
            "mx",
            "per_group",
            "per_token",
            "PerChannelMinMaxObserver",
            "e8m0",
            "awq",
            "re:(",
        ]
    )
    | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "layer_type_quant_config",
                        "layer_quant_config",
                        "exclude",
                        "algo_config",
                        "weight",
                    ),
                    *(
                        "input_tensors",
                        "dtype",
                        "axis",
                        "ch_axis",
                        "qscheme",
                        "group_size",
                        "is_dynamic",
                        "dynamic",
                    ),
                    *(
                        "observer_cls",
                        "symmetric",
                        "round_method",
                        "scale_format",
                        "name",
                        "Dense",
                        "target_device",
                    ),
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(derandomize=True, max_examples=80, deadline=None)
@given(HIERARCHICAL_LIKE, HIERARCHICAL_LIKE)
def test_any_value_in_the_hierarchical_form_gives_diagnostics_only(
    value: Any, rest: Any
) -> None:
    document = {
        **(rest if isinstance(rest, dict) else {}),
        "global_quant_config": {"weight": value},
    }
    source = Text("net.json", json.dumps(document))
    result = check_document(parse_document(source))
    assert_fixes_end(source, result.diagnostics)
    dotted = check_document(Document.of(document, "Config"))
    assert (result.config is None) == any(
        found.severity == "error" for found in result.diagnostics
    )
    assert sorted(found.code for found in dotted.diagnostics) == sorted(
        found.code for found in result.diagnostics
    )
    assert all(found.place for found in result.diagnostics)
