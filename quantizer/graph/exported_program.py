"""From an exported program to our graph: canonical operators, arguments by name, in-place ones
made functional.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from quantizer.errors import ModelError
from quantizer.graph import targets as call
from quantizer.graph.functionalize import is_inplace
from quantizer.graph.ir import Graph, Node, Ref, references
from quantizer.graph.lengths import open_lengths, same_shape, same_size, size_of, sizes_of
from quantizer.graph.names import Namer
from quantizer.graph.ops import OPS, find_op
from quantizer.graph.stored import as_floats, module_tensor, with_output

# QuantStub and DeQuantStub compute nothing, so torch.export forgets them unless they leave a
# mark.
# By class: torch's own and those of other tools
STUBS = {"QuantStub": "quant_stub", "DeQuantStub": "dequant_stub"}
# Gives its input; the module that it runs in says which stub it stands for
MARK = "aten.alias.default"


@contextlib.contextmanager
def marked(module: nn.Module) -> Iterator[None]:
    """While this lasts, each stub inside `module` leaves an operator in a trace."""
    handles = [
        child.register_forward_hook(_leave_mark)
        for child in module.modules()
        if type(child).__name__ in STUBS
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leave_mark(_module: nn.Module, _args: Any, output: Any) -> Any:
    return torch.ops.aten.alias.default(output) if isinstance(output, Tensor) else output


class Converter:
    """Walks the program once; `values` maps its nodes to ours."""

    def __init__(self, program: ExportedProgram, module: nn.Module) -> None:
        self.program, self.module, self.namer = program, module, Namer(module)
        self.nodes: list[Node] = []
        self.values: dict[fx.Node, Any] = {}
        self.paths: dict[fx.Node, str] = {}
        self.parameter_nodes: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.learned: set[str] = set()
        self.sizes: dict[Any, int] = {}
        self._first_path = {
            id(t): p
            for p, t in itertools.chain(module.named_buffers(), module.named_parameters())
        }

    def graph(
        self, input_paths: tuple[tuple[Any, ...], ...], shapes: Sequence[Sequence[int]]
    ) -> Graph:
        """The graph of the program; `shapes` are those of the call's leaves, which lengths have
        in the graph.

        Raises:
            ModelError: it holds a node with no place in a straight line.
        """
        signature = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        self.sizes = sizes_of(self.program, shapes)
        inputs = 0
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                spec = signature[node.name]
                if spec.kind == InputKind.USER_INPUT:
                    self._input(node, inputs)
                    inputs += 1
                else:
                    self._tensor(
                        node, spec.target or node.name, learned=spec.kind == InputKind.PARAMETER
                    )
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                outputs = zip(
                    self.program.graph_signature.output_specs, node.args[0], strict=True
                )
                leaves = [
                    self._value(value)
                    for spec, value in outputs
                    if spec.kind == OutputKind.USER_OUTPUT
                ]
            else:
                raise ModelError(
                    f"{self.namer.model} cannot be quantized: it runs other programs "
                    f"(torch.cond, a map or a loop; {node.target} in the trace)",
                    help="compute both branches and choose with torch.where, or write the loop "
                    "out",
                )
        out_spec = self.program.call_spec.out_spec
        assert out_spec is not None  # torch.export always fills it

        held = tuple(open_lengths(self.program).values())
        graph = Graph(
            self.namer.model,
            tuple(self.nodes),
            leaves,
            self.tensors,
            input_paths,
            held,
            constants=self._constants(),
        )
        return _without_dead(with_output(graph, leaves, out_spec))

    def _constants(self) -> tuple[str, ...]:
        """Return the paths of tensors that only the code of the module holds."""
        paths: list[str] = []
        for path, tensor in self.tensors.items():
            known = module_tensor(self.module, path)
            if known is not None and known.is_complex() and not tensor.is_complex():
                known = as_floats(known)
            if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
                paths.append(path)
        return tuple(paths)

    def _input(self, node: fx.Node, index: int) -> None:
        value = node.meta.get("val")
        name = self.namer.input_name(index)
        attrs: dict[str, Any] = {"index": index}
        if isinstance(value, Tensor):
            self.values[node] = Ref(name)
        else:
            # Torch bakes plain numbers into the trace
            self.values[node] = attrs["value"] = value
        self.nodes.append(Node(name, "input", "input", attrs=attrs, **self._kind(value)))

    def _tensor(self, node: fx.Node, target: str, *, learned: bool) -> None:
        state = self.program.state_dict.get(target)
        tensor = state if state is not None else self.program.constants[target]
        assert isinstance(tensor, Tensor)
        path = self._first_path.get(id(tensor), target)
        self.paths[node] = path
        self.tensors[path] = tensor.detach()
        if learned:
            self.learned.add(path)

    def _value(self, argument: Any) -> Any:
        """Our value for an argument: a Ref, a parameter node's Ref, a constant, or a list of
        these.
        """
        if isinstance(argument, fx.Node):
            if argument in self.paths:
                return Ref(self._parameter(self.paths[argument]))
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self._value(item) for item in argument]
        return argument

    def _parameter(self, path: str) -> str:
        """The node that gives a parameter, or a constant, used by a plain expression (`x +
        self.shift`).
        """
        if path not in self.parameter_nodes:
            scope, _, attr = path.rpartition(".")
            module = self.namer.canonical(scope)
            name = self.namer.name(module, attr)
            tensor = self.tensors[path]
            is_complex = tensor.is_complex()
            if is_complex:  # files hold floats alone
                tensor = as_floats(tensor)
                self.tensors[path] = tensor
            op = "parameter" if path in self.learned and not is_complex else "constant"
            params = {"weight": path}
            self.nodes.append(
                Node(name, op, op, params=params, shape=tuple(tensor.shape), dtype=tensor.dtype)
            )
            if is_complex:
                numbers = torch.view_as_complex(tensor)
                name = self._add(
                    module, "aten.view_as_complex.default", {"input": Ref(name)}, numbers
                ).name
            self.parameter_nodes[path] = name
        return self.parameter_nodes[path]

    def _call(self, node: fx.Node) -> None:
        target = call.target_name(node)
        path = self.namer.canonical(_module_path(node))
        stub = STUBS.get(self.namer.class_name(path)) if target == MARK else None
        first = node.args[0] if node.args else None
        picks_norm = (
            target == "operator.getitem"
            and call.target_name(first) == call.NORM_WITHOUT_STATISTICS
        )
        if picks_norm or (
            stub is None and (call.is_noise(target) or self._takes_whole_length(node))
        ):
            self.values[node] = self._value(first)
            return
        if target == "aten.slice_scatter.default" and _writes_all(node):
            self.values[node] = self._value(node.args[1])
            return
        value: Any = node.meta.get("val")
        if call.is_copy(target):
            self.values[node] = self._copied(node, path)
        elif (
            target == call.NORM_WITHOUT_STATISTICS
        ):  # torch's functional form also returns the statistics
            arguments = call.named_arguments(node)
            self.values[node] = self._add(path, "aten.batch_norm.default", arguments, value[0])
        elif target in call.CONVOLUTIONS:
            self.values[node] = self._add(
                path, *call.convolution(call.named_arguments(node)), value
            )
        elif target == call.LINEAR and call.rank(node.args[1]) == 1:
            self.values[node] = self._product_with_vector(
                path, call.named_arguments(node), value
            )
        else:
            self.values[node] = self._add(path, target, call.named_arguments(node), value, stub)
        if is_inplace(node):
            self._rename_mutated(node)

    def _add(
        self,
        path: str,
        target: str,
        arguments: dict[str, Any],
        value: Any,
        op: str | None = None,
    ) -> Ref:
        """A node of ours in the module at `path`; `op` where that is no operator of torch."""
        op = op or call.refine(find_op(call.packet(target)).name, arguments)
        inputs, attrs, params = self._split(op, arguments)
        name, classes, target = (
            self.namer.name(path, op),
            self.namer.classes(path),
            call.functional(target),
        )
        self.nodes.append(
            Node(name, op, target, inputs, attrs, params, path, classes, **self._kind(value))
        )
        return Ref(name)

    def _product_with_vector(self, path: str, arguments: dict[str, Any], value: Any) -> Ref:
        """Add what `F.linear` computes with a vector for a weight, which is no layer with
        output channels.
        """
        operands = {"input": arguments["input"], "other": arguments["weight"]}
        product = self._add(path, "aten.matmul.default", operands, value)
        bias = arguments.get("bias")
        if bias is None:
            return product
        return self._add(path, "aten.add.Tensor", {"input": product, "other": bias}, value)

    def _copied(self, node: fx.Node, path: str) -> Any:
        """What a copy or a fill makes: a number or another tensor, in the dtype and the sizes
        of its first argument.
        """
        made, written = node.meta["val"], node.args[1] if len(node.args) > 1 else 0
        if not isinstance(written, fx.Node):
            kind = {"fill_value": written, "dtype": made.dtype, "device": made.device}
            return self._add(
                path, "aten.full.default", {"size": self._sizes(node, path), **kind}, made
            )
        given, found = written.meta["val"], self._value(written)
        if given.dtype != made.dtype:
            found = self._add(
                path,
                "aten.to.dtype",
                {"input": found, "dtype": made.dtype},
                given.to(made.dtype),
            )
        if not same_shape(given, made):
            return self._add(
                path,
                "aten.expand.default",
                {"input": found, "size": self._sizes(node, path)},
                made,
            )
        # What is written into in place has a future of its own.
        return (
            self._add(path, "aten.clone.default", {"input": found}, made)
            if is_inplace(node)
            else found
        )

    def _sizes(self, node: fx.Node, path: str) -> list[Any]:
        """The sizes of what a node makes, those that are open read off an input of the network
        that has them.
        """
        inputs = self.program.graph.find_nodes(op="placeholder")
        axes = [
            (n, at, own)
            for n in inputs
            for at, own in enumerate(getattr(n.meta.get("val"), "shape", ()))
        ]
        sizes: list[Any] = []
        for axis, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int):
                held = (each[:2] for each in axes if same_size(each[2], size))
                read, at = next(held, (node.args[0], axis))
                size = self._add(
                    path, "aten.sym_size.int", {"input": self._value(read), "dim": at}, size
                )
            sizes.append(size)
        return sizes

    def _rename_mutated(self, node: fx.Node) -> None:
        """After `y = x.add_(1)`, whoever reads x reads y; an in-place chain on one tensor
        renames every link.
        """
        before = self._value(node.args[0])
        for key, value in self.values.items():
            if value == before:
                self.values[key] = self.values[node]

    def _split(
        self, op: str, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
        """Arguments as what other nodes make, constants, and tensor paths that the layer itself
        will own.
        """
        inputs: dict[str, Any] = {}
        attrs: dict[str, Any] = {}
        params: dict[str, str] = {}
        # Of a recurrent layer
        if "params" in arguments and all(item in self.paths for item in arguments["params"]):
            names = call.parameter_names(arguments)
            params = dict(
                zip(names, (self.paths[item] for item in arguments["params"]), strict=True)
            )
            arguments = {key: value for key, value in arguments.items() if key != "params"}
        owns = op in OPS and (OPS[op].weight or OPS[op].owns)
        for key, argument in arguments.items():
            if owns and key not in ("input", "indices") and self._is_own(argument):
                params[key] = self.paths[argument]
                continue
            value = self._value(argument)
            (inputs if any(references(value)) else attrs)[key] = value
        return inputs, attrs, params

    def _is_own(self, argument: Any) -> bool:
        """Return whether an argument is a tensor that a layer can hold; none holds complex
        numbers.
        """
        if not isinstance(argument, fx.Node) or argument not in self.paths:
            return False
        return not argument.meta["val"].is_complex()

    def _takes_whole_length(self, node: fx.Node) -> bool:
        """Whether the node slices nothing off a length; along a size that is fixed, torch
        leaves such a slice out.
        """
        if node.target is not torch.ops.aten.slice.Tensor:
            return False
        given = {"dim": 0, "start": None, "end": None, "step": 1} | call.named_arguments(node)
        size = given["input"].meta["val"].shape[given["dim"]]
        is_length = not isinstance(size, int) and size_of(size, self.sizes) is not None
        end = given["end"].meta["val"] if isinstance(given["end"], fx.Node) else given["end"]
        is_last = end is None or same_size(end, sys.maxsize) or same_size(end, size)
        return is_length and given["start"] in (None, 0) and given["step"] == 1 and is_last

    def _kind(self, value: Any) -> dict[str, Any]:
        """What a node says of the tensor that it makes."""
        if not isinstance(value, Tensor):
            return {}
        shape = tuple(size_of(size, self.sizes) for size in value.shape)
        named = enumerate(zip(value.shape, shape, strict=True))
        open_axes = tuple(
            at for at, (own, size) in named if size is not None and size_of(own, {}) is None
        )
        return {"shape": shape, "dtype": value.dtype, "open_axes": open_axes}


def _writes_all(node: fx.Node) -> bool:
    """Whether a tensor is written over all of another, so that nothing of that is left."""
    made, written = (
        each.meta["val"] for each in (node, node.args[1]) if isinstance(each, fx.Node)
    )
    return bool(made.dtype == written.dtype) and same_shape(made, written)


def _module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module the node ran in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    return "" if path.startswith("_empty") else str(path).partition("@")[0]


def _without_dead(graph: Graph) -> Graph:
    """Without nodes that nothing reads; inputs stay, because they are the call's signature."""
    alive = set(references(graph.output))
    kept = []
    for node in reversed(graph.nodes):
        if node.name in alive or node.op == "input":
            kept.append(node)
            alive.update(node.refs())
    return graph.replaced(nodes=tuple(reversed(kept)))
