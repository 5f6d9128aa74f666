"""Run the operators of a stored graph, along with the module that it is compared with."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantizer.graph.ir import Call, Graph, Node, map_refs, references
from quantizer.graph.program_nodes import STUB_OPERATORS
from quantizer.graph.targets import LINEAR_TARGET, argument_defaults, resolve_target
from quantizer.graph.targets import call as call_operator
from quantizer.results.small_calls import DifferentError, are_nearly_equal, check_kind
from quantizer.seeding import seed_everything

_PRODUCTS = {
    nn.functional.linear: LINEAR_TARGET,
    nn.functional.conv1d: "aten.conv1d.default",
    nn.functional.conv2d: "aten.conv2d.default",
    nn.functional.conv3d: "aten.conv3d.default",
}
"""The functions that take most of the time of a run, and their targets in a graph."""
_Arguments = Mapping[str, Any]
"""The arguments of an operator, by name."""


class GraphRun:
    """The results of running the operators of a graph.

    The traced operators run, and not the layers of `Network`, which may add numbers in another
    order.

    Attributes:
        shapes: the shape of the tensor that each node gives.
    """

    def __init__(self, graph: Graph, call: Call) -> None:
        self._graph = graph
        # Sizes that the user asked to leave open may be any; another number of tokens is traced
        # again, as other lengths of texts may have other scales
        self._takes_any_size = False
        for length in graph.lengths:
            self._takes_any_size |= length.is_asked_for
        self._values: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        inputs: list[str] = []
        for node in graph.nodes:
            if node.op == "input":
                inputs.append(node.name)
        arguments = pytree.tree_leaves(call)
        values = zip(inputs, arguments, strict=True)
        self._values.update(values)
        self._unread = Counter(references(graph.output))
        for node in graph.nodes:
            self._unread.update(node.refs())
        self._position = 0
        self._products = _product_indices(graph)
        seed_everything(0)
        self._random_state = torch.get_rng_state()

    @property
    def leaves(self) -> list[Any]:
        """Return the output, flattened, after all nodes have run."""
        leaves: list[Any] = self._read(self._graph.output)
        return leaves

    def finish(self) -> None:
        """Run the nodes that have not run yet.

        Raises:
            DifferentError: a node gives another dtype or shape than the graph says.
        """
        self._advance(len(self._graph.nodes))

    def take(self, target: str, arguments: _Arguments, product: Tensor) -> None:
        """Take a product that the module has computed as the value of the graph's node for it.

        The nodes before that node run first. The product is taken if all arguments are equal.

        Args:
            target: of the function that the module called.
            arguments: all arguments of the call.
            product: what the function returned.

        Raises:
            DifferentError: a node gives another dtype or shape than the graph says.
        """
        index = self._next_product(arguments["weight"])
        if index is None:
            return
        self._advance(index)
        node = self._graph.nodes[index]
        if node.target != target:
            return
        traced = dict(argument_defaults(target))
        traced.update(self._arguments(node))
        if _are_same(traced, arguments):
            # The module may go on to change its own value in place
            value = product.clone()
            self._store(node, value)
            self._position += 1

    def _next_product(self, weight: Any) -> int | None:
        """Return the index of the next node that multiplies by a weight; None if there is
        none.
        """
        is_plain = type(weight) in (Tensor, nn.Parameter)
        if not is_plain:
            return None
        address = weight.data_ptr()
        for index in self._products.get(address, ()):
            if index >= self._position:
                return index
        return None

    def _advance(self, stop: int) -> None:
        """Run the nodes before index `stop`, with the random numbers of a run by itself."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._random_state)
        for node in self._graph.nodes[self._position : stop]:
            value = self._values.get(node.name)
            if node.op != "input":
                value = self._value(node)
            self._store(node, value)
            self._position += 1
        self._random_state = torch.get_rng_state()
        torch.set_rng_state(outside)

    def _read(self, value: Any) -> Any:
        """Return a nested value with the results of nodes instead of references to them."""
        return map_refs(value, self._values.__getitem__)

    def _store(self, node: Node, value: Any) -> None:
        """Store the result of a node and its shape, and free the results that no later node
        reads.

        Raises:
            DifferentError: it has another dtype or shape than the graph says.
        """
        self._check(node, value)
        self._values[node.name] = value
        for name in node.refs():
            self._unread[name] -= 1
            if self._unread[name] == 0:
                del self._values[name]

    def _check(self, node: Node, value: Any) -> None:
        """Check the result of a node, and store its shape.

        Raises:
            DifferentError: it has another dtype or shape than the graph says.
        """
        if isinstance(value, Tensor):
            check_kind(node, value)
            self.shapes[node.name] = tuple(value.shape)
            return
        if node.shape is not None:
            raise DifferentError(f"{node.name} gives no tensor")
        if node.op != "input":
            return
        if not are_nearly_equal(value, node.attrs["value"]):
            raise DifferentError(f"{node.name} is another value")

    def _value(self, node: Node) -> Any:
        """Return the result of a node."""
        if node.op in ("parameter", "constant"):
            return self._graph.weight(node)
        arguments = self._arguments(node)
        if node.op in STUB_OPERATORS.values():
            return arguments["input"]
        return call_operator(node.target, arguments)

    def _arguments(self, node: Node) -> dict[str, Any]:
        """Return the arguments of a node's operator by name."""
        arguments: dict[str, Any] = self._read(node.inputs)
        arguments.update(node.attrs)
        tensors = self._graph.tensors
        if _takes_list_of_parameters(node.target):
            paths = node.params.values()
            arguments["params"] = [tensors[path] for path in paths]
        else:
            for name, path in node.params.items():
                arguments[name] = tensors[path]
        return arguments

    def check_sizes(self, node: Node, several: "GraphRun", fewer: "GraphRun") -> None:
        """Check that exactly the open sizes of a node follow the batch size and the lengths.

        Args:
            node: a node that gives a tensor.
            several: a run of several samples, of other lengths than this one if lengths are
                open.
            fewer: the same run with one sample less.

        Raises:
            DifferentError: another size follows them, or an open one does not.
        """
        name = node.name
        shape = self.shapes[name]
        several_shape = several.shapes[name]
        fewer_shape = fewer.shapes[name]
        for axis, size in enumerate(node.shape or ()):
            is_batch = size is None
            is_open = is_batch or axis in node.open_axes
            is_any_size = is_batch or (is_open and self._takes_any_size)
            is_same = is_any_size or size == shape[axis]
            if not is_same:
                raise DifferentError(f"{name} gives another shape")
            follows_batch = fewer_shape[axis] != several_shape[axis]
            if follows_batch != is_batch:
                raise DifferentError(f"{name} follows the batch elsewhere")
            if is_open:
                continue
            follows_length = several_shape[axis] != shape[axis]
            if follows_length:
                raise DifferentError(f"{name} follows a length elsewhere")


class SharedProducts(TorchFunctionMode):
    """Runs a graph along with its module inside the `with` block, and gives the products of the
    module to the graph. Computing them twice would take as long as another run of the module.
    """

    def __init__(self, run: GraphRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        target = _PRODUCTS.get(func)
        if target is not None:
            defaults = argument_defaults(target)
            arguments = dict(defaults)
            positional = zip(defaults, args, strict=False)
            arguments.update(positional)
            arguments.update(kwargs)
            self._run.take(target, arguments, value)
        return value


def _product_indices(graph: Graph) -> Mapping[int, list[int]]:
    """Return the indices of the nodes that multiply by a weight, by the address of the
    weight.
    """
    indices: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        path = node.params.get("weight")
        is_product = node.target in _PRODUCTS.values()
        if path is None or not is_product:
            continue
        weight = graph.tensors[path]
        if type(weight) is Tensor:
            address = weight.data_ptr()
            indices[address].append(index)
    return indices


def _are_same(arguments: _Arguments, others: _Arguments) -> bool:
    """Return whether all arguments of two calls of an operator are the same."""
    return all(_is_same(argument, others[name]) for name, argument in arguments.items())


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two arguments hold the same values in the same layout; False for NaN."""
    are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    if not are_tensors:
        return pytree.tree_leaves(one) == pytree.tree_leaves(other)
    if one.is_set_to(other):
        return True
    if one.dtype != other.dtype:
        return False
    if one.stride() != other.stride():
        return False
    return torch.equal(one, other)


@cache
def _takes_list_of_parameters(target: str) -> bool:
    """Return whether an operator takes all parameters of a recurrent layer as one list."""
    schema: Any = getattr(resolve_target(target), "_schema", None)
    if schema is None:
        return False
    return any(argument.name == "params" for argument in schema.arguments)
