"""Translates a network with torch.onnx, with a mark where each tensor is quantized."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import rewriter
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.errors import ModelError, first_line
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.onnx.lowering import MARK_DOMAIN, Quantizations
from quantizer.export.onnx.written_out import decompositions_for
from quantizer.export.programs.program import export_program
from quantizer.graph.tracing.trace import lean_export
from quantizer.nn.function import leave_ties_open
from quantizer.nn.network import Network
from quantizer.storage.process_memory import pause_garbage_collection


class _Mark(nn.Module):
    """Marks the place of the quantization `index`."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Any) -> Any:
        """Return a float tensor behind an operator that marks it; return other values as is."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.onnx.ops.symbolic(
            f"{MARK_DOMAIN}::Mark",
            (x,),
            {"index": self.index},
            dtype=x.dtype,
            shape=x.shape,
            version=1,
        )


class _MarkedNetwork(nn.Module):
    """The network with marks for its quantizers, from a flat list of tensors to another.

    Weights are marked where they are used, so that torch.onnx does not fold them.
    """

    def __init__(
        self, network: Network, deployment: Deployment, quantizations: Quantizations
    ) -> None:
        super().__init__()
        self.network = network
        self.leaves, self.spec = pytree.tree_flatten(deployment.blank_call())
        leave_ties_open(network.layers.values())
        self.weights: dict[str, _Mark] = {}
        for index, ((layer, role), _) in enumerate(quantizations):
            mark = _Mark(index)
            if base_role(role) == "weights":
                name = f"{network.module_names[layer]}.{parameter_name(role)}"
                self.weights[name] = mark
            elif not is_parameter(role):
                network.layers[layer].attach(role, mark)  # type: ignore[arg-type]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the network on the tensors of a call, and return the tensors of its output."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        weights = {
            name: mark(self.network.get_parameter(name)) for name, mark in self.weights.items()
        }
        result = torch.func.functional_call(self.network, weights, args, kwargs)
        outputs: list[Tensor] = []
        for output in tensor_leaves(result):
            # ONNX cannot name one value twice.
            is_named = any(output is other for other in (*tensors, *outputs))
            if is_named:
                output = output.clone()
            outputs.append(output)
        return outputs


def translate_network(
    deployment: Deployment, network: Network, quantizations: Quantizations, opset: int
) -> ir.Model:
    """Return the network as ONNX, with marks.

    Its inputs and outputs have the deployment's names, in the order of the call's tensors.

    Args:
        network: the deployment's, which marks are attached to.
        quantizations: what is quantized, in the order of the marks' indices.

    Raises:
        ModelError: torch.onnx does not know an operator of the network.
    """
    marked = _MarkedNetwork(network, deployment, quantizations)
    tensors = tuple(leaf for leaf in marked.leaves if isinstance(leaf, Tensor))
    output_names = deployment.output_names
    names = _numbered("input", len(tensors)), _numbered("output", len(output_names))
    try:
        with pause_garbage_collection():
            exported = export_program(marked, deployment.graph, (tensors, {}))
            program = translatable(exported)
            model = translate_program(program, names, opset)
    except torch.onnx.OnnxExporterError as error:
        raise ModelError(
            f"<--deploy onnx>: torch.onnx cannot translate {deployment.graph.model}: "
            f"{reason_of(error)}",
            help="the pt2 target has no such limit",
        ) from error
    _produce_outputs(model.graph)
    inputs = dict(zip(names[0], deployment.input_names, strict=True))
    outputs = dict(zip(names[1], output_names, strict=True))
    _rename(model.graph, inputs | outputs)
    return model


def translate_program(
    program: ExportedProgram, names: tuple[Sequence[str], Sequence[str]], opset: int
) -> ir.Model:
    """Return a program as ONNX, with these names of inputs and of outputs.

    Raises:
        torch.onnx.OnnxExporterError: torch.onnx does not know an operator.
    """
    with torch.no_grad(), lean_export(), _pairs_of_slices():
        translated = torch.onnx.export(
            program,
            input_names=names[0],
            output_names=names[1],
            opset_version=opset,
            dynamo=True,
            optimize=True,
            verbose=False,
        )
    # Only the old exporter returns nothing.
    assert translated is not None
    model: ir.Model = translated.model
    return model


@contextmanager
def _pairs_of_slices() -> Iterator[None]:
    """Let onnxscript look for a second Slice only where there is a first one.

    Its rule for pairs of Slices would search the whole graph from each node. The time of that
    grows with the square of the number of nodes.
    """
    rules = getattr(rewriter, "_DEFAULT_REWRITE_RULES", ())
    changed = [rule for rule in rules if rule.name == "SlicesSplit"]

    def match(rule: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        if node.op_type != "Slice":
            return None
        return type(rule).match(rule, model, graph, node, **options)

    for rule in changed:
        rule.match = partial(match, rule)
    try:
        yield
    finally:
        for rule in changed:
            del rule.match


def reason_of(error: torch.onnx.OnnxExporterError) -> str:
    """Return what torch's message says of the first operator without a translation."""
    for line in str(error).splitlines():
        if line.startswith("<class"):
            return line.partition(": ")[2].partition(". Failure message")[0]
    return first_line(error)


def _numbered(word: str, count: int) -> list[str]:
    return [f"{word}_{index}" for index in range(count)]


def _rename(graph: ir.Graph, names: Mapping[str, str]) -> None:
    """Rename values of a graph; others that have one of the new names get another."""
    taken = set(names.values())
    for name in taken & graph.initializers.keys():
        constant = graph.initializers.pop(name)
        constant.name = f"{name}.inner"
        graph.register_initializer(constant)
    values = list(graph.inputs)
    for node in graph.all_nodes():
        values += node.outputs
    for value in values:
        name = value.name or ""
        if name in names:
            value.name = names[name]
        elif name in taken:
            value.name = f"{name}.inner"


def _produce_outputs(graph: ir.Graph) -> None:
    """Add an operator for each output that is a constant; ONNX wants all outputs produced."""
    for index, value in enumerate(list(graph.outputs)):
        if not value.is_initializer():
            continue
        identity = ir.node("Identity", [value])
        output = identity.outputs[0]
        output.name = value.name
        output.type = value.type
        output.shape = value.shape
        value.name = f"{value.name}.constant"
        graph.append(identity)
        graph.outputs[index] = output


def translatable(program: ExportedProgram) -> ExportedProgram:
    """Return the program with operators that torch.onnx and the runtimes read right."""
    decompositions = decompositions_for(program)
    # Decomposing takes as long as the export, even if there is nothing to decompose.
    if not decompositions:
        return program
    with lean_export():
        decomposed: ExportedProgram = program.run_decompositions(dict(decompositions))
    return decomposed
