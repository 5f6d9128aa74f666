"""Check the fields of dataclasses against their annotations, with errors that are sentences."""

import dataclasses
import functools
import types
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from quantizer.config.json_types import field_hints, fits
from quantizer.config.wording import a_kind, closest_word, did_you_mean, with_article
from quantizer.errors import UsageError

_MAX_SHOWN = 60
_T = TypeVar("_T")


def type_checked(cls: type[_T]) -> type[_T]:
    """Make a dataclass refuse unknown fields, and values of another type at construction.

    Raises (when the class is called, or a field is set):
        UsageError: naming class, field and value.
    """
    build: Callable[..., None] = cls.__init__

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            _check_name(self, name)
        build(self, *args, **kwargs)
        check_field_types(self)

    def set_field(self: Any, name: str, value: Any) -> None:
        _check_name(self, name)
        object.__setattr__(self, name, value)

    cls.__init__ = init  # type: ignore[method-assign]
    cls.__setattr__ = set_field  # type: ignore[method-assign]
    return cls


def _check_name(instance: Any, name: str) -> None:
    names = [field.name for field in dataclasses.fields(instance)]
    if name in names:
        return
    remedy = did_you_mean(name, names, f"its fields are {', '.join(names)}")
    raise UsageError(f"{type(instance).__name__} has no field {name!r}", help=remedy)


def check_field_types(instance: Any) -> None:
    """Check every field of a dataclass; its values may have been changed since it was built.

    Raises:
        UsageError: a field's value is not of its type.
    """
    kind: type = type(instance)
    for name, hint in field_hints(kind).items():
        value = getattr(instance, name)
        if fits(value, hint):
            continue
        label = f"{kind.__name__}.{name}"
        if get_origin(hint) is dict and isinstance(value, dict):
            label, value, hint = _wrong_item(label, value, hint)
        shown = repr(value)
        if len(shown) > _MAX_SHOWN:
            shown = a_kind(value)
        message = f"{label} is {shown}, not {_expected(hint)}"
        raise UsageError(message, help=_help(value, hint))


def _wrong_item(label: str, value: dict[Any, Any], hint: Any) -> tuple[str, Any, Any]:
    """Return the first key or value of a dict that is not of its type: its label, itself, and
    its type.
    """
    key_hint, item_hint = get_args(hint)
    for key, item in value.items():
        if not fits(key, key_hint):
            return f"a key of {label}", key, key_hint
        if not fits(item, item_hint):
            return f"{label}[{key!r}]", item, item_hint
    raise AssertionError("all of it fits")


def _expected(hint: Any) -> str:
    """Return a type in words."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(argument) for argument in arguments)
    if origin is type:
        return f"a subclass of {arguments[0].__name__}"
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if hint is type(None):
        return "None"
    name = hint.__name__
    if arguments:
        parts = " to ".join(argument.__name__ for argument in arguments)
        name = f"{name} of {parts}"
    return with_article(name)


def _help(value: Any, hint: Any) -> str | None:
    """Return what to write instead, where that is known."""
    is_dataclass = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    if is_dataclass and dataclasses.is_dataclass(value):
        names: list[str] = []
        for name, wanted in get_type_hints(hint).items():
            if fits(value, wanted):
                names.append(f"{name}=")
        return f"write {hint.__name__}(…) with it as {', '.join(names)}" if names else None
    if hint is str and isinstance(value, type):
        return f'write "{value.__name__}"'
    for wanted in (hint, *get_args(hint)):
        if isinstance(wanted, type) and issubclass(wanted, Enum):
            members = list(wanted.__members__)
            near = closest_word(str(value), members)
            return f"write {wanted.__name__}.{near}" if near else f"one of {', '.join(members)}"
    return None
