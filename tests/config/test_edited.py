"""A changed config keeps the layout of its file: only lines with changed values differ."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from quantizer.config.document.document import Document, Text
from quantizer.config.document.edited import edited_text
from quantizer.config.document.read import parse_document

CONFIGS = Path(__file__).parents[2] / "configs"
HAND_WRITTEN = """{
    "//": "why it is so",

    "exclude": ["lm_head"],   "layer_quant_config": {
        "a.*":  {"weight": {"dtype": "int8"}},

        "//": "between",
        "b":    {"weight": {"dtype": "int4"}}
    }
}
"""


def parsed(text: str) -> Document:
    return parse_document(Text("net.json", text))


def test_what_does_not_change_keeps_its_layout() -> None:
    document = parsed(HAND_WRITTEN)
    changed = copy.deepcopy(document.value)
    assert edited_text(document, changed) == HAND_WRITTEN
    changed["layer_quant_config"]["b"]["weight"]["dtype"] = "int3"
    changed["exclude"].append("head")
    changed["layer_quant_config"]["c"] = {"weight": {"dtype": "int2"}}
    expected = HAND_WRITTEN.replace(
        '"int4"}}', '"int3"}},\n        "c": {"weight": {"dtype": "int2"}}'
    )
    expected = expected.replace('["lm_head"]', '["lm_head", "head"]')
    assert edited_text(document, changed) == expected


def test_a_member_that_moves_to_the_end_stands_there() -> None:
    document = parsed(HAND_WRITTEN)
    changed = copy.deepcopy(document.value)
    level = changed["layer_quant_config"].pop("a.*")
    changed["layer_quant_config"]["a.*"] = level
    text = edited_text(document, changed)
    assert list(json.loads(text)["layer_quant_config"]) == ["//", "b", "a.*"]
    assert text.count("\n") == HAND_WRITTEN.count("\n") - 1


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_new_members_are_indented_as_the_others(newline: str) -> None:
    text = newline.join(["{", '\t"exclude": [],', '\t"//": {}', "}"])
    document = parsed(text)
    names = [f"a layer with a long name, number {number}" for number in range(3)]
    changed = edited_text(document, {"exclude": names, "//": {}})
    quoted = f",{newline}\t\t".join(json.dumps(name) for name in names)
    assert changed == text.replace("[]", f"[{newline}\t\t{quoted}{newline}\t]")


def test_a_config_without_text_is_written_in_full() -> None:
    value = {"exclude": ["head"]}
    assert (
        edited_text(Document.of(value, "Config"), value) == json.dumps(value, indent=2) + "\n"
    )


def drawn(rng: random.Random, value: Any) -> Any:
    """The value with some of it changed, removed, added and moved."""
    if isinstance(value, dict):
        for key in [*value]:
            member = value.pop(key)
            if rng.random() < 0.9:
                value[key] = drawn(rng, member)
        if rng.random() < 0.3:
            value[f"new {rng.random()}"] = rng.choice([1, [], {"a": {}}, ["y" * 40, "z" * 60]])
        if value and rng.random() < 0.3:
            key = rng.choice([*value])
            value[key] = value.pop(key)
        return value
    if isinstance(value, list):
        items = [drawn(rng, item) for item in value if rng.random() < 0.8]
        if rng.random() < 0.3:
            items.insert(rng.randrange(len(items) + 1), {"new": rng.random()})
        return items
    return rng.choice([value, value, value, 1.5, {"n": None}])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_the_text_has_the_changed_values_in_their_order(path: Path) -> None:
    rng = random.Random(0)
    value = json.loads(path.read_text())
    spellings = [
        path.read_text(),
        json.dumps(value),
        json.dumps(value, indent=4).replace("\n", "\r\n"),
        json.dumps(value, indent="\t", separators=(" ,", " : ")),
    ]
    for text in spellings:
        for _ in range(10):
            changed = drawn(rng, copy.deepcopy(value))
            written = edited_text(parsed(text), changed)
            assert json.dumps(json.loads(written)) == json.dumps(changed)
