"""The keys that a file lacks, with the values to write, and the text with them written in; the rest stays as it is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quantizer.config.document import Document
from quantizer.config.form import form_of, is_hierarchical
from quantizer.config.hierarchical import SPEC_KEYS
from quantizer.config.resources import load_resource
from quantizer.config.wording import closest

_FLOAT_DATATYPES = ("float16", "bfloat16", "float32")
_ALGORITHMS = {"algo_config": "awq", "pre_quant_opt_config": "smoothquant", "algorithms": "gptq"}
"""The keys that list algorithms, and the name to write where an entry has none."""


def missing_keys(value: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """The required keys that the object at `pointer` lacks, each with the value to write.

    At the top the values are those of the preset for the file's device; in a layer entry, of the top's overall block.
    The hierarchical form requires few keys: the global configuration, each spec's dtype, each algorithm's name.
    """
    if pointer.count("/") and pointer.split("/")[1] in _ALGORITHMS:
        return _algorithm_keys(value, pointer)
    if is_hierarchical(value):
        return _hierarchical_keys(value, pointer)
    schema = load_resource("schemas", "layered.schema.json")
    preset = load_resource("configs", "dpu.json" if value.get("target_device") == "DPU" else "default.json")
    *_, last = pointer.split("/")
    here = _at(value, pointer)
    if last == "overall_quantize_config":
        known = schema["definitions"]["parameters"]["properties"]
        wanted = _parameters(value, preset, inherit=pointer.count("/") > 1)
    elif pointer == "":
        known = schema["properties"]
        wanted = {key: preset[key] for key in schema["required"]}
    else:
        known = schema["definitions"]["layer_entry"]["properties"]
        roles = value.get("quantizable_data_type", preset["quantizable_data_type"])
        parameters = _parameters(value, preset, inherit=True)
        wanted = {"quantizable_data_type": roles, "overall_quantize_config": parameters}
    missing = {key: wanted[key] for key in wanted if key not in here}
    # A misspelt key is there: it is told as unknown, and not a second time as missing.
    misspelt = {closest(key, missing) for key in here if key not in known and not key.startswith("//")}
    return {key: default for key, default in missing.items() if key not in misspelt}


def _hierarchical_keys(value: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    if not pointer:
        return {"global_quant_config": {"weight": {"dtype": "int8"}}}
    return _without_misspelt({"dtype": "int8"}, _at(value, pointer), SPEC_KEYS)


def _algorithm_keys(value: Mapping[str, Any], pointer: str) -> dict[str, Any]:
    """What an algorithm lacks, or a group of layers in it."""
    if "/scaling_layers/" in pointer:
        return _without_misspelt({"layers": ["self_attn.o_proj"]}, _at(value, pointer), ("prev_op", "inp"))
    return {"name": _ALGORITHMS[pointer.split("/")[1]]}


def _without_misspelt(wanted: Mapping[str, Any], here: Iterable[str], known: Iterable[str]) -> dict[str, Any]:
    misspelt = {closest(key, wanted) for key in here if key not in known}
    return {key: default for key, default in wanted.items() if key not in misspelt}


def paste(members: Mapping[str, Any]) -> str:
    """Members as they are written inside an object.

    >>> paste({"signed": True, "bit_width": 8})
    '"signed": true, "bit_width": 8'
    """
    return json.dumps(members, ensure_ascii=False)[1:-1]


def incomplete_blocks(document: Document) -> dict[str, dict[str, Any]]:
    """The pointer of each block that lacks required keys, with what it lacks; none in the hierarchical form."""
    if form_of(document) == "hierarchical":
        return {}
    entries = document.value.get("layer_quantize_config")
    layers = [f"/layer_quantize_config/{at}" for at in range(len(entries))] if isinstance(entries, list) else []
    overall = [f"{level}/overall_quantize_config" for level in ("", *layers)]
    blocks = {}
    for pointer in ("", *layers, *overall):
        here = _at(document.value, pointer)
        if isinstance(here, dict) and not (pointer in overall and here.get("datatype") in _FLOAT_DATATYPES):
            blocks[pointer] = missing_keys(document.value, pointer)
    return {pointer: missing for pointer, missing in blocks.items() if missing}


def completed(document: Document) -> str:
    """The text of the file with all missing keys written in; what is there already stays, character by character."""
    insertions = [_insertion(document, pointer, missing) for pointer, missing in incomplete_blocks(document).items()]
    text = document.source.text
    for at, inserted in sorted(insertions, reverse=True):
        text = text[:at] + inserted + text[at:]
    return text


def _parameters(value: Mapping[str, Any], preset: Mapping[str, Any], *, inherit: bool) -> dict[str, Any]:
    own = value.get("overall_quantize_config")
    inherited = own if inherit and isinstance(own, dict) else {}
    return {key: inherited.get(key, default) for key, default in preset["overall_quantize_config"].items()}


def _at(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        if isinstance(value, list) and part.isdecimal():
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _insertion(document: Document, pointer: str, missing: Mapping[str, Any]) -> tuple[int, str]:
    """Where to insert, and what: after the last member, laid out as it is."""
    text = document.source.text
    newline = "\r\n" if "\r\n" in text else "\n"
    start, _ = document.values[pointer]
    inside = [key for key in document.keys if key.rpartition("/")[0] == pointer]
    if not inside:
        indent = newline + _indent(text, start) + "  "
        return start + 1, indent + ("," + indent).join(_members(missing, indent)) + (newline + _indent(text, start))
    last = max(inside, key=lambda key: document.values[key])
    key_start = document.keys[last][0]
    own_line = not text[text.rfind("\n", 0, key_start) + 1 : key_start].strip()
    separator = newline + _indent(text, key_start) if own_line else " "
    added = "".join("," + separator + member for member in _members(missing, separator if own_line else ""))
    return document.values[last][1], added


def _members(missing: Mapping[str, Any], indent: str) -> list[str]:
    return [f"{json.dumps(key)}: {_dumped(value, indent)}" for key, value in missing.items()]


def _dumped(value: Any, indent: str) -> str:
    if not isinstance(value, dict) or not indent:
        return json.dumps(value, ensure_ascii=False)
    members = [f"{indent}  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    return "{" + ",".join(members) + indent + "}"


def _indent(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip())]
