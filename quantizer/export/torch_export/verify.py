"""Runs the bytes of a `.pt2` file as torch loads them, and compares them with test mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.acceptance import accepted
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.torch_export.program import load_program


@dataclass(frozen=True)
class ProgramFile:
    """The bytes of a program, and the name of the file for messages."""

    name: str
    content: bytes


def verify_program(file: ProgramFile, deployment: Deployment, remedy: str) -> Verification:
    """Compare the outputs of a program with test mode's over all calls.

    Args:
        remedy: what to do if the program is refused.

    Raises:
        VerificationError: the outputs differ, or a guard of the trace does not hold.
    """
    agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
    network = deployment.network()
    program = load_program(file.content)

    def outputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        try:
            return tensor_leaves(program(*args, **kwargs))
        except Exception as error:
            why = str(error).strip().partition("\n")[0]
            raise VerificationError(
                f"{file.name} is not written: torch cannot run it: {why}",
                help="test with data for which this holds; the trace of a model is one call of "
                "it",
            ) from error

    with torch.no_grad():
        for args, kwargs in deployment.calls():
            recorder = agreement.recorder()
            expected = tensor_leaves(network.observe(args, kwargs, recorder.watchers))
            agreement.add(expected, outputs(args, kwargs), recorder)
    refusal = f"{file.name} is not written: it"
    return accepted(agreement.result(), deployment, outputs, refusal=refusal, remedy=remedy)
