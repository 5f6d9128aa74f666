"""Name the types of JSON values, and check values against annotations."""

import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]
"""A JSON object that is not to be changed."""

JsonPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""


def fits(value: Any, hint: Any, *, within: bool = False) -> bool:
    """Return whether a value is of an annotated type; `within` checks the fields of
    dataclasses, too.

    True and False are not numbers, an int is a float.

    >>> fits(1, float), fits(True, int), fits(["a"], list[str])
    (True, False, True)
    >>> fits(None, int | None), fits((1, "a"), tuple[int, ...])
    (True, False)
    """
    all_fit = functools.partial(_all_fit, within=within)
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, argument, within=within) for argument in arguments)
    if origin is type:
        return isinstance(value, type) and issubclass(value, arguments[0])
    if origin in (dict, Mapping):
        keys, items = arguments
        if not isinstance(value, dict):
            return False
        return all_fit(value.keys(), keys) and all_fit(value.values(), items)
    if origin in (list, tuple):
        # Tuples are of any length: tuple[int, ...]
        return isinstance(value, origin) and all_fit(value, arguments[0])
    if origin is Literal:
        return value in arguments
    if isinstance(value, bool) and hint in (int, float):
        return False
    if hint is float:
        return isinstance(value, (int, float))
    if within and isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, hint):
            return False
        fields = field_hints(hint)
        return all(fits(getattr(value, name), fields[name], within=True) for name in fields)
    return hint is Any or isinstance(value, origin or hint)


def _all_fit(values: Iterable[Any], hint: Any, *, within: bool) -> bool:
    return all(fits(value, hint, within=within) for value in values)


@functools.cache
def field_hints(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass, and what they are annotated with."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
