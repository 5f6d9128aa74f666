"""Write the words of range methods and number formats into the schemas: those of the shipped
files (docs/generate.py), and those of plug-ins when a schema is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from quantizer.config.wording import joined
from quantizer.tables import NUMBER_FORMATS, RANGE_METHODS

_AUTO = "auto"
"""The method that reads no statistic over batches."""
_WITHOUT_RANGE = "PlaceholderObserver"


def with_words(name: str, schema: Any) -> Any:
    """Return a schema with the words of the tables; others as they are.

    Args:
        name: of the file.
        schema: its content, which is not changed.
    """
    write = _WRITERS.get(name)
    if write is None:
        return schema
    changed = copy.deepcopy(schema)
    write(changed)
    return changed


def _write_layered(schema: Any) -> None:
    entry = schema["definitions"]["parameters"]["properties"]["method"]
    _set_options(entry, {name: row.meaning for name, row in RANGE_METHODS.items()})


def _write_hierarchical(schema: Any) -> None:
    keys = schema["definitions"]["spec"]["properties"]
    shipped = dict(zip(keys["dtype"]["enum"], keys["dtype"]["enumDescriptions"], strict=True))
    integers = {word: text for word, text in shipped.items() if "int" in word}
    formats = {row.word or name: row.meaning for name, row in NUMBER_FORMATS.items()}
    _set_options(keys["dtype"], integers | formats)
    observers: dict[str | None, str] = {}
    for row in RANGE_METHODS.values():
        observers |= {name: observer.meaning for name, observer in row.observers.items()}
    observers[_WITHOUT_RANGE] = "none: for formats without a scale"
    observers[None] = "not stated"
    _set_options(keys["observer_cls"], observers)


def _set_options(entry: dict[str, Any], options: Mapping[Any, str]) -> None:
    entry["enum"] = list(options)
    entry["enumDescriptions"] = list(options.values())


def _write_spec(schema: Any) -> None:
    properties = schema["properties"]
    properties["method"]["enum"] = list(RANGE_METHODS)
    casts = [name for name, row in NUMBER_FORMATS.items() if row.is_cast]
    scaled = [name for name in NUMBER_FORMATS if name not in casts]
    properties["dtype"]["enum"] = ["int", *scaled, *casts]
    rules = {rule["code"]: rule for rule in schema["then"]["allOf"]}
    searching = [name for name, row in RANGE_METHODS.items() if row.powers_of_two_only]
    others = [name for name in RANGE_METHODS if name not in (*searching, _AUTO)]
    _set_methods(
        rules["QZ301"],
        "then",
        searching,
        f"if the calibration method is {_quoted(others, 'or')}, the calibration statistic "
        "method 'modal' is not supported",
    )
    one_limit = [name for name, row in RANGE_METHODS.items() if row.symmetric_only]
    _set_methods(
        rules["QZ302"],
        "then",
        [name for name in RANGE_METHODS if name not in one_limit],
        "asymmetric quantization does not support the calibration methods "
        f"{_quoted(one_limit, 'and')}",
    )
    _set_methods(rules["QZ303"], "if", searching, "")


def _set_methods(rule: Any, part: str, methods: Sequence[str], message: str) -> None:
    """Set the methods that a part of a rule is about, and its message."""
    entry = rule[part]["properties"]["method"]
    entry["enum"] = list(methods)
    if message:
        entry["errorMessage"] = message


def _quoted(names: Sequence[str], joint: str) -> str:
    """Return names in quotes, with a word between the last two.

    >>> _quoted(["mse", "entropy"], "and")
    "'mse' and 'entropy'"
    """
    return joined([f"'{name}'" for name in names], joint)


_WRITERS = {
    "layered.schema.json": _write_layered,
    "hierarchical.schema.json": _write_hierarchical,
    "quantization_spec.schema.json": _write_spec,
}
