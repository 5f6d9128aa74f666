"""Check that torch can compute with the weights of a module, and that they are finite."""

from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quantizer.errors import ModelError
from quantizer.nn.weighted import keep_quiet_about
from quantizer.sources.batches import PLAIN_TENSORS_HELP, count_not_finite
from quantizer.sources.tensor_kinds import unsupported_reason


def check_finite(module: nn.Module, skipped: Container[str] = ()) -> None:
    """Check that parameters are finite and that buffers have no NaN. Infinity is allowed in
    buffers: masks have it.

    Args:
        module: the model.
        skipped: names of parameters that are checked elsewhere.

    Raises:
        ModelError: naming the first that is not, or that torch cannot compute with.
    """
    check_kinds(module)
    for name, tensor in _named_tensors(module):
        if name in skipped:
            continue
        if isinstance(tensor, nn.Parameter):
            fault = "NaN or Inf"
            count = count_not_finite(tensor.detach())
        else:
            fault = "NaN"
            count = count_not_finite(tensor.detach(), _is_number)
        if count:
            raise ModelError(
                f"the weights hold {fault}: {count} of {tensor.numel()} values of {name}"
            )


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters and buffers, except for those of lazy layers, which
    have no values yet.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if not is_lazy(tensor):
            yield name, tensor


def _is_number(values: Tensor) -> Tensor:
    return ~torch.isnan(values)


def check_kinds(module: nn.Module) -> None:
    """Check that no parameter or buffer is sparse, quantized or without values.

    Raises:
        ModelError: naming the first that is.
    """
    keep_quiet_about(module)
    for name, tensor in _named_tensors(module):
        reason = unsupported_reason(tensor)
        if reason is not None:
            raise ModelError(
                f"the model cannot be computed with: {name} {reason}", help=PLAIN_TENSORS_HELP
            )
