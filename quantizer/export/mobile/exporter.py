"""Makes the program that an engine's compiler gets, and runs the compiled file to verify it.

The targets for phones share this.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torch.export import ExportedProgram

from quantizer.calibration.solution import Solution
from quantizer.config.roles import is_parameter
from quantizer.errors import VerificationError, first_line
from quantizer.export.acceptance import Outputs, verified_calls
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic.biases import BiasForm, with_runtime_biases
from quantizer.export.arithmetic.operands import quantized_apart
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.kernels import Kernels
from quantizer.export.lone_layers import lone_programs
from quantizer.export.mobile.constants import fold_constants
from quantizer.export.mobile.kernels import DOUBTFUL, MobileEngine
from quantizer.export.mobile.sizes import multiply_adds
from quantizer.export.programs.coded import ProgramForm, coded_program
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.batch_axes import axes_of_graph, has_open_batch, samples_in
from quantizer.graph.tracing.trace import quiet
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import TensorSpecs
from quantizer.storage.files import write_bytes

_LOCATION = re.compile(r"^(.*: error: )?(loc\(.*\)\): )?")
"""Where a compiler's error occurred, at the beginning of its message."""
WHOLE = "XNNPACK computes all operators"
"""The note on a file without limits."""
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
        graph = _with_longest(deployment.graph)
        solution = self.as_run(graph, deployment.solution).by_rows()
        tested = fold_constants(replace(deployment, graph=graph, solution=solution))
        graph, solution = tested.graph, tested.solution
        stated = quantized_apart(graph, solution, any_rounding=False)
        engine = self.engine_for(deployment)
        kernels = engine.kernels(graph, stated.specs)
        layers = {*kernels.integer, *kernels.floating}
        kernels = replace(kernels, multiply_adds=multiply_adds(tested, layers))
        constant: set[str] = set()
        for layer, role in stated.tensors:
            is_coded = layer in kernels.integer
            if graph.by_name[layer].row.transposed:
                is_coded &= self.form.has_transposed
            if is_parameter(role) and not is_coded:
                constant.add(layer)
        most_samples = self.most_samples(deployment)
        form = replace(self.form, constant=frozenset(constant), most_samples=most_samples)
        if form.has_ranges:
            widened = engine.with_float_outputs(graph, stated.specs)
            form = replace(form, widened=widened)
        program = coded_program(tested, stated, form)
        names: dict[str, str] = {}
        for name, module in tested.network().module_names.items():
            names[module] = name
        scales: dict[str, Sequence[float]] = {}
        for layer in kernels.integer:
            scales[layer] = _output_scales(stated.tensors[layer, "weights"], graph, layer)
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

        def outputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
            """Return the outputs of a call in the engine, which the first call starts."""
            try:
                if not runners:
                    with quiet():
                        runners.append(self.runner(written))
                return runners[0](args, kwargs)
            except VerificationError:
                raise
            except Exception as error:
                why = first_line(error)
                raise VerificationError(
                    f"{written.name} is not written: {self.engine.name} cannot run it: {why}",
                    help="<--deploy pt2> needs no such engine",
                ) from error

        verification = verified_calls(
            written.tested,
            outputs,
            name=written.name,
            remedy="<--deploy pt2_float> computes with floats, as test mode does",
        )
        return replace(
            verification, kernels=written.kernels, remarks=written.remarks, asides=(WHOLE,)
        )


def _output_scales(weight: QuantizedTensor, graph: Graph, layer: str) -> list[float]:
    """Return the scale of each output of a layer."""
    node = graph.by_name[layer]
    outputs = graph.weight(node).shape[int(node.row.transposed)]
    return weight.scale.expand(outputs).tolist()


def batch_size(graph: Graph, call: Any) -> int | None:
    """Return how many samples a call has; None if the network's batch is fixed."""
    if not has_open_batch(graph):
        return None
    return samples_in(call, axes_of_graph(graph))


def _with_longest(graph: Graph) -> Graph:
    """Return the graph with a longest length for each open one: that of the trace.

    Memory for it is planned when the file is made.
    """
    lengths = []
    for length in graph.lengths:
        if length.most is None:
            length = replace(length, most=length.traced)
        lengths.append(length)
    return graph.replaced(lengths=tuple(lengths))
