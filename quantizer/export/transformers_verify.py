"""Runs what transformers loads on the CPU, and refuses what is not test mode's. Knows no
format.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import VerificationError
from quantizer.export.acceptance import least_db
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import tensor_leaves
from quantizer.graph.trace import quiet

EXACT_DB = 100.0
"""Of float32 networks with quantized weights alone: the sums are the same but for their order.
In others readers round scales to the model's dtype and find ranges in it, which moves some
codes by a step.
"""
HELP = "--deploy pt2 and safetensors need no such reader"
_KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


@dataclass(frozen=True)
class Expected:
    """A call of the model, and the tensors of test mode's output."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]


def verify_calls(
    load: Callable[[Expected], nn.Module],
    calls: Iterable[Expected],
    sqnr_db: float,
    name: str,
    *,
    is_exact: bool,
) -> Verification:
    """Compare the outputs of a loaded module with test mode's over all calls.

    Args:
        load: gives the module; its argument is the first call.
        calls: at least one, gone through once.
        sqnr_db: what quantization costs the outputs, in dB: a reader that rounds otherwise
            should not cost more.
        name: stands for the file or folder in messages.
        is_exact: whether the reader rounds nothing, as where weights alone are quantized.

    Raises:
        VerificationError: it gives other outputs.
    """
    agreement, rest = Agreement("outputs"), iter(calls)
    with torch.no_grad():
        first = next(rest)
        with _quiet():
            module = load(first)
        for call in chain([first], rest):
            agreement.add(call.outputs, tensor_leaves(module(*call.args, **call.kwargs)))
    found = agreement.result()
    is_exact = is_exact and all(output.dtype == torch.float32 for output in first.outputs)
    least = EXACT_DB if is_exact else least_db(sqnr_db)
    if found.sqnr_db is not None and found.sqnr_db < least:
        raise VerificationError(
            f"{name} is not written: transformers does not compute what test mode does: "
            f"{found.figures()}",
            help=HELP,
        )
    return found


def require_all_keys(report: Mapping[str, Any], reader: str, name: str) -> None:
    """Refuse what `from_pretrained` reports of keys.

    Raises:
        VerificationError: a tensor is missing, or nothing reads it.
    """
    strange = [
        f"{key} {kind.partition('_')[0]}"
        for kind in _KINDS
        for key in sorted(map(str, report.get(kind, ())))
    ]
    if strange:
        raise VerificationError(
            f"{name} is not written: {reader} finds {', '.join(strange[:3])}", help=HELP
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars, warnings and what transformers logs on the way: what matters of it is in
    its report.
    """
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with quiet():
            yield
    finally:
        logger.setLevel(level)
