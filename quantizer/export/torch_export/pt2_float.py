"""Writes the .float.pt2 target: a `torch.export` program of float operators only."""

from torch.export import ExportedProgram

from quantizer.export.deployment import Deployment
from quantizer.export.programs.program import float_program
from quantizer.export.torch_export.exporter import ProgramExporter


class Pt2FloatExporter(ProgramExporter):
    """Writes a program that computes what test mode does.

    Weights are stored as the float32 values of their codes. Some processors add up convolutions
    in another order.
    """

    remedy = "<--deploy safetensors> writes the tensors alone"

    def program(self, deployment: Deployment) -> ExportedProgram:
        """Return the quantized network as it is."""
        return float_program(deployment)
