"""Names of what a network returns: of its outputs, and of the parts of each, by the layers that
make them.
"""

import dataclasses
import numbers
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

from torch.utils import _pytree as pytree

from quantizer.graph.ir import Graph, Ref


def leaf_names(value: Any, prefix: str = "") -> tuple[str, ...]:
    """Return a name for each leaf of a nested output: keys, fields, else numbers, joined by
    dots.

    >>> leaf_names({"boxes": 1, "aux": [2, 3]}), leaf_names(1)
    (('boxes', 'aux.0', 'aux.1'), ('0',))
    """
    items = _items(value)
    if items is None:
        return (prefix or "0",)
    names: list[str] = []
    for key, item in items:
        name = f"{prefix}.{key}" if prefix else key
        names += leaf_names(item, name)
    return tuple(unused_names(names, ()))


def plain_output(value: Any) -> Any:
    """Return an output with its containers as dicts, lists and tuples."""
    items = _items(value)
    if items is None:
        return value
    plain = {name: plain_output(item) for name, item in items}
    if isinstance(value, list):
        return list(plain.values())
    return tuple(plain.values()) if isinstance(value, tuple) else plain


def _items(value: Any) -> list[tuple[str, Any]] | None:
    """Return the names and values of a container, None for what is none."""
    if isinstance(value, Ref):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        fields = [
            (field.name, getattr(value, field.name)) for field in dataclasses.fields(value)
        ]
        # torch has no leaves for None
        return [(name, item) for name, item in fields if item is not None]
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return _named_items(value)
    if isinstance(value, (list, tuple)):
        keys = getattr(value, "_fields", range(len(value)))
        return list(zip(map(str, keys), value, strict=True))
    return None


def _named_items(mapping: Any) -> list[tuple[str, Any]]:
    """Return the values of a mapping with a different name for each key."""
    names = unused_names([_key_name(key) for key in mapping], ())
    return list(zip(names, mapping.values(), strict=True))


def _key_name(key: Any) -> str:
    """Return a name that is the same in each run: of an object, its class.

    >>> [_key_name(key) for key in (1, "boxes", (1, None), object())]
    ['1', 'boxes', '(1, None)', 'object']
    """
    if isinstance(key, tuple):
        return f"({', '.join(map(_key_name, key))})"
    if key is None or isinstance(key, (str, numbers.Number, Enum)):
        return str(key)
    return type(key).__name__


def unused_names(names: Sequence[str], taken: Collection[str]) -> list[str]:
    """Return the names, with a number after each that is taken or repeated.

    >>> unused_names(["0.head", "0.head"], {"0"})
    ['0.head', '0.head.1']
    """
    used = set(taken)
    unique: list[str] = []
    for name in names:
        candidate = name
        count = 0
        while candidate in used:
            count += 1
            candidate = f"{name}.{count}"
        used.add(candidate)
        unique.append(candidate)
    return unique


def output_leaves(graph: Graph) -> list[tuple[str, str]]:
    """Return the name and the node of each tensor that a network returns, in its order."""
    leaves = leaves_of(graph.output)
    names = graph.output_names
    if len(names) != len(leaves):
        names = leaf_names(graph.output)
    tensors: list[tuple[str, str]] = []
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Ref) and graph.by_name[leaf.name].shape is not None:
            tensors.append((name, leaf.name))
    return tensors


def leaves_of(output: Any) -> list[Any]:
    """Return what is in a plain output in order, `Ref`s and constants alike."""
    return pytree.tree_leaves(output, is_leaf=lambda item: item is None)
