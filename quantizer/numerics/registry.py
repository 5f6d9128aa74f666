"""Plain dicts as registries: a decorator that refuses a name twice, and a look-up that helps
after a miss.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def register(registry: dict[str, T], name: str) -> Callable[[T], T]:
    """Return a decorator that enters what it decorates into `registry` under `name`.

    Raises:
        ValueError: the name is taken.

    >>> shapes = {}
    >>> @register(shapes, "square")
    ... def square(side):
    ...     return side * side
    >>> sorted(shapes)
    ['square']
    """

    def enter(entry: T) -> T:
        if name in registry:
            raise ValueError(
                f'"{name}" is registered already, by {registry[name]!r}; choose another name.'
            )
        registry[name] = entry
        return entry

    return enter


def lookup(registry: Mapping[str, T], name: str, kind: str) -> T:
    """Return the entry called `name`; `kind` is what an entry is, for the error.

    Raises:
        ValueError: there is none; the known names and the closest one are listed.

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
