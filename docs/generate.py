"""Writes what follows from the schemas and from the table of algorithms: the part on algorithms
in both schemas, the editor's rules in layered.schema.json, the range methods in
quantization_spec.schema.json, docs/config and docs/rules.md.

Run `python docs/generate.py` after a change to a rule, a description or a setting; a test fails
while one is stale.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantizer.config.algorithm_schema import form_schema
from quantizer.config.forms.form import block_of
from quantizer.config.forms.layered import FIELDS
from quantizer.config.model import CAST_ONLY, ROLES, Role
from quantizer.config.pages import key_names, key_page, rules_page
from quantizer.errors import QuantizerError

ROOT = Path(__file__).parents[1]
LAYERED = ROOT / "schemas" / "layered.schema.json"
HIERARCHICAL = ROOT / "schemas" / "hierarchical.schema.json"
SPEC = ROOT / "schemas" / "quantization_spec.schema.json"

_WORDS = {field: word for word, field in FIELDS.items()}
_TENSOR = "tensor_quantize_config"
_DEVICES: Mapping[str, tuple[str, ...]] = {"": (), "_DPU": ("DPU",), "_CPU_GPU": ("CPU", "GPU")}
"""What ends the names of definitions, and the devices that their rules are about; those of the
first are about all.
"""


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    pages = {ROOT / "docs" / "config" / f"{key}.md": key_page(key) for key in key_names()}
    schemas = {HIERARCHICAL: text_of(form_schema("hierarchical")), LAYERED: layered_schema()}
    schemas[SPEC] = spec_schema()
    return {**schemas, **pages, ROOT / "docs" / "rules.md": rules_page()}


def spec_schema() -> str:
    """Return the spec schema with the range methods that the layered schema describes."""
    methods = block_of("layered", "parameters")["properties"]["method"]["enum"]
    before, _, after = re.split(
        r'(?<="method": {"enum": )(\[.*?\])', SPEC.read_text("utf-8"), maxsplit=1
    )
    return before + json.dumps(methods) + after


def layered_schema() -> str:
    """The layered schema with the errors of the spec schema, for editors; a schema knows no
    warnings.
    """
    schema = {**form_schema("layered")}
    spec = json.loads(SPEC.read_text("utf-8"))
    every = (*spec["then"]["allOf"], *spec["allOf"])
    rules = [
        rule
        for rule in every
        if rule.get("form") != "hierarchical" and rule.get("severity") != "warning"
    ]
    own = {
        name: entry
        for name, entry in schema["definitions"].items()
        if not name.startswith("rules")
    }
    schema["definitions"] = {**own, **_definitions(rules)}
    schema["allOf"] = [_ref("rules")]
    for name, devices in _DEVICES.items():
        if devices:
            condition = {
                "properties": {"target_device": {"enum": [*devices]}},
                "required": ["target_device"],
            }
            schema["allOf"].append({"if": condition, "then": _ref(f"rules{name}")})
    return text_of(schema)


def text_of(schema: Mapping[str, Any]) -> str:
    """A schema as its file has it."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _definitions(rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rules of a level: the file, or an entry, which are alike in that a role's block
    overrides the overall one.
    """
    definitions: dict[str, Any] = {}
    for role in ROLES:
        for word in ("datatype", *_words_of(rules, role)):
            definitions[f"rules_{role}_states_{word}"] = _inside(
                _TENSOR, role, {"type": "object", "required": [word]}, held=True
            )
        floats = _says(role, "datatype", {"enum": sorted(CAST_ONLY)}, held=True)
        listed = {"properties": {"quantizable_data_type": {"contains": {"const": role}}}}
        definitions[f"rules_{role}_is_integers"] = {"allOf": [listed, {"not": floats}]}
    for name, devices in _DEVICES.items():
        found = {
            role: [_merged(rule, role) for rule in rules if _holds(rule, devices, role)]
            for role in ROLES
        }
        level = [
            {"if": _ref(f"rules_{role}_is_integers"), "then": {"allOf": found[role]}}
            for role in ROLES
            if found[role]
        ]
        entries = {
            "properties": {"layer_quantize_config": {"items": _ref(f"rules_of_a_level{name}")}}
        }
        definitions[f"rules_of_a_level{name}"] = {"allOf": level}
        definitions[f"rules{name}"] = {"allOf": [_ref(f"rules_of_a_level{name}"), entries]}
    return definitions


def _words_of(rules: Sequence[Mapping[str, Any]], role: Role) -> list[str]:
    """The words that rules about a role read."""
    about = [
        rule for rule in rules for devices in _DEVICES.values() if _holds(rule, devices, role)
    ]
    parts = [part for rule in about for part in (rule["if"], rule["then"])]
    return sorted({word for part in parts for word in _in_words(part["properties"])})


def _holds(rule: Mapping[str, Any], devices: Sequence[str], role: Role) -> bool:
    """Whether the rule is about this role, and about these devices and no others."""
    context = {
        key: entry
        for key, entry in rule["if"]["properties"].items()
        if key in ("tensor", "target_device")
    }
    named = {key: entry.get("enum", [entry.get("const")]) for key, entry in context.items()}
    known = {device for each in _DEVICES.values() for device in each}
    return role in named.get("tensor", [role]) and known.intersection(
        named.get("target_device", ())
    ) == {*devices}


def _merged(rule: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """The rule about what holds for a role where its own block and the overall one are
    merged.
    """
    conditions = [
        _says(role, word, entry, held=True)
        for word, entry in _in_words(rule["if"]["properties"]).items()
    ]
    leaves = _in_words(rule["then"]["properties"]).items()
    [found] = [_says(role, word, {**entry, "code": rule["code"]}) for word, entry in leaves]
    return {"if": {"allOf": conditions}, "then": found} if conditions else found


def _says(
    role: Role, word: str, entry: Mapping[str, Any], *, held: bool = False
) -> dict[str, Any]:
    """Whether the word's value fits `entry`; with `held` it has to be there.

    In an overall block, `per_channel` is about weights alone.
    """
    own = _inside(_TENSOR, role, {"properties": {word: entry}})
    wide = _inside(
        "overall_quantize_config",
        {"properties": {word: entry}} | ({"required": [word]} if held else {}),
    )
    otherwise = {"else": wide} if word != "per_channel" or role == "weights" else {}
    return {"if": _ref(f"rules_{role}_states_{word}"), "then": own, **otherwise}


def _inside(*path: Any, held: bool = False) -> dict[str, Any]:
    """A schema of what is at a path, of which the last part is the schema there; with `held` it
    has to be there.
    """
    *keys, found = path
    for key in reversed(keys):
        found = {"properties": {key: found}} | ({"required": [key]} if held else {})
    return dict(found)


def _in_words(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _WORDS[name]: _value_in_words(name, entry)
        for name, entry in properties.items()
        if name in _WORDS
    }


def _value_in_words(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if name != "qscheme":
        return entry
    return {**entry, "enum": [option == "per_channel" for option in entry["enum"]]}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/definitions/{name}"}


if __name__ == "__main__":
    try:
        files = generated()
    except QuantizerError as error:
        raise SystemExit(str(error)) from None
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
