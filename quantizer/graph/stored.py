"""A traced graph as JSON and back.

The JSON describes tensors by shape and dtype. Their values come from the module and, for
constants of its code, from another file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.output_names import leaf_names, leaves_of, plain_output
from quantizer.graph.tracing.lengths import Length

_NAMED_IN_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_DTYPES = (torch.dtype,)

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorKind:
    """The shape and the dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def fitted(self, tensor: Tensor | None) -> Tensor | None:
        """Return a tensor if it has this shape and this dtype. Complex numbers become floats
        if these are wanted.
        """
        if tensor is not None and tensor.is_complex() and not self.dtype.is_complex:
            tensor = as_floats(tensor)
        if tensor is None or (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            return None
        return tensor


@dataclass(frozen=True)
class StoredGraph:
    """A graph as it is in a file.

    Attributes:
        graph: the graph without tensors; its output is the list of the leaves.
        tensors: the kind of each tensor of the graph, by path.
    """

    graph: Graph
    tensors: Mapping[str, TensorKind]

    def bound(self, module: nn.Module, constants: Mapping[str, Tensor]) -> Graph | None:
        """Return the graph with the tensors of a module and these constants.

        Returns None if a tensor is missing or has another shape or dtype.
        """
        tensors: dict[str, Tensor] = {}
        for path, kind in self.tensors.items():
            tensor = constants.get(path)
            if path not in self.graph.constants:
                tensor = _module_tensor(module, path)
            tensor = kind.fitted(tensor)
            if tensor is None:
                return None
            tensors[path] = tensor.detach().resolve_neg()
        graph = self.graph.replaced(tensors=tensors)
        if graph.device == _CPU:
            return graph
        return graph.mapped(lambda node: node.on(graph.device))

    def with_zeros(self, constants: Mapping[str, Tensor]) -> Graph:
        """Return the graph with these constants. All other tensors are zeros without memory of
        their own: who only looks at its structure needs no model.
        """
        tensors: dict[str, Tensor] = {}
        for path, kind in self.tensors.items():
            zeros = torch.zeros((), dtype=kind.dtype).expand(kind.shape)
            tensors[path] = constants.get(path, zeros)
        return self.graph.replaced(tensors=tensors)


def _module_tensor(module: nn.Module, path: str) -> Tensor | None:
    """Return the parameter, buffer or other tensor that a module holds at a path; None if
    there is none.
    """
    scope, _, name = path.rpartition(".")
    try:
        part = module.get_submodule(scope)
        value = getattr(part, name)
    except AttributeError:
        return None
    return value if isinstance(value, Tensor) else None


def as_floats(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs of floats, the last axis of the result."""
    resolved = tensor.resolve_conj()
    return torch.view_as_real(resolved).contiguous()


def constants_of_code(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the paths of tensors that only the code of the module holds."""
    paths: list[str] = []
    for path, tensor in tensors.items():
        kind = TensorKind(tuple(tensor.shape), tensor.dtype)
        if kind.fitted(_module_tensor(module, path)) is None:
            paths.append(path)
    return tuple(paths)


def with_output(graph: Graph, leaves: list[Any], structure: Any) -> Graph:
    """Return the graph with an output of these leaves in a structure of torch's pytree."""

    def rebuild(output: Any) -> Any:
        """Return the plain output in the model's own type."""
        return pytree.tree_unflatten(leaves_of(output), structure)

    returned = pytree.tree_unflatten(leaves, structure)
    return graph.replaced(
        output=plain_output(returned), output_names=leaf_names(returned), rebuild=rebuild
    )


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """Return the graph as it came from a trace, as values of JSON.

    The order of keys is that of arguments and counts.

    Raises:
        TypeError: a value has no form in JSON.
    """
    tensors: dict[str, Any] = {}
    for path, tensor in graph.tensors.items():
        tensors[path] = {"shape": list(tensor.shape), "dtype": _name_in_torch(tensor.dtype)}
    # A calibration on a GPU leaves the same file.
    graph = graph.mapped(lambda node: node.on(_CPU))
    leaves = leaves_of(graph.output)
    return {
        "model": graph.model,
        "inputs": [list(path) for path in graph.input_paths],
        "lengths": [asdict(length) for length in graph.lengths],
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "output": [_to_json(leaf) for leaf in leaves],
        "tensors": tensors,
        "constants": list(graph.constants),
    }


def graph_from_json(value: Mapping[str, Any]) -> StoredGraph:
    """Return the graph that `graph_to_json` described.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, RuntimeError: it described none.
    """
    tensors: dict[str, TensorKind] = {}
    for path, kind in value["tensors"].items():
        shape = tuple(kind["shape"])
        tensors[path] = TensorKind(shape, _from_torch(kind["dtype"], _DTYPES))
    graph = Graph(
        value["model"],
        tuple(map(_node_from_json, value["nodes"])),
        output=list(map(_from_json, value["output"])),
        tensors={},
        input_paths=tuple(map(tuple, value["inputs"])),
        lengths=tuple(map(_length_from_json, value["lengths"])),
        constants=tuple(value["constants"]),
    )
    return StoredGraph(graph, tensors)


def short_class(name: str) -> str:
    """Return the name of a class without its module."""
    return name.rpartition(".")[2]


def _node_to_json(node: Node) -> dict[str, Any]:
    shape = None if node.shape is None else list(node.shape)
    dtype = None if node.dtype is None else _name_in_torch(node.dtype)
    return {
        "name": node.name,
        "op": node.op,
        "target": node.target,
        "inputs": _items(node.inputs),
        "attrs": _items(node.attrs),
        "params": dict(node.params),
        "scope": node.scope,
        # Modules of the user's files may get other names in another process
        "classes": [short_class(name) for name in node.classes],
        "shape": shape,
        "dtype": dtype,
        "open_axes": list(node.open_axes),
    }


def _node_from_json(value: Mapping[str, Any]) -> Node:
    """Return a node of a stored graph."""
    shape = value["shape"]
    dtype = value["dtype"]
    if shape is not None:
        shape = tuple(shape)
    if dtype is not None:
        dtype = _from_torch(dtype, _DTYPES)
    return Node(
        value["name"],
        value["op"],
        value["target"],
        inputs=_values(value["inputs"]),
        attrs=_values(value["attrs"]),
        params=value["params"],
        scope=value["scope"],
        classes=tuple(value["classes"]),
        shape=shape,
        dtype=dtype,
        open_axes=tuple(value["open_axes"]),
    )


def _length_from_json(value: Mapping[str, Any]) -> Length:
    axes = tuple((index, axis) for index, axis in value["axes"])
    return replace(Length(**value), axes=axes)


def _items(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _to_json(value) for name, value in mapping.items()}


def _values(items: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _from_json(item) for name, item in items.items()}


def _to_json(value: Any) -> Any:
    """Return a nested constant in JSON.

    What JSON lacks becomes an object with one key, the kind.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": str(value)}
    if isinstance(value, list):
        return list(map(_to_json, value))
    if isinstance(value, tuple):
        return {"tuple": list(map(_to_json, value))}
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, _NAMED_IN_TORCH):
        return {"torch": _name_in_torch(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _from_json(value: Any) -> Any:
    """Return the constant that `_to_json` described.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: it described none.
    """
    if isinstance(value, list):
        return list(map(_from_json, value))
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    return _KINDS[kind](content)


def _name_in_torch(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _from_torch(name: str, kinds: tuple[type[Any], ...] = _NAMED_IN_TORCH) -> Any:
    """Return the dtype, layout or memory format of a name.

    Raises:
        ValueError: torch has none of this name.
    """
    value = getattr(torch, name, None)
    if not isinstance(value, kinds):
        raise ValueError(f"{name!r} is not a {kinds[0].__name__}")
    return value


def _reference(name: Any) -> Ref:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not the name of a node")
    return Ref(name)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": complex,
    "tuple": lambda items: tuple(map(_from_json, items)),
    "ref": _reference,
    "torch": _from_torch,
    "device": torch.device,
}
