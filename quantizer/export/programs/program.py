"""Exports a network, or a single layer, as a `torch.export` program.

That of a network has dynamic batch and lengths, and keeps no trace of where it was made, and of
the code that it was made from. A compiler is asked whether it knows the operator of a layer
before anything is calibrated.
"""

import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from quantizer.errors import ModelError, first_line
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.targets import EXPORTERS
from quantizer.graph.ir import Call, Graph, Node
from quantizer.graph.ops import OPS
from quantizer.graph.tracing.batch_axes import axes_of_graph, has_open_batch, with_samples
from quantizer.graph.tracing.lengths import Length, excludes_single_batches
from quantizer.graph.tracing.trace import UNUSUAL_BATCH, lean_export, quiet
from quantizer.nn.function import leave_ties_open
from quantizer.nn.network import build_layer, layer_arguments

_SOURCE_KEYS = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
_NO_LETTER = re.compile(r"\W", re.ASCII)
"""The characters that names in a program cannot have."""


def program_bytes(program: ExportedProgram, files: Mapping[str, str]) -> bytes:
    """Return the bytes of a `.pt2` file with extra files, which are texts by name.

    Raises:
        ModelError: torch has no form for a part of it, as for some arithmetic with sizes.
    """
    buffer = io.BytesIO()
    try:
        with quiet():
            torch.export.save(program, buffer, extra_files=dict(files))
    except Exception as error:
        raise _torch_error("this network cannot be saved by torch", error) from error
    return buffer.getvalue()


def load_program(content: bytes) -> nn.Module:
    """Return what a user of these bytes runs."""
    with quiet():
        return torch.export.load(io.BytesIO(content)).module()


def export_program(
    module: nn.Module,
    graph: Graph,
    call: Call,
    *,
    names: Sequence[str] = (),
    output_names: Sequence[str] = (),
    most_samples: int | None = None,
) -> ExportedProgram:
    """Return the program of a module that is called as `graph`'s model.

    Args:
        call: without data of the user, as the program keeps it.
        names: what the model calls its first positional arguments.
        output_names: of the tensors that it returns, which its signature then has.
        most_samples: the largest batch; None if there is no limit.

    Raises:
        ModelError: torch.export refuses the module.
    """
    module.forward = _with_signature(module.forward, call, names)
    try:
        program = _with_open_sizes(module, graph, call, most_samples)
    except Exception as error:
        raise _torch_error(f"{graph.model} cannot be exported by torch", error) from error
    for node in program.graph.nodes:
        for key in _SOURCE_KEYS:
            node.meta.pop(key, None)
        if node.op == "call_function":
            _equal_number_types(node)
    _name_outputs(program, output_names)
    return program


def float_program(deployment: Deployment) -> ExportedProgram:
    """Return the quantized network as it is."""
    graph = deployment.graph.replaced(rebuild=None)
    network = dataclasses.replace(deployment, graph=graph).network()
    return export_program(
        network,
        graph,
        deployment.blank_call(),
        names=deployment.parameter_names,
        output_names=deployment.output_names,
    )


def _equal_number_types(node: fx.Node) -> None:
    """Write all numbers of a call as floats if one is, as in `clamp(1e-6, 1)`.

    Compilers have operators for numbers of one type. torch computes the same for both.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return
    numbers: dict[int, Any] = {}
    has_floats = False
    for index, argument in enumerate(node.args):
        kind = str(schema.arguments[index].type)
        if "number" in kind.lower():
            numbers[index] = argument
            has_floats |= isinstance(argument, float)
    for index, number in numbers.items():
        if has_floats and type(number) is int:
            node.update_arg(index, float(number))


def _name_outputs(program: ExportedProgram, names: Sequence[str]) -> None:
    """Rename what a program returns: torch.export calls outputs by their operators.

    An input that is returned keeps its name. A value that is returned twice gets its first one.
    """
    [output] = program.graph.find_nodes(op="output")
    tensors = [value for value in output.args[0] if isinstance(value, fx.Node)]
    if len(tensors) != len(names):
        return
    signature = program.graph_signature
    renamed: set[fx.Node] = set()
    for node, name in zip(tensors, names, strict=True):
        if node in renamed or node.op != "call_function":
            continue
        renamed.add(node)
        old_name = node.name
        node._rename(_NO_LETTER.sub("_", name))
        signature.replace_all_uses(old_name, node.name)
    program.graph_module.recompile()


def _with_open_sizes(
    module: nn.Module, graph: Graph, call: Call, most_samples: int | None
) -> ExportedProgram:
    """Export with open sizes, in the ways in which a model is traced.

    torch has to prove that the program holds for all lengths; if it cannot, they are guarded.
    It has to prove so for all numbers of samples. If it cannot, the program has to hold for all
    but single ones in the trace of another number. torch takes a number for a constant that is
    equal to another size by chance.
    """
    batch: Any = None
    if most_samples != 1:
        batch = Dim("batch", min=1, max=most_samples)
    ways = [_guarded_length]
    if graph.lengths:
        ways.insert(0, _proven_length)
    failure: Exception | None = None
    with torch.no_grad(), lean_export():
        for of_length in ways:
            try:
                return _export(module, graph, call, batch=batch, of_length=of_length)
            except Exception as error:  # noqa: BLE001 - the last one is raised below
                failure = error
        axes = axes_of_graph(graph)
        if most_samples is None and has_open_batch(graph):
            unusual = with_samples(call, axes, UNUSUAL_BATCH)
            with contextlib.suppress(Exception):
                program = _export(module, graph, unusual, batch=Dim.AUTO)
                if excludes_single_batches(program, axes):
                    return program
    assert failure is not None
    raise failure


def _torch_error(what: str, error: Exception) -> ModelError:
    targets = [name for name, row in EXPORTERS.items() if row.offered_for == "weights"]
    return ModelError(
        f"{what}: {type(error).__name__}: {first_line(error)}",
        help=[f"the {name} target needs no torch.export" for name in targets],
    )


def _with_signature(
    forward: Callable[..., Any], call: Call, names: Sequence[str]
) -> Callable[..., Any]:
    """Return `forward` with the parameters of a call, by the user's names.

    torch.export cannot match open shapes with a bare **kwargs, and names inputs of the program
    by the parameters.
    """
    args, kwargs = call
    positional = [f"args_{index}" for index in range(len(args))]
    for index, name in enumerate(names[: len(args)]):
        if name not in kwargs:
            positional[index] = name
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
    parameters += [Parameter(name, Parameter.KEYWORD_ONLY) for name in kwargs]

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return named


def _proven_length(length: Length) -> Any:
    """Return a dimension for whose whole range torch must prove that the program holds."""
    if length.step == 1:
        return Dim(length.name, min=length.least, max=length.most)
    first, offset = divmod(length.least, length.step)
    last: int | None = None
    if length.most is not None:
        last = length.most // length.step
    steps = Dim(f"{length.name}_steps", min=first, max=last)
    return length.step * steps + offset


def _guarded_length(length: Length) -> Any:
    """Return a dimension that only stays open.

    The program may refuse to run at some lengths, often at a single token.
    """
    return Dim.DYNAMIC(min=length.least, max=length.most)


def _export(
    module: nn.Module,
    graph: Graph,
    call: Call,
    *,
    batch: Any,
    of_length: Callable[[Length], Any] = _guarded_length,
) -> ExportedProgram:
    """Export with open sizes: `batch` samples, and lengths as `of_length` makes them."""
    args, kwargs = call
    shapes = _dynamic_shapes(graph, call, batch, of_length)
    return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)


def _dynamic_shapes(
    graph: Graph, call: Call, batch: Any, of_length: Callable[[Length], Any]
) -> Any:
    """Return the open dimensions of each tensor, in the nested structure of the call.

    Args:
        batch: the dimension of samples; None if it is fixed.
    """
    inputs = [node for node in graph.nodes if node.op == "input"]
    dimensions: list[dict[int, Any]] = []
    for node in inputs:
        opened: dict[int, Any] = {}
        if batch is not None and node.shape and None in node.shape:
            opened[node.shape.index(None)] = batch
        dimensions.append(opened)
    for length in graph.lengths:
        size = of_length(length)
        for index, axis in length.axes:
            dimensions[index][axis] = size
    pairs = zip(inputs, dimensions, strict=True)
    # Inputs that are no tensors have no shape.
    of_tensors = (opened or None for node, opened in pairs if node.shape is not None)
    leaves, spec = pytree.tree_flatten(call)
    of_leaves = [next(of_tensors) if isinstance(leaf, Tensor) else None for leaf in leaves]
    args_shapes, kwargs_shapes = pytree.tree_unflatten(of_leaves, spec)
    return (*args_shapes, *kwargs_shapes.values())


_EXAMPLE_BATCH = 2
"""The size of an axis that follows the batch."""


def lone_programs(
    graph: Graph, doubtful: Collection[str] = ()
) -> Iterator[tuple[Node, ExportedProgram]]:
    """Yield a layer of each rare operator, and a program that has this layer alone.

    It is the first layer that can be exported alone. Operators with a row in the table of
    operators are known to compilers. The others are rare.

    Args:
        graph: of the network in float.
        doubtful: operators with a row that a compiler may not know, either.
    """
    tried: set[str] = set()
    for node in graph.nodes:
        is_known = node.op in OPS and node.op not in doubtful
        if is_known or node.target in tried:
            continue
        program = _lone_program(graph, node)
        if program is not None:
            tried.add(node.target)
            yield node, program


class _Alone(nn.Module):
    """One layer of a graph, called with the tensors that it reads."""

    def __init__(self, graph: Graph, node: Node) -> None:
        super().__init__()
        self.node = node
        self.layer = build_layer(graph, node)
        leave_ties_open([self.layer])
        self.sources = list(dict.fromkeys(node.refs()))

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors that the layer makes."""
        values = dict(zip(self.sources, tensors, strict=True))
        arguments: dict[str, Any] = layer_arguments(self.node, values)
        return tensor_leaves(self.layer(**arguments))


def _lone_program(graph: Graph, node: Node) -> ExportedProgram | None:
    """Return a program of one layer, None if it does not read tensors alone."""
    layer = _Alone(graph, node)
    tensors: list[Tensor] = []
    for name in layer.sources:
        source = graph.by_name[name]
        if source.shape is None or source.dtype is None:
            return None
        shape = [_EXAMPLE_BATCH if size is None else size for size in source.shape]
        tensors.append(torch.zeros(shape, dtype=source.dtype))
    try:
        with torch.no_grad(), lean_export():
            return torch.export.export(layer, tuple(tensors))
    # What stops torch.export here did not stop the trace, so it says nothing
    except Exception:  # noqa: BLE001
        return None
