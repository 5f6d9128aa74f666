"""Checks a file against its schema and says what is wrong in sentences: types, options, unknown and missing keys.

Restrictions and conflicts are also in it, for editors; here they are left to `check`, which sees merged specs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.completion import missing_keys, paste
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.document import Document, pointer_to
from quantizer.config.form import Form, form_of
from quantizer.config.hints import TYPE_WORDS, help_for_key, help_for_value
from quantizer.config.resources import load_resource
from quantizer.config.spellings import other_spelling
from quantizer.config.wording import listed, quoted

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

MAX_FINDINGS = 1000
"""A file with more is not a config with mistakes but something else; the first ones say so."""

_BY_KEYWORD = {
    "enum": "QZ101",
    "type": "QZ103",
    "minimum": "QZ104",
    "maximum": "QZ104",
    "exclusiveMinimum": "QZ104",
    "minLength": "QZ104",
    "minItems": "QZ104",
    "uniqueItems": "QZ107",
    "not": "QZ106",
}


def check_structure(document: Document) -> list[Diagnostic]:
    """What in the file differs from the schema of its form: at most one finding per value, key or block."""
    found: dict[tuple[str, str], Diagnostic] = {}
    errors = _validator(form_of(document)).iter_errors(document.value)
    diagnostics = (diagnostic for error in errors for diagnostic in _explain(document, error))
    for diagnostic in islice(diagnostics, MAX_FINDINGS):
        family = diagnostic.code if diagnostic.code in ("QZ102", "QZ105") else "value"
        if diagnostic.place is not None:
            found.setdefault((diagnostic.place.pointer, family), diagnostic)
    return list(found.values())


@cache
def _validator(form: Form) -> Validator:
    from jsonschema import Draft7Validator
    from jsonschema.validators import extend

    checker: type[Validator] = extend(Draft7Validator, {"uniqueItems": _unique_items})  # type: ignore[no-untyped-call]
    return checker(load_resource("schemas", f"{form}.schema.json"))


def _unique_items(_: Validator, wanted: bool, items: Any, schema: Any) -> Iterator[ValidationError]:
    """Each repeated item; jsonschema's own check compares all pairs, which a long list turns into minutes."""
    from jsonschema.exceptions import ValidationError

    seen: set[str] = set()
    for index, item in enumerate(items if wanted and isinstance(items, list) else ()):
        text = json.dumps(item, sort_keys=True)
        if text in seen:
            yield ValidationError("repeated", instance=item, path=(index,))
        seen.add(text)


def _explain(document: Document, error: ValidationError) -> Iterator[Diagnostic]:
    schema = error.schema if isinstance(error.schema, dict) else {}
    pointer = pointer_to(*error.absolute_path)
    code = schema.get("code", "")
    if code.startswith(("QZ2", "QZ3")):
        return
    if code:
        remedy = schema.get("help") or _selector_help(error.instance)
        yield Diagnostic(code, schema["errorMessage"], document.place(pointer), help=remedy)
    elif error.validator == "additionalProperties":
        yield from _unknown_keys(document, error, schema)
    elif error.validator == "required":
        yield from _missing(document, pointer)
    else:
        yield _wrong_value(document, error, schema)


def _wrong_value(document: Document, error: ValidationError, schema: dict[str, Any]) -> Diagnostic:
    path = list(error.absolute_path)
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    keyword, value = str(error.validator), error.instance
    title = schema.get("title", key)
    remark = None
    if keyword == "enum":
        message = f"{quoted(value)} is not a {title}"
        remark = f"one of: {listed(word for word in schema['enum'] if word is not None)}"
    elif keyword == "type":
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        name = f'"{key}"' if isinstance(path[-1] if path else "", str) else f'an item of "{key}"'
        message = f"{name} is {' or '.join(TYPE_WORDS[word] for word in types)}, not {_kind(value)}"
    elif keyword == "uniqueItems":
        message = f"{quoted(value)} is listed twice"
    else:
        message = f"{quoted(value)} is out of range for {key}"
        remark = "not empty" if keyword in ("minLength", "minItems") else _range(schema)
    remedy = schema.get("help")
    if keyword == "uniqueItems":
        remedy = f"name each {schema['items']['title']} once"
    remedy = remedy or help_for_value(key, value, schema, form_of(document))
    return Diagnostic(_BY_KEYWORD[keyword], message, document.place(pointer_to(*path)), remark=remark, help=remedy)


def _unknown_keys(document: Document, error: ValidationError, schema: dict[str, Any]) -> Iterator[Diagnostic]:
    members: dict[str, Any] = error.instance if isinstance(error.instance, dict) else {}
    for key in members:
        if key not in schema["properties"] and not key.startswith("//"):
            place = document.place(pointer_to(*error.absolute_path, key), key=True)
            word = other_spelling(key, error.absolute_path) if form_of(document) == "hierarchical" else key
            if word != key and word in members:
                text = f"{quoted(key)} is another spelling of {quoted(word)}: the key is said twice"
                first = document.place(pointer_to(*error.absolute_path, word), key=True)
                yield Diagnostic("QZ102", text, place, help="remove one of the two", related=((first, "here, too"),))
                continue
            help_ = help_for_key(key, tuple(schema["properties"]), form_of(document))
            yield Diagnostic("QZ102", f"unknown key {quoted(key)}", place, help=help_)


def _missing(document: Document, pointer: str) -> Iterator[Diagnostic]:
    missing = missing_keys(document.value, pointer)
    if not missing:
        return
    count = "a key is" if len(missing) == 1 else f"{len(missing)} keys are"
    message = f"{count} missing here: {listed(missing)}"
    choice = f"; the algorithms are {listed(ALGORITHMS)}" if "name" in missing else ""
    yield Diagnostic("QZ105", message, document.place(pointer, key=True), help=f"paste {paste(missing)}{choice}")


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"the string {quoted(value)}"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return quoted(value)


def _range(schema: dict[str, Any]) -> str:
    low = f"more than {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else f"at least {schema['minimum']}"
    return f"{low}, at most {schema['maximum']}" if "maximum" in schema else low


def _selector_help(entry: Any) -> str:
    if isinstance(entry, str):
        return '"layer_name": null, or "layer_type": null to go by name'
    return 'write "layer_type": "torch.nn.Conv2d", or a "layer_name" that `quantizer inspect` prints'
