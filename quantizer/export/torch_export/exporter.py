"""What both targets with a `torch.export` program share: writing and verifying its bytes."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from quantizer.errors import VerificationError
from quantizer.export.acceptance import accept_file
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.exporter import Exporter
from quantizer.export.origin import ORIGIN_FILE
from quantizer.export.torch_export.program import load_program, program_bytes
from quantizer.storage.files import write_bytes


@dataclass(frozen=True)
class ProgramFile:
    """The bytes of a program, and the name of the file for messages."""

    name: str
    content: bytes


class ProgramExporter(Exporter[ProgramFile]):
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
    def write(self, deployment: Deployment, path: Path) -> Iterator[ProgramFile]:
        """Write the program; its bytes are verified before."""
        origin = deployment.origin.text()
        content = program_bytes(self.program(deployment), {ORIGIN_FILE: origin})
        yield ProgramFile(path.name, content)
        write_bytes(path, content)

    def verify(self, deployment: Deployment, written: ProgramFile) -> Verification:
        """Compare the outputs of the program with test mode's over all calls.

        Raises:
            VerificationError: the outputs differ, or a guard of the trace does not hold.
        """
        agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
        network = deployment.network()
        program = load_program(written.content)

        def outputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
            try:
                return tensor_leaves(program(*args, **kwargs))
            except Exception as error:
                why = str(error).strip().partition("\n")[0]
                raise VerificationError(
                    f"{written.name} is not written: torch cannot run it: {why}",
                    help="test with data for which this holds; the trace of a model is one "
                    "call of it",
                ) from error

        with torch.no_grad():
            for args, kwargs in deployment.calls():
                recorder = agreement.recorder()
                expected = tensor_leaves(network.observe(args, kwargs, recorder.watchers))
                agreement.add(expected, outputs(args, kwargs), recorder)
        refusal = f"{written.name} is not written: it"
        return accept_file(
            agreement.result(), deployment, outputs, refusal=refusal, remedy=self.remedy
        )
