"""Checks a file against its schema and says what is wrong in sentences: types, options, unknown
and missing keys.

The rules in it are for editors; here they are left to `check_layered`, which sees merged
specs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from quantizer.config.algorithm_schema import form_schema
from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.diagnostics import Diagnostic, Edit, Fix
from quantizer.config.document.document import Document, pointer_to
from quantizer.config.document.missing_keys import (
    HELP_FOR_MISSING,
    Path,
    completions,
    missing_keys,
)
from quantizer.config.document.suggestions import (
    TYPE_WORDS,
    bounds,
    help_for_key,
    help_for_value,
    key_fixes,
    value_fixes,
)
from quantizer.config.forms.aliases import other_spelling
from quantizer.config.forms.form import Form, form_of
from quantizer.config.wording import listed, quoted

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

MAX_FINDINGS = 1000
"""A file with more is not a config with mistakes but something else; the first ones say so."""


def check_structure(document: Document) -> list[Diagnostic]:
    """What in the file differs from the schema of its form: at most one finding per value, key
    or block.
    """
    found: dict[tuple[str, str], Diagnostic] = {}
    errors = _validator(form_of(document.value), tuple(ALGORITHMS)).iter_errors(document.value)
    diagnostics = (diagnostic for error in errors for diagnostic in _explain(document, error))
    for diagnostic in islice(diagnostics, MAX_FINDINGS):
        family = diagnostic.code if diagnostic.code in ("QZ102", "QZ105") else "value"
        if diagnostic.place is not None:
            found.setdefault((diagnostic.place.pointer, family), diagnostic)
    return list(found.values())


@cache
def _validator(form: Form, algorithms: tuple[str, ...]) -> Validator:
    """The rule book of a form; the names of the algorithms say when it has to be made anew."""
    from jsonschema import Draft7Validator
    from jsonschema.validators import extend

    checker: type[Validator] = extend(Draft7Validator, {"uniqueItems": _unique_items})  # type: ignore[no-untyped-call]
    # The rules
    return checker({key: entry for key, entry in form_schema(form).items() if key != "allOf"})


def _unique_items(
    _: Validator, wanted: bool, items: Any, schema: Any
) -> Iterator[ValidationError]:
    """Each repeated item; jsonschema's own check compares all pairs, which a long list turns
    into minutes.
    """
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
    if code := schema.get("code"):
        remedy = schema.get("help") or _selector_help(error.instance)
        yield Diagnostic(code, schema["errorMessage"], document.place(pointer), help=remedy)
    elif error.validator == "additionalProperties":
        yield from _unknown_keys(document, error, schema)
    elif error.validator == "required":
        yield from _missing(document, tuple(error.absolute_path))
    else:
        yield _wrong_value(document, error, schema)


def _wrong_value(
    document: Document, error: ValidationError, schema: dict[str, Any]
) -> Diagnostic:
    path = tuple(error.absolute_path)
    key = next((part for part in reversed(path) if isinstance(part, str)), "")
    keyword, value = str(error.validator), error.instance
    title = schema.get("title", key)
    remark = None
    if keyword == "enum":
        message = f"{quoted(value)} is not a {title}"
        remark = f"one of: {listed(word for word in schema['enum'] if word is not None)}"
    elif keyword == "type":
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        name = f'"{key}"' if path[-1:] == (key,) else f'an item of "{key}"'
        message = (
            f"{name} is {' or '.join(TYPE_WORDS[word] for word in types)}, not {_kind(value)}"
        )
    elif keyword == "uniqueItems":
        return _repeated_item(document, path, value, schema)
    else:
        message = f"{quoted(value)} is out of range for {key}"
        remark = (
            "not empty" if keyword in ("minLength", "minItems") else ", ".join(bounds(schema))
        )
    code, place = (
        {"enum": "QZ101", "type": "QZ103"}.get(keyword, "QZ104"),
        document.place(pointer_to(*path)),
    )
    if remedy := schema.get("help"):
        return Diagnostic(code, message, place, remark=remark, help=remedy)
    remedy, fixes = (
        help_for_value(key, value, form_of(document.value)),
        value_fixes(document, path, schema),
    )
    return Diagnostic(code, message, place, remark=remark, help=remedy, fixes=fixes)


def _repeated_item(
    document: Document, path: Path, item: Any, schema: dict[str, Any]
) -> Diagnostic:
    pointer = pointer_to(*path)
    before, end = (
        document.values[pointer_to(*path[:-1], int(path[-1]) - 1)][1],
        document.values[pointer][1],
    )
    remedy = f"name each {schema['items']['title']} once"
    fixes = (Fix(remedy, (Edit(before, end, ""),), (pointer,)),)
    message = f"{quoted(item)} is listed twice"
    return Diagnostic("QZ107", message, document.place(pointer), help=remedy, fixes=fixes)


def _unknown_keys(
    document: Document, error: ValidationError, schema: dict[str, Any]
) -> Iterator[Diagnostic]:
    members: dict[str, Any] = error.instance if isinstance(error.instance, dict) else {}
    for key in members:
        if key not in schema["properties"] and not key.startswith("//"):
            path = (*error.absolute_path, key)
            place = document.place(pointer_to(*path), key=True)
            word = (
                other_spelling(key, error.absolute_path)
                if form_of(document.value) == "hierarchical"
                else key
            )
            if word != key and word in members:
                text = (
                    f"{quoted(key)} is another spelling of {quoted(word)}, which is here, too"
                )
                first = document.place(pointer_to(*error.absolute_path, word), key=True)
                yield Diagnostic(
                    "QZ102",
                    text,
                    place,
                    help="remove one of the two",
                    related=((first, "the same key"),),
                )
                continue
            # What is accepted and does nothing is not offered.
            known = [
                name for name, entry in schema["properties"].items() if "code" not in entry
            ]
            remedy, fixes = (
                help_for_key(key, known, members, form_of(document.value)),
                key_fixes(document, path, known),
            )
            yield Diagnostic(
                "QZ102", f"unknown key {quoted(key)}", place, help=remedy, fixes=fixes
            )


def _missing(document: Document, path: Path) -> Iterator[Diagnostic]:
    missing = missing_keys(document.value, path)
    if missing:
        count = "a key is" if len(missing) == 1 else f"{len(missing)} keys are"
        message = f"{count} missing here: {listed(missing)}"
        place, fixes = document.place(pointer_to(*path), key=True), completions(document, path)
        yield Diagnostic("QZ105", message, place, help=HELP_FOR_MISSING, fixes=fixes)


def _kind(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return f"the string {quoted(value)}" if isinstance(value, str) else quoted(value)


def _selector_help(entry: Any) -> str:
    if isinstance(entry, str):
        return 'write "layer_name": null, or "layer_type": null to select by name'
    return (
        'write "layer_type": "torch.nn.Conv2d", or a "layer_name" that `quantizer inspect` '
        "prints"
    )
