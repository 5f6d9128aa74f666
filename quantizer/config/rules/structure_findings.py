"""Explain where a file differs from its schema: what is wrong, and what to write instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantizer.config.diagnostics import Diagnostic, Diagnostics, Edit, Fix
from quantizer.config.document.document import Document, pointer_to
from quantizer.config.document.missing_keys import HELP_FOR_MISSING, completions, missing_keys
from quantizer.config.document.suggestions import (
    TYPE_WORDS,
    bounds,
    help_for_key,
    help_for_value,
    key_fixes,
    last_key,
    value_fixes,
)
from quantizer.config.forms.aliases import other_spelling
from quantizer.config.forms.form import form_of
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.wording import closest_word, listed, quoted
from quantizer.plugins import if_command, left_out

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

_CODES = {"enum": "QZ101", "type": "QZ103"}
"""The codes of keywords; the other keywords have QZ104."""


def explained(document: Document, error: ValidationError) -> Diagnostics:
    """Yield the findings that an error of the schema stands for."""
    schema = error.schema if isinstance(error.schema, dict) else {}
    path = tuple(error.absolute_path)
    if "code" in schema:
        yield Diagnostic(
            schema["code"],
            schema["errorMessage"],
            document.place(pointer_to(*path)),
            help=schema.get("help") or _selector_help(error.instance),
        )
    elif error.validator == "additionalProperties":
        for key in error.instance if isinstance(error.instance, dict) else ():
            if key not in schema["properties"] and not key.startswith("//"):
                yield _unknown_key(document, (*path, key), schema)
    elif error.validator == "required":
        yield from _missing(document, path, schema)
    elif error.validator == "uniqueItems":
        yield _repeated_item(document, path, error.instance, schema)
    else:
        yield _wrong_value(document, error, schema)


def _wrong_value(document: Document, error: ValidationError, schema: JsonObject) -> Diagnostic:
    """Return the finding on a value of the wrong type or out of range."""
    path = tuple(error.absolute_path)
    key = last_key(path)
    keyword = str(error.validator)
    value = error.instance
    remark = None
    if keyword == "enum":
        message = f"{quoted(value)} is not a {schema.get('title', key)}"
        if left_out():
            message += f", unless the plug-in {left_out()} adds it: validate loads none"
        words = listed(word for word in schema["enum"] if word is not None)
        remark = f"one of: {words}"
    elif keyword == "type":
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        name = f'"{key}"' if path[-1:] == (key,) else f'an item of "{key}"'
        wanted = " or ".join(TYPE_WORDS[word] for word in types)
        message = f"{name} is {wanted}, not {_kind(value)}"
    else:
        message = f"{quoted(value)} is out of range for {key}"
        is_empty = keyword in ("minLength", "minItems") and "maxItems" not in schema
        remark = "not empty" if is_empty else ", ".join(bounds(schema))
    code = _CODES.get(keyword, "QZ104")
    place = document.place(pointer_to(*path))
    if "help" in schema:
        return Diagnostic(code, message, place, remark=remark, help=schema["help"])
    fixes = value_fixes(document, path, schema)
    remedy = help_for_value(key, value, form_of(document.value))
    return Diagnostic(code, message, place, remark=remark, help=remedy, fixes=fixes)


def _repeated_item(
    document: Document, path: JsonPath, item: Any, schema: JsonObject
) -> Diagnostic:
    *list_path, index = path
    pointer = pointer_to(*path)
    _, previous_end = document.values[pointer_to(*list_path, int(index) - 1)]
    _, end = document.values[pointer]
    remedy = f"name each {schema['items']['title']} once"
    fixes = (Fix(remedy, (Edit(previous_end, end, ""),)),)
    return Diagnostic(
        "QZ107",
        f"{quoted(item)} is listed twice",
        document.place(pointer),
        help=remedy,
        fixes=fixes,
    )


def _unknown_key(document: Document, path: JsonPath, schema: JsonObject) -> Diagnostic:
    *block_path, key = path
    key = str(key)
    form = form_of(document.value)
    siblings = document.at(*block_path)
    place = document.place(pointer_to(*path), key=True)
    word = other_spelling(key, block_path) if form == "hierarchical" else key
    if word != key and word in siblings:
        first = document.place(pointer_to(*block_path, word), key=True)
        return Diagnostic(
            "QZ102",
            f"{quoted(key)} is another spelling of {quoted(word)}, which is here, too",
            place,
            help="remove one of the two",
            related=((first, "the same key"),),
        )
    # Keys with a code are accepted and do nothing, so they are not offered
    known = [name for name, entry in schema["properties"].items() if "code" not in entry]
    fixes = key_fixes(document, path, known)
    return Diagnostic(
        "QZ102",
        f"unknown key {quoted(key)}",
        place,
        help=help_for_key(key, known, siblings, form),
        fixes=fixes,
    )


def _missing(document: Document, path: JsonPath, schema: JsonObject) -> Diagnostics:
    missing = missing_keys(document.at(*path), schema)
    if missing:
        count = "a key is" if len(missing) == 1 else f"{len(missing)} keys are"
        fixes = completions(document, path, missing)
        yield Diagnostic(
            "QZ105",
            f"{count} missing here: {listed(missing)}",
            document.place(pointer_to(*path), key=True),
            help=HELP_FOR_MISSING,
            fixes=fixes,
        )
    elif schema["required"] == ["name"]:
        # The name decides which other keys are known, so no other check reports this one
        key = closest_word("name", document.at(*path)) or ""
        fixes = key_fixes(document, (*path, key), ["name"])
        yield Diagnostic(
            "QZ102",
            f"unknown key {quoted(key)}",
            document.place(pointer_to(*path, key), key=True),
            help='did you mean "name"?',
            fixes=fixes,
        )


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return f"the string {quoted(value)}" if isinstance(value, str) else quoted(value)


def _selector_help(entry: Any) -> str:
    if isinstance(entry, str):
        return 'write "layer_name": null, or "layer_type": null to select by name'
    where = if_command("inspect", " that `quantizer inspect` prints")
    return f'write "layer_type": "torch.nn.Conv2d", or a "layer_name"{where}'
