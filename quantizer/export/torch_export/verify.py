"""Runs the bytes of a `.pt2` file, as torch loads them, on all calls; refuses what test mode
does not compute.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.acceptance import accepted
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.torch_export.program import loaded


def verify_program(
    content: bytes, deployment: Deployment, name: str, remedy: str
) -> Verification:
    """The outputs of a program against test mode's.

    Args:
        name: of the file; `remedy` says what to do where it is refused.

    Raises:
        VerificationError: they are others, or it does not run: torch guards what a trace holds
            for.
    """
    agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
    network, program = deployment.network(), loaded(content)

    def outputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        try:
            return tensor_leaves(program(*args, **kwargs))
        except Exception as error:
            why = str(error).strip().partition("\n")[0]
            raise VerificationError(
                f"{name} is not written: torch cannot run it: {why}",
                help="test with data for which this holds; the trace of a model is one call of "
                "it",
            ) from error

    with torch.no_grad():
        for args, kwargs in deployment.calls():
            recorder = agreement.recorder()
            expected = tensor_leaves(network.observe(args, kwargs, recorder.watchers))
            agreement.add(expected, outputs(args, kwargs), recorder)
    return accepted(
        agreement.result(), deployment, outputs, f"{name} is not written: it", remedy
    )
