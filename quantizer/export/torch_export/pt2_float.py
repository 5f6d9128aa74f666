"""Writes the .float.pt2 target: a `torch.export` program of float operators only."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.exporter import Exporter
from quantizer.export.torch_export.program import exported, program_bytes
from quantizer.export.torch_export.verify import ProgramFile, verify_program
from quantizer.storage.files import write_bytes


class Pt2FloatExporter(Exporter[ProgramFile]):
    """Writes a program that loads without quantizer and computes what test mode does.

    `torch.export.load(path).module()` is called as the model was, with any batch size, and
    returns dicts, lists and tuples. Weights are stored as the float32 values of their codes,
    and the stored example call is zeros. Some processors add up convolutions in another order.
    """

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[ProgramFile]:
        """Write the program; see the class. The bytes are verified before they are written."""
        graph = deployment.graph.replaced(rebuild=None)
        network = dataclasses.replace(deployment, graph=graph).network()
        content = program_bytes(exported(network, graph, *deployment.blank))
        yield ProgramFile(path.name, content)
        write_bytes(path, content)

    def verify(self, deployment: Deployment, written: ProgramFile) -> Verification:
        """Compare the program's outputs with test mode's."""
        remedy = "--deploy safetensors writes the tensors alone"
        return verify_program(written, deployment, remedy)
