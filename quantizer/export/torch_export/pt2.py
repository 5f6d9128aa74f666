"""Writes the .pt2 target: a `torch.export` program with integer weights and
`quantized_decomposed` operators.
"""

from torch.export import ExportedProgram

from quantizer.export.arithmetic.biases import MAX_SUM_BIAS, overflowing
from quantizer.export.deployment import Deployment
from quantizer.export.programs.coded import ProgramForm, coded_program
from quantizer.export.torch_export.exporter import ProgramExporter


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
        form = ProgramForm("int8", decoded=frozenset(float_layers), is_shared=False)
        return coded_program(deployment, solution, form)
