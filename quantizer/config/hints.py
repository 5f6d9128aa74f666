"""What to write instead of a wrong key or value. Reads the schema's vocabulary; finds no errors itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.form import HIERARCHICAL_KEYS, Form
from quantizer.config.resources import load_resource
from quantizer.config.wording import closest, listed, quoted

TYPE_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "null": "null",
    "array": "a list [ … ]",
    "object": "an object { … }",
}
_BOOLEANS = {
    "true": "true",
    "false": "false",
    "yes": "true",
    "no": "false",
    "on": "true",
    "off": "false",
    "1": "true",
    "0": "false",
}


_COUNTERPARTS: Mapping[Form, Mapping[str, str]] = {
    "layered": {"algo_config": "algorithms", "pre_quant_opt_config": "algorithms"},
    "hierarchical": {"algorithms": "algo_config"},
}
"""Keys of the other form that mean something in this one, and its key."""

_SWITCHES = {"equalization": "include_cle", "cle": "include_cle", "bias_correction": "include_bias_corr"}
"""What other tools list among their algorithms."""


def help_for_value(key: str, value: Any, schema: Mapping[str, Any], form: Form = "layered") -> str:
    """What to write for `key` in place of `value`: the key it belongs to, the literal that is meant, or an example."""
    if isinstance(value, str):
        if key == "name" and value in _SWITCHES:
            return f'it is the switch "{_SWITCHES[value]}"' + (" of the layered form" if form == "hierarchical" else "")
        owner = _owners(form).get(value)
        if owner and owner != key and value not in schema.get("enum", ()):
            return f'{quoted(value)} is a {owner}; did you mean "{owner}": {quoted(value)}?'
    literal = _literal(value, schema)
    if literal is not None:
        return f"write {literal}"
    near = (
        closest(str(value), [word for word in schema.get("enum", ()) if isinstance(word, str)])
        if isinstance(value, str)
        else None
    )
    if near:
        return f'did you mean "{near}"?'
    return _example(key, schema)


def help_for_key(key: str, known: tuple[str, ...], form: Form = "layered") -> str:
    """The known key that a misspelt one is nearest to, or the block where it belongs, or all keys known here."""
    if key in _COUNTERPARTS[form]:
        return f'in this form it is "{_COUNTERPARTS[form][key]}"'
    homes = [home for home, keys in _homes(form).items() if key in keys]
    if homes:
        return f'"{key}" belongs in {" or ".join(homes)}'
    near = closest(key, known)
    if near:
        return f'did you mean "{near}"?'
    return f"known keys here: {listed(name for name in known if not name.startswith('$'))}"


def _literal(value: Any, schema: Mapping[str, Any]) -> str | None:
    wanted = schema.get("type")
    text = (
        value.strip().lower()
        if isinstance(value, str)
        else json.dumps(value)
        if isinstance(value, (int, float))
        else ""
    )
    if wanted == "boolean":
        return _BOOLEANS.get(text)
    if wanted in ("integer", "number") and isinstance(value, str) and text.lstrip("-").replace(".", "", 1).isdecimal():
        whole = wanted == "number" or "." not in text
        return text if whole else None
    if wanted == "array" and isinstance(value, (str, dict)):
        return f"[{quoted(value)}]" if isinstance(value, str) else "[ … ] around it"
    return None


def _example(key: str, schema: Mapping[str, Any]) -> str:
    candidates = (schema.get("default"), *schema.get("examples", ()), *schema.get("enum", ()))
    example = next((value for value in candidates if value not in (None, {}, [])), None)
    if example is None:
        return "`quantizer schema` prints all keys"
    return f'for example "{key}": {quoted(example)}'


@cache
def _owners(form: Form) -> Mapping[str, str]:
    """Each option word, and the key that it is an option of."""
    owners: dict[str, str] = {}
    for keys in _blocks(form).values():
        for key, entry in keys.items():
            for word in filter(_is_word, entry.get("enum", ())):
                owners.setdefault(word, key)
    if form == "hierarchical":
        return owners
    roles = load_resource("schemas", "layered.schema.json")["definitions"]["quantizable_data_type"]["items"]["enum"]
    return {**owners, **dict.fromkeys(roles, "quantizable_data_type")}


def _is_word(option: Any) -> bool:
    return isinstance(option, str)


@cache
def _homes(form: Form) -> Mapping[str, frozenset[str]]:
    """Each block of the form, and its keys; those of the other form are named as such."""
    homes = {home: frozenset(keys) for home, keys in _blocks(form).items()}
    homes |= {f"the algorithm {name}": keys for name, keys in _algorithm_keys().items()}
    if form == "layered":
        blocks = load_resource("schemas", "layered.schema.json")["definitions"]
        homes["tensor_quantize_config"] = frozenset(blocks["tensor_quantize_config"]["properties"])
        homes["an entry of layer_quantize_config"] = frozenset(blocks["layer_entry"]["properties"])
        return homes | {"the hierarchical form, and a file has one form": HIERARCHICAL_KEYS}
    layered = frozenset(load_resource("schemas", "layered.schema.json")["properties"]) - {"target_device"}
    return homes | {"the layered form, and a file has one form": layered}


def _algorithm_keys() -> Mapping[str, frozenset[str]]:
    blocks = load_resource("schemas", "hierarchical.schema.json")["definitions"]
    return {name: frozenset(blocks[name]["properties"]) - {"name"} for name in ALGORITHMS}


def _blocks(form: Form) -> Mapping[str, Mapping[str, Any]]:
    """The blocks whose keys have values of their own."""
    schema = load_resource("schemas", f"{form}.schema.json")
    blocks = schema["definitions"]
    if form == "layered":
        return {
            "the top level": schema["properties"],
            "overall_quantize_config": blocks["parameters"]["properties"],
        }
    return {
        "the top level": schema["properties"],
        "global_quant_config or a layer's configuration": blocks["level"]["properties"],
        "a tensor's specification, such as weight": blocks["spec"]["properties"],
    }
