"""Compare two config files value by value."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantizer.config.document.document import pointer_to
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.json_types import JsonPath
from quantizer.config.model import ResolvedConfig

_SELECTOR_KEYS = ("layer_name", "layer_type")
"""The keys that identify an entry of a list: entries are compared by them, not by place."""


def compare_configs(
    first: ResolvedConfig, second: ResolvedConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ once both files are complete, by JSON pointer; a
    missing value is None.

    Raises:
        ValueError: the configs are of different forms.
    """
    if first.form != second.form:
        raise ValueError(
            f"one is of the {first.form} form, the other of the {second.form} form"
        )
    before = dict(_leaves(resolved_document(first)))
    after = dict(_leaves(resolved_document(second)))
    differences: dict[str, tuple[Any, Any]] = {}
    for pointer in before | after:
        values = (before.get(pointer), after.get(pointer))
        if values[0] != values[1]:
            differences[pointer] = values
    return differences


def _leaves(value: Any, path: JsonPath = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, _item_name(item, index)))
    else:
        yield pointer_to(*path), value


def _item_name(item: Any, index: int) -> str | int:
    if isinstance(item, Mapping):
        for key in _SELECTOR_KEYS:
            if item.get(key):
                return str(item[key])
    return index
