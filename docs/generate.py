"""Writes what follows from the schemas and from the table of algorithms: the part on algorithms in both schemas, the
editor's rules in layered.schema.json, docs/config and docs/rules.md.

Run `python docs/generate.py` after a change to a rule, a description or a setting; a test fails while one is stale."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.config.algorithm_schema import form_schema
from quantizer.config.layered import FIELDS
from quantizer.config.model import ROLES
from quantizer.config.pages import key_names, key_page, rules_page

ROOT = Path(__file__).parents[1]
LAYERED = ROOT / "schemas" / "layered.schema.json"
HIERARCHICAL = ROOT / "schemas" / "hierarchical.schema.json"
SPEC = ROOT / "schemas" / "quantization_spec.schema.json"

_WORDS = {field: word for word, field in FIELDS.items()}
_FLOATS = {"properties": {"datatype": {"enum": ["float16", "bfloat16", "float32"]}}, "required": ["datatype"]}
_DEVICES = ("DPU", "CPU", "GPU")


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    pages = {ROOT / "docs" / "config" / f"{key}.md": key_page(key) for key in key_names()}
    schemas = {HIERARCHICAL: text_of(form_schema("hierarchical")), LAYERED: layered_schema()}
    return {**schemas, **pages, ROOT / "docs" / "rules.md": rules_page()}


def layered_schema() -> str:
    """The layered schema with the rules of the spec schema, for editors."""
    schema = {**form_schema("layered")}
    spec = json.loads(SPEC.read_text("utf-8"))
    rules = [rule for rule in (*spec["then"]["allOf"], *spec["allOf"]) if rule.get("form") != "hierarchical"]
    own = {name: entry for name, entry in schema["definitions"].items() if not name.startswith("rules")}
    schema["definitions"] = {**own, **_definitions(rules)}
    schema["allOf"] = [_ref("rules_everywhere")]
    for device in _DEVICES:
        condition = {"properties": {"target_device": {"const": device}}, "required": ["target_device"]}
        schema["allOf"].append({"if": condition, "then": _ref(f"rules_everywhere_{device}")})
    return text_of(schema)


def text_of(schema: Mapping[str, Any]) -> str:
    """A schema as its file has it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _definitions(rules: list[dict[str, Any]]) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    for device in (None, *_DEVICES):
        for role in (None, *ROLES):
            held = [
                _translated(rule)
                for rule in rules
                if _holds(rule, "target_device", device) and _holds(rule, "tensor", role)
            ]
            if held:
                definitions[_name("rules", device, role)] = {"if": {"not": _FLOATS}, "then": {"allOf": held}}
        blocks, everywhere = _name("rules_blocks", device), _name("rules_everywhere", device)
        definitions[blocks] = {"properties": _blocks(definitions, device)}
        definitions[everywhere] = {
            "allOf": [_ref(blocks), {"properties": {"layer_quantize_config": {"items": _ref(blocks)}}}]
        }
    return definitions


def _blocks(definitions: dict[str, Any], device: str | None) -> dict[str, Any]:
    """Which rules hold in an overall block, and in each tensor's block."""
    everywhere = _name("rules", device)
    by_role = {
        role: {"allOf": [_ref(name) for name in (everywhere, _name("rules", device, role)) if name in definitions]}
        for role in ROLES
    }
    tensors = {role: entry for role, entry in by_role.items() if entry["allOf"]}
    overall = {"overall_quantize_config": _ref(everywhere)} if everywhere in definitions else {}
    return {**overall, "tensor_quantize_config": {"properties": tensors}}


def _holds(rule: dict[str, Any], context: str, value: str | None) -> bool:
    """Whether the rule is about this device or tensor and no wider one; None: whether it is about all."""
    condition = rule["if"]["properties"].get(context)
    if condition is None or value is None:
        return condition is None and value is None
    return value in condition.get("enum", [condition.get("const")])


def _translated(rule: dict[str, Any]) -> dict[str, Any]:
    conditions = _in_words({name: entry for name, entry in rule["if"]["properties"].items() if name in _WORDS})
    leaves = {word: {**entry, "code": rule["code"]} for word, entry in _in_words(rule["then"]["properties"]).items()}
    if not conditions:
        return {"properties": leaves}
    return {"if": {"properties": conditions, "required": list(conditions)}, "then": {"properties": leaves}}


def _in_words(properties: dict[str, Any]) -> dict[str, Any]:
    return {_WORDS[name]: _value_in_words(name, entry) for name, entry in properties.items()}


def _value_in_words(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if name != "qscheme":
        return entry
    return {**entry, "enum": [option == "per_channel" for option in entry["enum"]]}


def _name(*parts: str | None) -> str:
    return "_".join(part for part in parts if part)


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}


if __name__ == "__main__":
    for path, text in generated().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
