"""Makes the program that an engine's compiler gets, and runs the compiled file to verify it.

The targets for phones share this.
"""

import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.errors import first_line
from quantizer.export.acceptance import Outputs, failures_named, verified_calls
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic import BiasForm, quantized_apart, with_runtime_biases
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.mobile.kernels import DOUBTFUL, MobileEngine
from quantizer.export.performance import Kernels
from quantizer.export.programs.coded import ProgramForm, coded_program
from quantizer.export.programs.program import lone_programs
from quantizer.graph.ir import Call, Graph, Node, references
from quantizer.graph.tracing.batch_axes import axes_of_graph, has_open_batch, samples_in
from quantizer.graph.tracing.trace import quiet
from quantizer.nn.network import Execution
from quantizer.plan.model import TensorSpecs
from quantizer.storage.files import write_bytes

_LOCATION = re.compile(r"^(.*: error: )?(loc\(.*\)\): )?")
"""Where a compiler's error occurred, at the beginning of its message."""
WHOLE = "XNNPACK computes all operators"
"""The note on a file without limits."""
_FLOPS = 2
"""Of a multiply-add, as torch counts."""
_UNKNOWN_HELP = "keep that part outside the quantized model, or use <--deploy onnx or pt2>"


@dataclass(frozen=True)
class MobileProgram:
    """What an engine's compiler gets.

    Attributes:
        program: the network with codes.
        tested: what the file is compared with.
        kernels: the layers that should be multiplied in int8.
        layers: the names of layers by the names of their modules in the program.
        scales: of the weights of these layers, one for each output.
        most_samples: the largest batch; None if the network's batch is fixed.
    """

    program: ExportedProgram
    tested: Deployment
    kernels: Kernels
    layers: Mapping[str, str]
    scales: Mapping[str, Sequence[float]]
    most_samples: int | None


@dataclass(frozen=True)
class MobileFile:
    """A compiled program.

    Attributes:
        name: of the file.
        content: its bytes.
        tested: what it is compared with.
        kernels: the layers that the engine multiplies in int8.
        remarks: notes for the user.
        most_samples: the largest batch; None if it is fixed or has no limit.
    """

    name: str
    content: bytes
    tested: Deployment
    kernels: Kernels
    remarks: tuple[str, ...]
    most_samples: int | None


class MobileExporter(Exporter[MobileFile]):
    """Compiles a program with int8 kernels, and runs it.

    Attributes:
        engine: what its kernels take.
        form: of the program that its compiler takes.
    """

    engine: ClassVar[MobileEngine]
    form: ClassVar[ProgramForm]

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what the engine's kernels cannot hold, and operators that it does not know."""
        yield from self.engine.refusals(graph, specs)
        for node, program in lone_programs(graph, DOUBTFUL):
            try:
                with quiet():
                    self.load(program)
            except ImportError:
                return
            # Each stage has its own errors for an operator that it does not know
            except Exception as error:  # noqa: BLE001
                reason = _LOCATION.sub("", first_line(error), count=1)
                compiler = self.engine.compiler
                why = f"computes {node.op}, which {compiler} does not know: {reason}"
                yield Refusal(why, _UNKNOWN_HELP, node.name)

    @property
    def activation_codes(self) -> str:
        """Return the integer type of 8-bit activations in files."""
        return self.form.activations

    @abstractmethod
    def load(self, program: ExportedProgram) -> None:
        """Convert a program of one operator in float, and load the result.

        Raises:
            ImportError: the compiler is not installed.
            Exception: any other one, if the operator is not known.
        """

    def as_run(self, graph: Graph, solution: Solution) -> Solution:
        """Return the solution with biases rounded to int32, as the engine does."""
        return with_runtime_biases(graph, solution, BiasForm.INTEGERS)

    def program(self, deployment: Deployment) -> MobileProgram:
        """Return what the compiler gets.

        Raises:
            ModelError: torch.export refuses the network.
            UsageError: the largest batch is not a number.
        """
        graph = deployment.graph
        # Memory is planned now for the longest length of each open one: that of the trace
        lengths = [replace(each, most=each.most or each.traced) for each in graph.lengths]
        graph = graph.replaced(lengths=tuple(lengths))
        solution = self.as_run(graph, deployment.solution).by_rows()
        tested = fold_constants(replace(deployment, graph=graph, solution=solution))
        graph, solution = tested.graph, tested.solution
        stated = quantized_apart(graph, solution, any_rounding=False)
        engine = self.engine_for(deployment)
        kernels = engine.kernels(graph, stated.specs)
        layers = {*kernels.integer, *kernels.floating}
        kernels = replace(kernels, multiply_adds=multiply_adds(tested, layers))
        coded = {
            layer
            for layer in kernels.integer
            if self.form.has_transposed or not graph.by_name[layer].row.transposed
        }
        constant = (
            frozenset(layer for layer, role in stated.tensors if is_parameter(role)) - coded
        )
        most_samples = self.most_samples(deployment)
        form = replace(self.form, constant=constant, most_samples=most_samples)
        if form.has_ranges:
            form = replace(form, widened=engine.with_float_outputs(graph, stated.specs))
        program = coded_program(tested, stated, form)
        module_names = tested.network().module_names
        names = {module: name for name, module in module_names.items()}
        scales: dict[str, Sequence[float]] = {}
        for layer in kernels.integer:
            node = graph.by_name[layer]
            outputs = graph.weight(node).shape[int(node.row.transposed)]
            scales[layer] = stated.tensors[layer, "weights"].scale.expand(outputs).tolist()
        return MobileProgram(program, tested, kernels, names, scales, most_samples)

    def engine_for(self, deployment: Deployment) -> MobileEngine:
        """Return what kernels take in a file with the options of a deployment."""
        return self.engine

    @abstractmethod
    def most_samples(self, deployment: Deployment) -> int | None:
        """Return the largest batch that the program takes; None if its batch is fixed.

        Raises:
            UsageError: the option that says it is not a number.
        """

    @abstractmethod
    def compile(self, source: MobileProgram, name: str) -> MobileFile:
        """Return the compiled program; any exception says that the compiler refuses it."""

    @abstractmethod
    def runner(self, written: MobileFile) -> Outputs:
        """Return what runs a compiled program."""

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[MobileFile]:
        """Write the file; its bytes are verified before.

        Raises:
            ModelError: torch.export refuses the network.
            Exception: the compiler refuses it.
            UsageError: the largest batch is not a number.
            ResultError: the file cannot be written.
        """
        source = self.program(deployment)
        with quiet():
            written = self.compile(source, path.name)
        yield written
        write_bytes(path, written.content)

    def verify(self, deployment: Deployment, written: MobileFile) -> Verification:
        """Run the file in its engine on all calls, and compare it with test mode.

        Raises:
            VerificationError: the engine cannot run the file, or its outputs differ.
        """
        runners: list[Outputs] = []

        def outputs(call: Call) -> list[Tensor]:
            """Return the outputs of a call in the engine, which the first call starts."""
            remedy = "<--deploy pt2> needs no such engine"
            with failures_named(self.engine.name, written.name, remedy):
                if not runners:
                    with quiet():
                        runners.append(self.runner(written))
                return runners[0](call)

        verification = verified_calls(
            written.tested,
            outputs,
            name=written.name,
            remedy="<--deploy pt2_float> computes with floats, as test mode does",
        )
        return replace(
            verification, kernels=written.kernels, remarks=written.remarks, asides=(WHOLE,)
        )


def taken_kernels(source: MobileProgram, taken: Collection[str], why: str) -> Kernels:
    """Return the layers that a file multiplies in int8, of those that should be.

    Args:
        source: the program.
        taken: the layers that it multiplies so.
        why: the reason for the others.
    """
    asked = source.kernels.integer
    floating = source.kernels.floating | {layer: why for layer in asked if layer not in taken}
    integer = tuple(layer for layer in asked if layer in taken)
    return replace(source.kernels, integer=integer, floating=floating)


def batch_size(graph: Graph, call: Any) -> int | None:
    """Return how many samples a call has; None if the network's batch is fixed."""
    if not has_open_batch(graph):
        return None
    return samples_in(call, axes_of_graph(graph))


@torch.no_grad()
def multiply_adds(deployment: Deployment, layers: Collection[str]) -> dict[str, int]:
    """Return how many multiply-adds each of some layers takes for the deployment's call."""
    network = deployment.network()
    inputs = network.inputs(*deployment.call)
    execution = Execution(network, inputs)
    sizes: dict[str, int] = {}
    # The recurrent layers of this library hide their products
    with quiet(), mkldnn.flags(enabled=False):
        for node in network.graph.nodes:
            with FlopCounterMode(display=False) as counter:
                value = network.run_node(node, execution.values)
            if node.name in layers:
                sizes[node.name] = counter.get_total_flops() // _FLOPS
            execution.put(value)
    return sizes


def fold_constants(deployment: Deployment) -> Deployment:
    """Return the deployment with constants instead of layers that follow from no input.

    They have the values of test mode.
    """
    graph = deployment.graph
    # The nodes whose values follow from the network's own tensors
    fixed: set[str] = set()
    for node in graph.nodes:
        if node.op != "input" and fixed.issuperset(node.refs()):
            fixed.add(node.name)
    names = _folded(graph, fixed)
    if not names:
        return deployment
    values: dict[str, Any] = {}
    watchers = {name: partial(_store, values, name) for name in names}
    with torch.no_grad():
        deployment.network().observe(*deployment.call, watchers)
    read = set(references(graph.output))
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in names:
            node = replace(
                node,
                op="constant",
                target="constant",
                inputs={},
                attrs={},
                params={"weight": node.name},
            )
        if node.name in read or node.name not in fixed:
            read.update(node.refs())
            nodes.append(node)
    tensors = {**graph.tensors, **values}
    folded = graph.replaced(nodes=tuple(reversed(nodes)), tensors=tensors)
    solution = _of_nodes(deployment.solution, folded, names)
    return replace(deployment, graph=folded, solution=solution)


def _of_nodes(solution: Solution, graph: Graph, names: set[str]) -> Solution:
    """Return the solution without what the folded layers have quantized."""
    computing = graph.by_name.keys() - names
    results = {(name, "activation") for name in names}
    tensors = {
        key: tensor
        for key, tensor in solution.tensors.items()
        if key[0] in computing or key in results
    }
    weights = {
        layer: solution.weights[layer] for layer in solution.weights if layer in computing
    }
    corrections = {
        layer: bias for layer, bias in solution.corrections.items() if layer in computing
    }
    return replace(solution, tensors=tensors, weights=weights, corrections=corrections)


def _store(values: dict[str, Any], name: str, value: Any) -> None:
    """Keep a copy of a value by name."""
    values[name] = value.clone()


def _folded(graph: Graph, fixed: set[str]) -> set[str]:
    """Return the fixed tensors that the rest reads and that multiplications have made."""
    multiplied: set[str] = set()
    read = set(references(graph.output))
    for node in graph.nodes:
        if node.name not in fixed:
            read.update(node.refs())
            continue
        follows = not multiplied.isdisjoint(node.refs())
        if node.row.kind == "mac" or follows:
            multiplied.add(node.name)
    return {name for name in multiplied & read if graph.by_name[name].dtype is not None}
