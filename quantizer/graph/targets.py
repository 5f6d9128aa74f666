"""From the name of an operator to what runs it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch


def resolve(target: str) -> Callable[..., Any]:
    """The callable behind "aten.relu.default" or "operator.getitem"; nothing outside torch's operators and `operator`.

    Raises:
        ValueError: the target names something else.
    """
    namespace, packet, *overload = target.split(".")
    if namespace == "operator" and not packet.startswith("_"):
        return getattr(operator, packet)  # type: ignore[no-any-return]
    if not overload or not namespace.isidentifier():
        raise ValueError(f"{target!r} is not a torch operator such as 'aten.relu.default'")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload[0])  # type: ignore[no-any-return]


def takes_self(function: Callable[..., Any]) -> bool:
    """Whether torch calls the first argument "self", which cannot be a keyword of a method: ours is "input"."""
    schema = getattr(function, "_schema", None)
    return schema is not None and any(argument.name == "self" for argument in schema.arguments)


def call(target: str, arguments: Mapping[str, Any]) -> Any:
    """Run an operator on arguments by our names."""
    function = resolve(target)
    if not hasattr(function, "_schema"):
        return function(*(value for _, value in sorted(arguments.items())))
    if takes_self(function):
        arguments = {"self" if name == "input" else name: value for name, value in arguments.items()}
    return function(**arguments)
