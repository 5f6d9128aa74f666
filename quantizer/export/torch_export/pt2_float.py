"""Writes the .float.pt2 target: a `torch.export` program of float operators only."""

import dataclasses

from torch.export import ExportedProgram

from quantizer.export.deployment import Deployment
from quantizer.export.torch_export.exporter import ProgramExporter
from quantizer.export.torch_export.program import export_program


class Pt2FloatExporter(ProgramExporter):
    """Writes a program that computes what test mode does.

    Weights are stored as the float32 values of their codes. Some processors add up convolutions
    in another order.
    """

    remedy = "<--deploy safetensors> writes the tensors alone"

    def program(self, deployment: Deployment) -> ExportedProgram:
        """Return the quantized network as it is."""
        graph = deployment.graph.replaced(rebuild=None)
        network = dataclasses.replace(deployment, graph=graph).network()
        return export_program(
            network,
            graph,
            *deployment.blank,
            names=deployment.parameter_names,
            output_names=deployment.output_names,
        )
