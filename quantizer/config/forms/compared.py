"""What two config files say that differs, value by value. Imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from quantizer.config.document.document import pointer_to
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.model import Config

NAMED = ("layer_name", "layer_type")
"""What an entry of a list is for; such entries are compared by it, wherever they stand."""


def compared(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """By JSON pointer the values that differ once both files are complete; None where one has
    none.

    Raises:
        ValueError: they are of different forms.
    """
    if first.form != second.form:
        raise ValueError(
            f"one is of the {first.form} form, the other of the {second.form} form"
        )
    before, after = (dict(_leaves(resolved_document(config))) for config in (first, second))
    keys = [*before, *(key for key in after if key not in before)]
    return {
        key: (before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key)
    }


def _leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for at, item in enumerate(value):
            name = (
                next((item[key] for key in NAMED if item.get(key)), at)
                if isinstance(item, Mapping)
                else at
            )
            yield from _leaves(item, (*path, name))
    else:
        yield pointer_to(*path), value
