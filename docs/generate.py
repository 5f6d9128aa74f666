"""Write what follows from the schemas, from the table of algorithms and from that of formats.

These are: the marked parts of pages (PARTS); the table of what was tested in README.md;
quantizer/__init__.pyi; the part on algorithms in both schemas; the rules for editors in
layered.schema.json; the options of method, round_mode and dtype in
quantization_spec.schema.json; the lines that install the package in README.md, CONTRIBUTING.md
and docs/. Pages that follow from the package as a whole are made with the site
(docs/site_pages.py).

Run `python docs/generate.py` after a change to a rule, a description, a setting, a preset or a
number format. A test fails while a file is stale.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# This file is run as a program and loaded by a test.
sys.path.append(str(Path(__file__).parent))

from engine_table import tables_of_engines
from family_table import tables_of_families
from install_lines import PUBLISHED, repository, with_install_lines
from marked_parts import with_part
from stub import stub
from tested_table import with_table

from quantizer.commands.start.start import convert_config
from quantizer.config.algorithm_schema import generated_schema
from quantizer.config.forms.form import Form, block_of
from quantizer.config.forms.layered import FIELDS
from quantizer.config.forms.types import RoundType
from quantizer.config.load import load_config
from quantizer.config.model import CAST_ONLY, ROLES, Role
from quantizer.config.resources import presets
from quantizer.config.schema_words import with_words
from quantizer.errors import QuantizerError
from quantizer.export.destinations import DESTINATIONS
from quantizer.export.targets import EXPORTERS
from quantizer.plugins import GROUP
from quantizer.tables import METRICS

ROOT = Path(__file__).parents[1]
LAYERED = ROOT / "schemas" / "layered.schema.json"
HIERARCHICAL = ROOT / "schemas" / "hierarchical.schema.json"
STUB = ROOT / "quantizer" / "__init__.pyi"
SPEC = ROOT / "schemas" / "quantization_spec.schema.json"

_WORDS = {field: word for word, field in FIELDS.items()}
_TENSOR = "tensor_quantize_config"
_DEVICES: Mapping[str, tuple[str, ...]] = {"": (), "_DPU": ("DPU",), "_CPU_GPU": ("CPU", "GPU")}
"""What ends the names of definitions, and the devices that their rules are about; those of the
first are about all.
"""


def generated() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    hierarchical = with_words(HIERARCHICAL.name, generated_schema("hierarchical"))
    schemas = {HIERARCHICAL: text_of(hierarchical), LAYERED: layered_schema()}
    schemas[SPEC] = spec_schema()
    pages = {}
    for name, (place, text_of_part) in PARTS.items():
        path = ROOT / "docs" / place
        pages[path] = with_part(path.read_text("utf-8"), name, text_of_part())
    readme = ROOT / "README.md"
    pages[readme] = with_table(readme.read_text("utf-8"), ROOT / "tests")
    for path in [readme, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        text = pages.get(path) or path.read_text("utf-8")
        pages[path] = with_install_lines(text, published=PUBLISHED, address=repository())
    return {**schemas, **pages, STUB: stub()}


def table_of_destinations() -> str:
    """Return a row for each destination of `quantizer run`."""
    rows = []
    for name, destination in DESTINATIONS.items():
        without_data = "refused"
        if destination.without_data is not None:
            without_data = f"`{destination.without_data}`"
        file = f"`{EXPORTERS[destination.target].suffix}`"
        if destination.transformers_target is not None:
            file += f", `{EXPORTERS[destination.transformers_target].suffix}` folder"
        cells = [f"`{name}`", destination.made, f"`{destination.preset}`", without_data, file]
        rows.append(cells)
    return _table(["`--to`", "makes", "preset with data", "preset without data", "file"], rows)


def table_of_metrics() -> str:
    """Return a row for each metric."""
    rows = []
    for name, words in METRICS.items():
        title = name if "`" in name else f"`{name}`"
        rows.append([title, words.unit, words.better, words.meaning])
    return _table(["metric", "unit, range", "better", "what it is"], rows)


def table_of_conversions() -> str:
    """Return a row for each preset that the other form of the config can express."""
    rows = []
    for name in presets():
        config = load_config(ROOT / "configs" / f"{name}.json").require()
        other: Form = "hierarchical" if config.form == "layered" else "layered"
        findings = convert_config(config, other).findings
        if all(finding.severity != "error" for finding in findings):
            remarks = ". ".join(finding.message for finding in findings)
            rows.append([f"`{name}`", config.form, remarks])
    return _table(["preset", "form", "what may differ in the other form"], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    head = f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|\n"
    return head + "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


PARTS: Mapping[str, tuple[str, Callable[[], str]]] = {
    "destinations": ("one_command.md", table_of_destinations),
    "metrics": ("metrics.md", table_of_metrics),
    "conversions": ("convert.md", table_of_conversions),
    "engines": ("engine_results.md", tables_of_engines),
    "families": ("family_results.md", tables_of_families),
}
"""The parts of pages that are written here: the page of each, and what returns its text."""


def spec_schema() -> str:
    """Return the spec schema with the words that the other schemas have for rounding modes, and
    the tables for methods and number formats; also in the rules that list methods.
    """
    round_modes = list(block_of("layered", "parameters")["properties"]["round_mode"]["enum"])
    for word in block_of("hierarchical", "spec")["properties"]["round_method"]["enum"]:
        if word is None:
            continue
        mode = RoundType[word].value
        if mode not in round_modes:
            round_modes.append(mode)
    text = SPEC.read_text("utf-8")
    written = with_words(SPEC.name, json.loads(text))
    options = {"round_mode": round_modes}
    for field in ("dtype", "method"):
        options[field] = written["properties"][field]["enum"]
    for field, words in options.items():
        start = f'"{field}": {{"enum": '
        text = _replaced(text, rf"(?<={re.escape(start)})\[.*?\]", json.dumps(words))
    for rule in written["then"]["allOf"]:
        if "$comment" not in rule:
            continue
        listing = (rule["if"]["properties"] | rule["then"]["properties"])["method"]
        start = rf'("code": "{rule["code"]}".*?"method": {{\s*"enum": )'
        text = _replaced(text, rf"{start}\[.*?\]", rf"\1{json.dumps(listing['enum'])}")
        if "errorMessage" in listing:
            message = json.dumps(listing["errorMessage"])
            text = _replaced(
                text, rf'{start}(\[.*?\],\s*"errorMessage": )".*?"', rf"\1\2{message}"
            )
    return text


def _replaced(text: str, pattern: str, new: str) -> str:
    """Return a text with the first match of a pattern replaced."""
    return re.sub(pattern, new, text, count=1, flags=re.DOTALL)


def layered_schema() -> str:
    """The layered schema with the errors of the spec schema, for editors; a schema knows no
    warnings.
    """
    schema = {**with_words(LAYERED.name, generated_schema("layered"))}
    spec = json.loads(spec_schema())
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
    if entry_points(group=GROUP):
        raise SystemExit("uninstall the plug-ins of other packages first")
    try:
        files = generated()
    except QuantizerError as error:
        raise SystemExit(str(error)) from None
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
