"""A changed document is written with the layout that it had."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from quantizer.config.document.document import Text
from quantizer.config.document.read import parse_document
from quantizer.config.document.rewrite import in_preset_layout, rewritten

CONFIGS = Path(__file__).parents[2] / "configs"
OF_ITS_OWN_LAYOUT = "example.json"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_presets_have_the_layout_that_is_written(path: Path) -> None:
    text = path.read_text("utf-8")
    document = parse_document(Text(path.name, text))
    assert rewritten(document, document.value) == text
    if path.name != OF_ITS_OWN_LAYOUT:
        assert in_preset_layout(document.value) + "\n" == text


def test_what_has_not_changed_keeps_its_text() -> None:
    text = (
        '{ "//": "mine",\n   "a": {"x":1,"y" : [1,\n2]},\n "b": 3.0,\n "c": [{"k":  1}, 2]}\n\n'
    )
    document = parse_document(Text("net.json", text))
    value = copy.deepcopy(document.value)
    value["b"] = 4
    value["c"].append({"new": True})
    changed = rewritten(document, value)
    assert json.loads(changed) == value
    assert '{"x":1,"y" : [1,\n2]}' in changed
    assert '{"k":  1}' in changed
    assert '"//": "mine"' in changed
    assert changed.endswith("}\n\n")


def test_nested_values_change_in_place() -> None:
    text = (CONFIGS / "gptq_int4_group.json").read_text("utf-8")
    document = parse_document(Text("net.json", text))
    value = copy.deepcopy(document.value)
    value["global_quant_config"]["weight"]["group_size"] = 64
    assert rewritten(document, value) == text.replace('"group_size": 128', '"group_size": 64')
    value["exclude"].append("layers.*.router")
    del value["algo_config"]
    assert '"exclude": ["kind:embedding", "kind:head", "layers.*.router"]\n}' in rewritten(
        document, value
    )


def test_long_lists_have_an_item_a_line() -> None:
    names = [f"model.layers.{index}.attention.projection" for index in range(4)]
    assert in_preset_layout({"exclude": names}).splitlines()[2:4] == [
        f'    "{names[0]}",',
        f'    "{names[1]}",',
    ]


def test_true_is_no_one() -> None:
    document = parse_document(Text("net.json", '{"a": 1}'))
    assert rewritten(document, {"a": True}) == '{\n  "a": true\n}'
