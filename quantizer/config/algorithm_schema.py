"""The schemas' part on algorithms, made from their settings; docs/generate.py writes it into
the files for editors.
"""

import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quantizer.config.algorithm_settings import AlgoConfig, Setting, settings_of
from quantizer.config.algorithms import entry_kinds
from quantizer.config.forms.form import Form, block_of

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


def form_schema(form: Form) -> Mapping[str, Any]:
    """The schema of a form with every algorithm of the table in it; shared, so never to be
    changed.
    """
    return _form_schema(form, tuple(entry_kinds(form)))


@cache
def _form_schema(form: Form, names: tuple[str, ...]) -> Mapping[str, Any]:
    schema = block_of(form)
    definitions = schema["definitions"]
    generated = {
        "algorithm",
        "scaling_layer",
        *definitions["algorithm"]["properties"]["name"]["enum"],
    }
    kept = {name: entry for name, entry in definitions.items() if name not in generated}
    group = block_of("hierarchical", "scaling_layer")
    return {
        **schema,
        "definitions": {**kept, "scaling_layer": group, **_definitions(form, names)},
    }


def _definitions(form: Form, names: tuple[str, ...]) -> dict[str, Any]:
    """The entry that all algorithms have in common, and one for each."""
    choices = [
        {
            "if": {
                "type": "object",
                "properties": {"name": {"const": name}},
                "required": ["name"],
            },
            "then": {"$ref": f"#/definitions/{name}"},
        }
        for name in names
    ]
    key = {
        "title": "quantization algorithm",
        "enum": list(names),
        "description": "Which algorithm.",
    }
    whole = {
        "title": "algorithm",
        "type": "object",
        "required": ["name"],
        "properties": {"name": {**key, "examples": ["gptq"]}},
        "allOf": choices,
    }
    return {
        "algorithm": whole,
        **{name: algorithm_schema(entry_kinds(form)[name]) for name in names},
    }


def algorithm_schema(kind: type[AlgoConfig]) -> Mapping[str, Any]:
    """What an entry of one algorithm may hold; its description is the first paragraph of the
    docstring.
    """
    hints, said = get_type_hints(kind), settings_of(kind)
    defaults = {each.name: each.default for each in fields(kind)}
    return {
        "title": kind.__name__,
        "description": " ".join((kind.__doc__ or "").partition("\n\n")[0].split()),
        "properties": {
            "name": {
                "title": "algorithm",
                "const": kind.name,
                "default": kind.name,
                "description": "Which algorithm.",
            },
            **{
                key: _entry(key, hints[key], defaults[key], meant)
                for key, meant in said.items()
            },
        },
        **_COMMENTS,
    }


def _entry(key: str, hint: Any, default: Any, meant: Setting) -> dict[str, Any]:
    """The entry of one setting.

    >>> _entry("steps", int | None, None, Setting("How many.", keywords={"minimum": 1}))["type"]
    ['integer', 'null']
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [_json_type(member) for member in members]
    found: dict[str, Any] = {
        "title": key.replace("_", " "),
        "default": default,
        "type": kinds if len(kinds) > 1 else kinds[0],
    }
    words = {**found, **meant.keywords}
    for member in members:
        if get_origin(member) is list:
            same = {word: words[word] for word in _OF_ITEMS if word in words}
            found |= {"items": {"type": _json_type(get_args(member)[0]), **same}}
            # Where null may stand, an empty list says as much
            found |= {"minItems": 1} if default is not None else {}
        elif get_origin(member) is Literal:
            about: dict[str, Any] = {
                word: words[word] for word in ("title", "help") if word in words
            }
            choice = {"enum": list(get_args(member)), **about}
            found |= choice if len(members) == 1 else {"if": {"type": "string"}, "then": choice}
    return {**found, **meant.keywords, "description": meant.description}


def _json_type(hint: Any) -> str:
    """The schema's word for an annotated type; a class is written by its name.

    >>> [_json_type(hint) for hint in (bool, float, list[str], Literal["a"], type(None))]
    ['boolean', 'number', 'array', 'string', 'null']
    """
    return _TYPES.get(get_origin(hint) or hint, "string")
