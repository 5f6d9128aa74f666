"""Plain dicts as registries: a decorator that refuses a duplicate name, and a look-up that
suggests the closest name.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeVar

_Entry = TypeVar("_Entry")


def register_in(registry: dict[str, _Entry], name: str) -> Callable[[_Entry], _Entry]:
    """Return a decorator that enters a function or class into `registry` under `name`.

    Raises:
        ValueError: the name is taken.

    >>> shapes = {}
    >>> @register_in(shapes, "square")
    ... def square(side):
    ...     return side * side
    >>> sorted(shapes)
    ['square']
    """

    def enter(entry: _Entry) -> _Entry:
        """Put an entry under its name, and return it."""
        if name in registry:
            raise ValueError(
                f'"{name}" is registered already, by {registry[name]!r}; choose another name.'
            )
        registry[name] = entry
        return entry

    return enter


def lookup(registry: Mapping[str, _Entry], name: str, kind: str) -> _Entry:
    """Return the entry called `name`. `kind` says in the error what an entry is.

    Raises:
        ValueError: there is no such entry. The message lists the known names and the closest
            one.

    >>> lookup({"half_even": 1, "half_up": 2}, "halfup", "mode")
    Traceback (most recent call last):
        ...
    ValueError: "halfup" is not a mode; known are half_even, half_up; did you mean "half_up"?
    """
    if name in registry:
        return registry[name]
    close = get_close_matches(name, registry, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else "."
    raise ValueError(f'"{name}" is not a {kind}; known are {", ".join(sorted(registry))}{hint}')
