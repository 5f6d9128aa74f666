"""Makes the program of a quantized network in operators of floats."""

import dataclasses

from torch.export import ExportedProgram

from quantizer.export.deployment import Deployment
from quantizer.export.programs.program import export_program


def float_program(deployment: Deployment) -> ExportedProgram:
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
