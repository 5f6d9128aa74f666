"""Writes the targets with a `torch.export` program: .pt2 with integer weights and
`quantized_decomposed` operators, and .float.pt2 of float operators only.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from torch import Tensor
from torch.export import ExportedProgram

from quantizer.export.acceptance import failures_named, verified_calls
from quantizer.export.agreement import Verification
from quantizer.export.arithmetic import MAX_SUM_BIAS, overflowing
from quantizer.export.deployment import ORIGIN_FILE, Deployment, tensor_leaves
from quantizer.export.exporter import Exporter
from quantizer.export.programs.coded import ProgramForm, coded_program
from quantizer.export.programs.program import float_program, load_program, program_bytes
from quantizer.graph.ir import Call
from quantizer.storage.files import write_bytes

_REMEDY = "test with data for which this holds; the trace of a model is one call of it"


_Written = tuple[str, bytes]
"""The name of a file for messages, and the bytes of its program."""


class ProgramExporter(Exporter[_Written]):
    """Writes a program that loads without quantizer.

    `torch.export.load(path).module()` is called as the model was, with any batch size, and
    returns dicts, lists and tuples. The stored example call is zeros. The extra file
    `quantizer.json` says what made the program.

    Attributes:
        remedy: what to do if the program is refused.
    """

    remedy: ClassVar[str]

    @abstractmethod
    def program(self, deployment: Deployment) -> ExportedProgram:
        """Return the program of a deployment.

        Raises:
            ModelError: torch.export refuses the network.
        """

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[_Written]:
        """Write the program; its bytes are verified before."""
        origin = deployment.origin.text()
        content = program_bytes(self.program(deployment), {ORIGIN_FILE: origin})
        yield path.name, content
        write_bytes(path, content)

    def verify(self, deployment: Deployment, written: _Written) -> Verification:
        """Compare the outputs of the program with test mode's over all calls.

        Raises:
            VerificationError: the outputs differ, or a guard of the trace does not hold.
        """
        name, content = written
        program = load_program(content)

        def outputs(call: Call) -> list[Tensor]:
            """Return the outputs of a call of the program."""
            with failures_named("torch", name, _REMEDY):
                args, kwargs = call
                return tensor_leaves(program(*args, **kwargs))

        return verified_calls(deployment, outputs, name=name, remedy=self.remedy)


class Pt2Exporter(ProgramExporter):
    """Writes a program with codes for weights and floats for biases.

    What has no operator of 8-bit integers is computed in float.
    """

    remedy = "<--deploy pt2_float> computes with floats, as test mode does"

    @property
    def activation_codes(self) -> str:
        """Return the integer type of 8-bit activations in files."""
        return self.choice("pt2_activations")

    def program(self, deployment: Deployment) -> ExportedProgram:
        """Return the network with codes and operators for its quantizations."""
        solution = deployment.solution.by_rows()
        if self.activation_codes == "uint8":
            return coded_program(deployment, solution, ProgramForm("uint8"))
        network = deployment.network()
        float_layers = overflowing(network, solution, MAX_SUM_BIAS)
        form = ProgramForm("int8", decoded=frozenset(float_layers))
        return coded_program(deployment, solution, form)


class Pt2FloatExporter(ProgramExporter):
    """Writes a program that computes what test mode does.

    Weights are stored as the float32 values of their codes. Some processors add up convolutions
    in another order.
    """

    remedy = "<--deploy safetensors> writes the tensors alone"

    def program(self, deployment: Deployment) -> ExportedProgram:
        """Return the quantized network as it is."""
        return float_program(deployment)
