"""Convert an exported program to a graph: operators get canonical names, arguments are passed
by name, and in-place operators become functional.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from quantizer.errors import ModelError
from quantizer.graph import targets
from quantizer.graph.ir import Graph, Node, Ref, references
from quantizer.graph.names import Namer
from quantizer.graph.ops import OPS, find_op
from quantizer.graph.stored import as_floats, constants_of_code, with_output
from quantizer.graph.tracing.functionalize import is_inplace
from quantizer.graph.tracing.lengths import (
    open_lengths,
    same_shape,
    same_size,
    size_in_call,
    symbol_sizes,
)
from quantizer.graph.tracing.program_nodes import (
    MARK,
    STUB_OPERATORS,
    module_path,
    plain_constant,
    takes_whole_length,
    writes_all,
)


class Converter:
    """Converts one program in a walk over its nodes.

    Attributes:
        nodes: the nodes of the graph, so far.
        values: by node of the program, its value in the graph: a Ref, a constant, or a list of
            these.
        paths: by placeholder of a parameter, buffer or constant, the tensor's path.
        tensors: the parameters, buffers and constants by path.
        learned: the paths of parameters.
        tensor_nodes: by path, the node that outputs the tensor.
        sizes: the values of torch's symbolic sizes in the example call.
    """

    def __init__(self, program: ExportedProgram, module: nn.Module) -> None:
        self.program = program
        self.module = module
        self.namer = Namer(module)
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Any] = {}
        self.paths: dict[fx.Node, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.learned: set[str] = set()
        self.tensor_nodes: dict[str, str] = {}
        self.sizes: dict[Any, int] = {}
        self._specs: dict[str, Any] = {}
        for spec in program.graph_signature.input_specs:
            self._specs[spec.arg.name] = spec
        self._first_path: dict[int, str] = {}
        named = itertools.chain(module.named_buffers(), module.named_parameters())
        for path, tensor in named:
            self._first_path[id(tensor)] = path

    def graph(
        self, input_paths: tuple[tuple[Any, ...], ...], shapes: Sequence[Sequence[int]]
    ) -> Graph:
        """Return the graph of the program.

        Args:
            input_paths: where each input is in the call.
            shapes: of the tensors in the example call. Dynamic sizes have these values in the
                graph.

        Raises:
            ModelError: the program calls other programs.
        """
        self.sizes = symbol_sizes(self.program, shapes)
        outputs: Sequence[fx.Node] = ()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = node.args[0]
            else:
                raise ModelError(
                    f"{self.namer.model} cannot be quantized: it runs other programs "
                    f"(torch.cond, a map or a loop; {node.target} in the trace)",
                    help="compute both branches and choose with torch.where, or write the loop "
                    "out",
                )
        leaves: list[Any] = []
        specs = self.program.graph_signature.output_specs
        for spec, value in zip(specs, outputs, strict=True):
            if spec.kind == OutputKind.USER_OUTPUT:
                leaves.append(self._value(value))
        out_spec = self.program.call_spec.out_spec
        assert out_spec is not None  # torch.export always fills it

        graph = Graph(
            self.namer.model,
            tuple(self.nodes),
            leaves,
            self.tensors,
            input_paths,
            tuple(open_lengths(self.program).values()),
            constants=constants_of_code(self.module, self.tensors),
        )
        graph = with_output(graph, leaves, out_spec)
        return graph.replaced(nodes=_alive(self.nodes, graph.output))

    def _placeholder(self, node: fx.Node) -> None:
        """Add an input of the network, or a tensor of the module."""
        spec = self._specs[node.name]
        if spec.kind != InputKind.USER_INPUT:
            path = self._tensor(node, spec.target or node.name)
            if spec.kind == InputKind.PARAMETER:
                self.learned.add(path)
            return
        index = sum(known.op == "input" for known in self.nodes)
        name = self.namer.input_name(index)
        value = node.meta.get("val")
        attrs: dict[str, Any] = {"index": index}
        self.values[node] = Ref(name)
        if not isinstance(value, Tensor):
            # torch.export treats numbers in the call as constants
            constant = plain_constant(value, self.namer.model)
            attrs["value"] = constant
            self.values[node] = constant
        self.nodes.append(Node(name, "input", "input", attrs=attrs, **self._kind(value)))

    def _tensor(self, node: fx.Node, target: str) -> str:
        """Add a tensor of the program and return its path."""
        tensor = self.program.state_dict.get(target)
        if tensor is None:
            tensor = self.program.constants[target]
        assert isinstance(tensor, Tensor)
        path = self._first_path.get(id(tensor), target)
        self.paths[node] = path
        self.tensors[path] = tensor.detach().resolve_neg()
        return path

    def _value(self, argument: Any) -> Any:
        """Return the graph's value for an argument: a Ref, a constant, or a list of these.

        A tensor of the module that is read gets a node, as in `x + self.shift`.
        """
        if isinstance(argument, (list, tuple)):
            return [self._value(item) for item in argument]
        if isinstance(argument, Ref):
            return argument
        if not isinstance(argument, fx.Node):
            model = self.namer.model
            return plain_constant(argument, model)
        if argument not in self.paths:
            return self.values[argument]
        path = self.paths[argument]
        if path not in self.tensor_nodes:
            self.tensor_nodes[path] = self._add_tensor_node(path)
        return Ref(self.tensor_nodes[path])

    def _add_tensor_node(self, path: str) -> str:
        """Add a node that outputs a parameter or a constant, and return its name."""
        owner, _, attribute = path.rpartition(".")
        scope = self.namer.canonical(owner)
        name = self.namer.name(scope, attribute)
        tensor = self.tensors[path]
        is_complex = tensor.is_complex()
        # Files contain floats only
        if is_complex:
            tensor = as_floats(tensor)
            self.tensors[path] = tensor
        op = "parameter" if path in self.learned and not is_complex else "constant"
        params = {"weight": path}
        shape = tuple(tensor.shape)
        self.nodes.append(Node(name, op, op, params=params, shape=shape, dtype=tensor.dtype))
        if not is_complex:
            return name
        numbers = torch.view_as_complex(tensor)
        inputs = {"input": Ref(name)}
        return self._add(scope, "aten.view_as_complex.default", inputs, numbers).name

    def _call(self, node: fx.Node) -> None:
        """Add a call, unless it only passes a value on.

        An in-place operator gives its first argument a new value: after `y = x.add_(1)`, all
        readers of x read y.
        """
        if self._returns_first(node):
            first = node.args[0] if node.args else None
            self.values[node] = self._value(first)
            return
        if writes_all(node):
            # The second argument replaces all of the first one
            self.values[node] = self._value(node.args[1])
            return
        self.values[node] = self._converted(node)
        if is_inplace(node):
            before = self._value(node.args[0])
            for key, value in self.values.items():
                if value == before:
                    self.values[key] = self.values[node]

    def _returns_first(self, node: fx.Node) -> bool:
        """Return whether a call only passes on its first argument."""
        target = targets.target_name(node)
        if target == "operator.getitem":
            # torch's functional batch norm also returns statistics
            source = targets.target_name(node.args[0])
            return source == targets.NORM_WITHOUT_STATISTICS
        if target == MARK and self._stub(node) is not None:
            return False
        return targets.is_noise(target) or takes_whole_length(node, self.sizes)

    def _stub(self, node: fx.Node) -> str | None:
        """Return the operator of the stub in which a `MARK` ran; None if it ran elsewhere."""
        scope = self.namer.canonical(module_path(node))
        return STUB_OPERATORS.get(self.namer.class_name(scope))

    def _converted(self, node: fx.Node) -> Any:
        """Add the nodes that compute a call, and return the graph's value for its result."""
        target = targets.target_name(node)
        scope = self.namer.canonical(module_path(node))
        if targets.is_copy(target):
            return self._copied(node, scope)
        value: Any = node.meta.get("val")
        arguments = targets.named_arguments(node)
        if target == MARK:
            return self._add(scope, target, arguments, value, op=self._stub(node))
        if target == targets.NORM_WITHOUT_STATISTICS:
            return self._add(scope, "aten.batch_norm.default", arguments, value[0])
        if target in targets.CONVOLUTIONS:
            target, arguments = targets.convolution(arguments)
        elif target == targets.LINEAR_TARGET and targets.rank(node.args[1]) == 1:
            return self._product_with_vector(scope, arguments, value)
        return self._add(scope, target, arguments, value)

    def _add(
        self,
        scope: str,
        target: str,
        arguments: dict[str, Any],
        value: Any,
        *,
        op: str | None = None,
    ) -> Ref:
        """Add a node and return a reference to it.

        Args:
            scope: the path of its module.
            target: torch's name of the operator.
            arguments: of the call, by name.
            value: torch's example of the output, which has its shape and dtype.
            op: our name of the operator, if it does not follow from `target`.
        """
        if op is None:
            row = find_op(targets.packet(target))
            op = targets.refine(row.name, arguments)
        node = Node(
            name=self.namer.name(scope, op),
            op=op,
            target=targets.functional(target),
            scope=scope,
            classes=self.namer.classes(scope),
            **self._split(op, arguments),
            **self._kind(value),
        )
        self.nodes.append(node)
        return Ref(node.name)

    def _product_with_vector(self, scope: str, arguments: dict[str, Any], value: Any) -> Ref:
        """Add a matmul, and an add if there is a bias, for `F.linear` with a vector as weight.

        Such a product has no output channels, so it is not a linear layer.
        """
        operands = {"input": arguments["input"], "other": arguments["weight"]}
        product = self._add(scope, "aten.matmul.default", operands, value)
        bias = arguments.get("bias")
        if bias is None:
            return product
        return self._add(scope, "aten.add.Tensor", {"input": product, "other": bias}, value)

    def _copied(self, node: fx.Node, scope: str) -> Any:
        """Add the nodes for `copy`, `fill` or `zero`, and return the result.

        The result is the second argument, a number or a tensor, with the dtype and the shape of
        the first.
        """
        result = node.meta["val"]
        # `zero` has no second argument
        written = node.args[1] if len(node.args) > 1 else 0
        if not isinstance(written, fx.Node):
            arguments = {
                "size": self._sizes(node, scope),
                "fill_value": written,
                "dtype": result.dtype,
                "device": result.device,
            }
            return self._add(scope, "aten.full.default", arguments, result)
        source = written.meta["val"]
        copied = self._value(written)
        if source.dtype != result.dtype:
            arguments = {"input": copied, "dtype": result.dtype}
            copied = self._add(scope, "aten.to.dtype", arguments, source.to(result.dtype))
        if not same_shape(source, result):
            arguments = {"input": copied, "size": self._sizes(node, scope)}
            return self._add(scope, "aten.expand.default", arguments, result)
        # Later in-place operators may change the copy without changing its source
        if is_inplace(node):
            return self._add(scope, "aten.clone.default", {"input": copied}, result)
        return copied

    def _sizes(self, node: fx.Node, scope: str) -> list[Any]:
        """Return the sizes of a node's output.

        Dynamic sizes are read from an input of the network that has them, or else from the
        node's first argument.
        """
        sizes: list[Any] = []
        for axis, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                place = self._input_with_size(size)
                source, dim = (node.args[0], axis) if place is None else place
                arguments = {"input": self._value(source), "dim": dim}
                size = self._add(scope, "aten.sym_size.int", arguments, size)
            sizes.append(size)
        return sizes

    def _input_with_size(self, size: Any) -> tuple[fx.Node, int] | None:
        """Return the first input that has a size, and the axis; None if no input has it."""
        for node in self.program.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            for axis, known in enumerate(getattr(value, "shape", ())):
                if same_size(known, size):
                    return node, axis
        return None

    def _split(self, op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a node's "inputs", "attrs" and "params": references to other nodes, constants,
        and the paths of tensors that the layer owns.
        """
        inputs: dict[str, Any] = {}
        attrs: dict[str, Any] = {}
        params: dict[str, Any] = {}
        owns_tensors = op in OPS and (OPS[op].weight or OPS[op].owns)
        for key, argument in arguments.items():
            if key == "params" and all(item in self.paths for item in argument):
                # The weights of a recurrent layer
                names = targets.parameter_names(arguments)
                for name, item in zip(names, argument, strict=True):
                    params[name] = self.paths[item]
            elif owns_tensors and key not in ("input", "indices") and self._is_own(argument):
                params[key] = self.paths[argument]
            else:
                value = self._value(argument)
                if any(references(value)):
                    inputs[key] = value
                else:
                    attrs[key] = value
        return {"inputs": inputs, "attrs": attrs, "params": params}

    def _is_own(self, argument: Any) -> bool:
        """Return whether an argument is a tensor of the module that a layer can own, which no
        complex tensor is.
        """
        if not isinstance(argument, fx.Node) or argument not in self.paths:
            return False
        return not argument.meta["val"].is_complex()

    def _kind(self, value: Any) -> dict[str, Any]:
        """Return a node's "shape", "dtype" and "open_axes"; none if `value` is not a tensor."""
        if not isinstance(value, Tensor):
            return {}
        shape: list[int | None] = []
        open_axes: list[int] = []
        for axis, size in enumerate(value.shape):
            shape.append(size_in_call(size, self.sizes))
            if shape[axis] is not None and size_in_call(size, {}) is None:
                open_axes.append(axis)
        return {"shape": tuple(shape), "dtype": value.dtype, "open_axes": tuple(open_axes)}


def _alive(nodes: Sequence[Node], output: Any) -> tuple[Node, ...]:
    """Return the nodes that something reads, and all inputs: calls pass those that nothing
    reads, too.
    """
    read = set(references(output))
    alive: list[Node] = []
    for node in reversed(nodes):
        if node.name in read or node.op == "input":
            alive.append(node)
            read.update(node.refs())
    return tuple(reversed(alive))
