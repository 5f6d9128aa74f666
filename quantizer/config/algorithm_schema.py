"""Build the part of the schemas that is about algorithms from their settings; docs/generate.py
writes it into the files for editors.
"""

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quantizer.config.algorithms import PLUGINS, AlgoConfig, Setting, entry_kinds, settings_of
from quantizer.config.forms.form import Form, block_of, shipped_algorithms
from quantizer.config.json_types import JsonMapping, JsonObject

_COMMENTS = {
    "patternProperties": {"^//": {"description": "A comment."}},
    "additionalProperties": False,
}
_TYPES: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_OF_ITEMS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "help")
"""Keywords of a setting that hold for each item where it is a list."""


def generated_schema(form: Form) -> JsonMapping:
    """Return the schema of a form with every algorithm whose plug-in is there, for the file."""
    names = tuple(entry_kinds(form))
    return schema_with(form, names, names)


def schema_with(form: Form, names: Sequence[str], anew: Sequence[str]) -> JsonMapping:
    """Return the schema of a form with these algorithms, of which some are not as the file has
    them.
    """
    schema = block_of(form)
    shipped = schema["definitions"]
    generated = {"algorithm", "scaling_layer", *shipped_algorithms(form)}
    definitions = {name: entry for name, entry in shipped.items() if name not in generated}
    definitions["scaling_layer"] = block_of("hierarchical", "scaling_layer")
    definitions["algorithm"] = _any_algorithm(form, names)
    for name in names:
        definitions[name] = shipped.get(name, {})
        if name in anew:
            entry = algorithm_schema(entry_kinds(form)[name])
            definitions[name] = {"plugin": PLUGINS[name], **entry}
    return {**schema, "definitions": definitions}


def _any_algorithm(form: Form, names: Sequence[str]) -> JsonObject:
    """Return the schema of an entry, whose name decides which algorithm's schema holds."""
    choices: list[JsonObject] = []
    for name in names:
        condition = {
            "type": "object",
            "properties": {"name": {"const": name}},
            "required": ["name"],
        }
        choices.append({"if": condition, "then": {"$ref": f"#/definitions/{name}"}})
    kinds = entry_kinds(form)
    rounding = [name for name in names if name in kinds and kinds[name].stage == "round"]
    key = {
        "title": "quantization algorithm",
        "enum": list(names),
        "description": "Which algorithm.",
        "examples": rounding[:1],
    }
    return {
        "title": "algorithm",
        "type": "object",
        "required": ["name"],
        "properties": {"name": key},
        "allOf": choices,
    }


def algorithm_schema(kind: type[AlgoConfig]) -> JsonMapping:
    """Return what an entry of one algorithm may hold; its description is the first paragraph of
    the docstring.
    """
    hints = get_type_hints(kind)
    defaults = {declared.name: declared.default for declared in fields(kind)}
    properties: JsonObject = {
        "name": {
            "title": "algorithm",
            "const": kind.name,
            "default": kind.name,
            "description": "Which algorithm.",
        }
    }
    for key, setting in settings_of(kind).items():
        properties[key] = _entry(key, hints[key], defaults[key], setting)
    paragraph, *_ = (kind.__doc__ or "").partition("\n\n")
    return {
        "title": kind.__name__,
        "description": " ".join(paragraph.split()),
        "properties": properties,
        **_COMMENTS,
    }


def _entry(key: str, hint: Any, default: Any, setting: Setting) -> JsonObject:
    """Return the entry of one setting.

    >>> _entry("steps", int | None, None, Setting("How many.", keywords={"minimum": 1}))["type"]
    ['integer', 'null']
    """
    is_union = get_origin(hint) in (Union, types.UnionType)
    members = get_args(hint) if is_union else (hint,)
    kinds = [_json_type(member) for member in members]
    entry: JsonObject = {
        "title": key.replace("_", " "),
        "default": default,
        "type": kinds if len(kinds) > 1 else kinds[0],
    }
    keywords = {**entry, **setting.keywords}
    for member in members:
        if get_origin(member) is list:
            [item] = get_args(member)
            shared = {word: keywords[word] for word in _OF_ITEMS if word in keywords}
            entry["items"] = {"type": _json_type(item), **shared}
            # Where null may stand, an empty list means the same
            if default is not None:
                entry["minItems"] = 1
        elif get_origin(member) is Literal:
            shared = {word: keywords[word] for word in ("title", "help") if word in keywords}
            options = {"enum": list(get_args(member)), **shared}
            if len(members) == 1:
                entry |= options
            else:
                entry |= {"if": {"type": "string"}, "then": options}
    return {**entry, **setting.keywords, "description": setting.description}


def _json_type(hint: Any) -> str:
    """Return the schema's word for an annotated type; a class is written by its name.

    >>> [_json_type(hint) for hint in (bool, float, list[str], Literal["a"], type(None))]
    ['boolean', 'number', 'array', 'string', 'null']
    """
    return _TYPES.get(get_origin(hint) or hint, "string")
