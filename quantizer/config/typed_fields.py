"""Checks the fields of public dataclasses against their annotations, in sentences. Knows no
field by name.
"""

import dataclasses
import difflib
import functools
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from quantizer.config.wording import a_kind
from quantizer.errors import UsageError

T = TypeVar("T")


def checked(cls: type[T]) -> type[T]:
    """A dataclass that refuses unknown fields, and when it is made values of another type.

    Raises (when the class is called, or a field is set):
        UsageError: naming class, field and value.
    """
    build: Callable[..., None] = cls.__init__

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            _check_name(self, name)
        build(self, *args, **kwargs)
        check(self)

    def set_field(self: Any, name: str, value: Any) -> None:
        _check_name(self, name)
        object.__setattr__(self, name, value)

    cls.__init__ = init  # type: ignore[method-assign]
    cls.__setattr__ = set_field  # type: ignore[method-assign]
    return cls


def _check_name(instance: Any, name: str) -> None:
    names = [field.name for field in dataclasses.fields(instance)]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1, 0.5)
        raise UsageError(
            f"{type(instance).__name__} has no field {name!r}",
            help=f"did you mean {near[0]!r}?" if near else f"its fields are {', '.join(names)}",
        )


def check(value: Any) -> None:
    """Check every field of a dataclass; its values may have been changed since it was made.

    Raises:
        UsageError: a field's value is not of its type.
    """
    hints = get_type_hints(type(value))
    for name in (field.name for field in dataclasses.fields(value)):
        found, hint = getattr(value, name), hints[name]
        if not fits(found, hint):
            where = f"{type(value).__name__}.{name}"
            if get_origin(hint) is dict and isinstance(found, dict):
                where, found, hint = _misfit(where, found, *get_args(hint))
            shown = text if len(text := repr(found)) <= 60 else a_kind(found)
            raise UsageError(
                f"{where} is {shown}, not {_expected(hint)}", help=_help(found, hint)
            )


def _misfit(where: str, found: dict[Any, Any], keys: Any, values: Any) -> tuple[str, Any, Any]:
    """The first key or value of a dict that is not of its type: where it is, itself, and its
    type.
    """
    for key, item in found.items():
        if not fits(key, keys):
            return f"a key of {where}", key, keys
        if not fits(item, values):
            return f"{where}[{key!r}]", item, values
    raise AssertionError("all of it fits")


def fits(value: Any, hint: Any, *, within: bool = False) -> bool:
    """Whether a value is of an annotated type, and `within` dataclasses their fields; True and
    False are no numbers, an int is a float.

    >>> (
    ...     fits(1, float),
    ...     fits(True, int),
    ...     fits(["a"], list[str]),
    ...     fits(None, int | None),
    ...     fits((1, "a"), tuple[int, ...]),
    ... )
    (True, False, True, True, False)
    """
    inner = functools.partial(fits, within=within)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(inner(value, argument) for argument in arguments)
    if origin is type:
        return isinstance(value, type) and issubclass(value, arguments[0])
    if origin in (dict, Mapping):
        keys, values = arguments
        return isinstance(value, dict) and all(
            inner(k, keys) and inner(v, values) for k, v in value.items()
        )
    if origin is list:
        return isinstance(value, list) and all(inner(item, arguments[0]) for item in value)
    if origin is tuple:  # of any length
        return isinstance(value, tuple) and all(inner(item, arguments[0]) for item in value)
    if origin is Literal:
        return value in arguments
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(
            value, bool
        )
    if within and isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return isinstance(value, hint) and all(
            inner(getattr(value, name), own) for name, own in _fields(hint).items()
        )
    return hint is Any or isinstance(value, origin or hint)


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The fields of a dataclass, and what they are annotated with."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _expected(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_expected(argument) for argument in get_args(hint))
    if get_origin(hint) is type:
        return f"a subclass of {get_args(hint)[0].__name__}"
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is type(None):
        return "None"
    name = hint.__name__
    if get_args(hint):
        name = f"{name} of {' to '.join(argument.__name__ for argument in get_args(hint))}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _help(value: Any, hint: Any) -> str | None:
    """What to write instead, where that can be told."""
    if (
        isinstance(hint, type)
        and dataclasses.is_dataclass(hint)
        and dataclasses.is_dataclass(value)
    ):
        takers = [
            f"{name}=" for name, taken in get_type_hints(hint).items() if fits(value, taken)
        ]
        return f"write {hint.__name__}(…) with it as {', '.join(takers)}" if takers else None
    if hint is str and isinstance(value, type):
        return f'write "{value.__name__}"'
    for wanted in (hint, *get_args(hint)):
        if isinstance(wanted, type) and issubclass(wanted, Enum):
            names = list(wanted.__members__)
            near = difflib.get_close_matches(str(value), names, 1, 0.5)
            return (
                f"write {wanted.__name__}.{near[0]}" if near else f"one of {', '.join(names)}"
            )
    return None
