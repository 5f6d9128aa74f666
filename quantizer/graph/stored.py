"""A traced graph as JSON and back, without the values of its tensors: those of a graph that is
read are NaN or 0.

A constant that holds a far value (`far_values`) is full of it, as plans depend on that.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.far_values import far_value
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.lengths import Length
from quantizer.storage.deferred_tensor import DeferredTensor

_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """The graph as it came from a trace.

    Raises:
        TypeError: a constant has no form in JSON.
    """
    constants = {
        node.params["weight"] for node in graph.nodes if node.op in ("constant", "parameter")
    }
    return {
        "model": graph.model,
        "nodes": [_node(node) for node in graph.nodes],
        "output": _plain(graph.output),
        "tensors": {
            path: _described(tensor, path in constants)
            for path, tensor in graph.tensors.items()
        },
        "input_paths": _plain(graph.input_paths),
        "lengths": [asdict(length) for length in graph.lengths],
        "output_names": list(graph.output_names),
    }


def graph_from_json(value: Mapping[str, Any]) -> Graph:
    """The graph that `graph_to_json` described; tensors that were read from files when needed
    still say so.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it described none.
    """
    nodes = tuple(
        Node(**{name: _read(item) for name, item in node.items()}) for node in value["nodes"]
    )
    tensors = {path: _blank(*facts) for path, facts in value["tensors"].items()}
    lengths = tuple(_length(**length) for length in value["lengths"])
    paths, names = _read(value["input_paths"]), tuple(value["output_names"])
    return Graph(
        value["model"],
        nodes,
        _read(value["output"]),
        tensors,
        paths,
        lengths,
        output_names=names,
    )


def _node(node: Node) -> dict[str, Any]:
    """Its fields, but for those that are left at their defaults."""
    return {
        name: _plain(value)
        for name, value in vars(node).items()
        if value != _DEFAULTS.get(name)
    }


_DEFAULTS = {each.name: each.default for each in fields(Node)}


def _described(tensor: Tensor, is_constant: bool) -> list[Any]:
    """Shape, dtype, whether it is deferred, and what far value a constant holds."""
    is_deferred = isinstance(tensor, DeferredTensor)
    is_read = is_constant and tensor.is_floating_point() and not is_deferred
    far = far_value(tensor) if is_read else None
    return [
        list(tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        is_deferred,
        _plain(far),
    ]


def _blank(shape: list[int], dtype: str, is_deferred: bool, far: Any) -> Tensor:
    kind, value = _torch(dtype), _read(far)
    if value is None:
        value = math.nan if kind.is_floating_point else 0
    # A tensor on the meta device would take no memory either, but half a second for what torch
    # imports to compute it.
    blank = torch.full((), value, dtype=kind).expand(shape)
    return DeferredTensor(shape, kind, lambda: blank) if is_deferred else blank


def _length(axes: list[list[int]], **others: Any) -> Length:
    return Length(axes=tuple((index, axis) for index, axis in axes), **others)


def _plain(value: Any) -> Any:
    """A nested constant in JSON: what JSON lacks is an object with one key, which says what it
    is.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    return _KINDS[kind](content)


def _torch(name: str) -> Any:
    """A dtype, a layout or a memory format by its name."""
    found = getattr(torch, name)
    if not isinstance(found, _NAMED):
        raise ValueError(name)
    return found


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "tuple": lambda items: tuple(map(_read, items)),
    "dict": lambda items: {_read(key): _read(item) for key, item in items},
    "ref": Ref,
    "torch": _torch,
    "device": torch.device,
}
