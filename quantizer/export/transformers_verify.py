"""Runs what transformers loads on the CPU, and compares it with test mode."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import VerificationError
from quantizer.export.acceptance import least_db
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.targets import offered
from quantizer.graph.tracing.trace import quiet
from quantizer.nn.network import Network

# For float32 networks with quantized weights only, whose sums are the same except for their
# order. Elsewhere readers round scales to the model's dtype and compute ranges in it, which
# moves some codes by a step.
EXACT_DB = 100.0
READER_HELP = f"{offered('program', 'weights')} needs no such reader"
_KEY_KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


@dataclass(frozen=True)
class ExpectedCall:
    """A call of the model, and the tensors of test mode's output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]


def expected_calls(deployment: Deployment, network: Network) -> Iterator[ExpectedCall]:
    """Yield the calls of a deployment with what a network gives for them."""
    for args, kwargs in deployment.calls():
        yield ExpectedCall(args, kwargs, tensor_leaves(network(*args, **kwargs)))


def verify_calls(
    load: Callable[[ExpectedCall], nn.Module],
    calls: Iterable[ExpectedCall],
    sqnr_db: float,
    name: str,
    *,
    is_exact: bool,
) -> Verification:
    """Compare the outputs of a loaded module with test mode's over all calls.

    Args:
        load: returns the module; its argument is the first call.
        calls: at least one, iterated once.
        sqnr_db: what quantization costs the outputs, in dB. A reader that rounds in another way
            may cost no more.
        name: stands for the file or folder in messages.
        is_exact: whether the reader rounds nothing, as with quantized weights only.

    Raises:
        VerificationError: the outputs differ.
    """
    agreement = Agreement("outputs")
    remaining = iter(calls)
    with torch.no_grad():
        first = next(remaining)
        # The report of transformers has what matters of its bars, warnings and logs
        with silenced("transformers"), quiet():
            module = load(first)
        for call in chain([first], remaining):
            agreement.add(call.outputs, tensor_leaves(module(*call.args, **call.kwargs)))
    verification = agreement.result()
    is_float32 = all(output.dtype == torch.float32 for output in first.outputs)
    least = EXACT_DB if is_exact and is_float32 else least_db(sqnr_db)
    if verification.sqnr_db is not None and verification.sqnr_db < least:
        raise VerificationError(
            f"{name} is not written: transformers does not compute what test mode does: "
            f"{verification.figures()}",
            help=READER_HELP,
        )
    return verification


def require_all_keys(
    report: Mapping[str, Any], reader: str, name: str, unused: Collection[str] = ()
) -> None:
    """Check the keys in the loading report of `from_pretrained`.

    Args:
        report: of missing and unexpected keys, among others.
        reader: the packages that loaded the file.
        name: of the file.
        unused: the tensors that the float model does not read, either.

    Raises:
        VerificationError: a tensor is missing, or nothing reads it.
    """
    faults = [
        f"{key} {kind.partition('_')[0]}"
        for kind in _KEY_KINDS
        for key in sorted({*map(str, report.get(kind, ()))}.difference(unused))
    ]
    if faults:
        raise VerificationError(
            f"{name} is not written: {reader} finds {', '.join(faults[:3])}", help=READER_HELP
        )


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Suppress the messages of a logger."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
