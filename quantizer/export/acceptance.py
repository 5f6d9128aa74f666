"""Whether a file computes what test mode does, and the refusal of one that does not."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.agreement import WITHIN, Agreement, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.float32 import widened
from quantizer.nn.network import Network

MARGIN_DB = 3.0
"""Of two roundings of one network, neither worse than the other, the difference has twice the energy of the error."""
ENOUGH_DB = 40.0
"""A difference of a hundredth is rounding, even where test mode loses less."""
Outputs = Callable[[tuple[Any, ...], Mapping[str, Any]], list[Tensor]]
"""What a file gives for one call: the tensors, in order."""


def accepted(found: Verification, deployment: Deployment, outputs: Outputs, refusal: str, remedy: str) -> Verification:
    """The figures of a file, with those against the float network where they decide.

    Args:
        refusal: begins the sentence on a file that is refused, `remedy` says what to do then.

    Raises:
        VerificationError: the file does not compute what test mode does.
    """
    if not agrees(found, deployment.sqnr_db):
        found = with_float_sqnr(found, deployment, outputs)
    if agrees(found, deployment.sqnr_db):
        return found
    itself = f"test mode itself is {deployment.sqnr_db:.1f} dB from the float network"
    raise VerificationError(f"{refusal} does not compute what test mode does: {found.figures()}; {itself}", help=remedy)


def agrees(found: Verification, sqnr_db: float) -> bool:
    """Whether a file computes what test mode does, whose outputs are `sqnr_db` from the float network's.

    It does if nearly all values are within one step, or if its difference from test mode costs no more than
    quantization itself: a code that falls otherwise in an early layer changes many in later ones. In a deep network
    these may be nearly all, and then it is the file's own error that may be twice that of test mode.
    """
    if found.within_step is not None and found.within_step >= WITHIN:
        return True
    if found.sqnr_db is None:
        return found.equal >= WITHIN
    nearest = found.sqnr_db if found.float_sqnr_db is None else max(found.sqnr_db, found.float_sqnr_db)
    return nearest >= least_db(sqnr_db)


def least_db(sqnr_db: float) -> float:
    """The least SQNR, against test mode or the float network, of what rounds otherwise and costs no more."""
    return min(ENOUGH_DB, sqnr_db - MARGIN_DB)


def with_float_sqnr(found: Verification, deployment: Deployment, outputs: Outputs) -> Verification:
    """Return the figures of a file with its SQNR against the float network."""
    return replace(found, float_sqnr_db=_float_sqnr_db(outputs, deployment))


@torch.no_grad()
def _float_sqnr_db(outputs: Outputs, deployment: Deployment) -> float | None:
    """Of all outputs against the float network's; None if there is no such network, or no second pass over the data."""
    if deployment.float_graph is None:
        return None
    network, agreement = Network(deployment.float_graph.in_memory()), Agreement("outputs")
    for args, kwargs in deployment.calls():
        agreement.add(widened(tensor_leaves(network(*args, **kwargs))), outputs(args, kwargs))
    return agreement.result().sqnr_db if agreement.count else None
