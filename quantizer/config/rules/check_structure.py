"""Check a file against its schema: types, options, unknown and missing keys, and the plug-ins
that it needs.

The conflict rules in the schema are for editors. `check_layered` checks them on merged specs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from quantizer.config.algorithms import entry_kinds
from quantizer.config.diagnostics import Diagnostic, Diagnostics, Place
from quantizer.config.document.document import Document
from quantizer.config.forms.form import (
    ALGORITHM_LISTS,
    Form,
    block_of,
    form_of,
    plugin_of_algorithm,
    plugin_of_setting,
    remedy,
    shipped_algorithms,
)
from quantizer.config.json_types import JsonMapping

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

MAX_FINDINGS = 1000
"""A file with more findings is not a config with mistakes but something else."""


def check_structure(document: Document) -> list[Diagnostic]:
    """Return where the file differs from the schema of its form: at most one finding per value,
    key or block.
    """
    form = form_of(document.value)
    validator = _validator(form, tuple(entry_kinds(form)))
    errors = validator.iter_errors(document.value)
    first_error = next(errors, None)
    if first_error is None:
        return []
    # A file without errors needs no words for them
    from quantizer.config.rules.structure_findings import explained

    first: dict[tuple[str, str], Diagnostic] = {}
    explanations = (explained(document, error) for error in chain([first_error], errors))
    for finding in islice(chain.from_iterable(explanations), MAX_FINDINGS):
        family = finding.code if finding.code in ("QZ102", "QZ105") else "value"
        if finding.place is not None:
            first.setdefault((finding.place.pointer, family), finding)
    return list(first.values())


@cache
def _validator(form: Form, algorithms: tuple[str, ...]) -> Validator:
    """Build the validator of a form's schema; `algorithms` make it anew when one is added."""
    from jsonschema import Draft7Validator
    from jsonschema.validators import extend

    validator: type[Validator] = extend(Draft7Validator, {"uniqueItems": _unique_items})  # type: ignore[no-untyped-call]
    # The conflict rules
    others = {key: part for key, part in form_schema(form).items() if key != "allOf"}
    return validator(others)


def form_schema(form: Form) -> JsonMapping:
    """Return the schema of a form with every algorithm in it, also those whose plug-ins are not
    there; shared, so never to be changed.
    """
    schema = block_of(form)
    shipped = shipped_algorithms(form)
    added = [name for name in entry_kinds(form) if name not in shipped]
    if not added:
        return schema
    # Only algorithms of other packages need it
    from quantizer.config.algorithm_schema import schema_with

    return schema_with(form, (*shipped, *added), added)


def _unique_items(
    _: Validator, wanted: bool, items: Any, schema: Any
) -> Iterator[ValidationError]:
    """Yield each repeated item. jsonschema's own check compares all pairs, which takes minutes
    for a long list.
    """
    from jsonschema.exceptions import ValidationError

    if not wanted or not isinstance(items, list):
        return
    seen: set[str] = set()
    for index, item in enumerate(items):
        text = json.dumps(item, sort_keys=True)
        if text in seen:
            yield ValidationError("repeated", instance=item, path=(index,))
        seen.add(text)


def check_present(document: Document) -> Diagnostics:
    """Yield an error for each setting that is on and each algorithm without its plug-in."""
    for key, value in document.value.items():
        plugin = plugin_of_setting(key) if value is True else ""
        if plugin:
            yield _missing(key, plugin, document.place(key), "set it to false")
    for name, place in document.names("algorithms", *ALGORITHM_LISTS):
        plugin = plugin_of_algorithm(name)
        if plugin:
            yield _missing(name, plugin, place, "remove it")


def _missing(word: str, plugin: str, place: Place | None, otherwise: str) -> Diagnostic:
    text = f"{word} needs the plug-in {plugin}, which is not there"
    return Diagnostic("QZ118", text, place, help=f"{otherwise}, or {remedy(plugin)}")
