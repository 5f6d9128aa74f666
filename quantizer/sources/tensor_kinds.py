"""Decide whether torch can compute with tensors and with the weights of a module: they have to
be dense, of a standard dtype, have values, and be finite.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quantizer.errors import ModelError
from quantizer.nn.weighted import keep_quiet_about
from quantizer.storage.deferred_tensor import DeferredTensor

PLAIN_TENSORS_HELP = (
    "give dense tensors of a standard dtype: use to_dense(), dequantize() or float()"
)
_NO_VALUES = "has no values"
_NO_VALUES_HELP = (
    "load weights into it: model.to_empty(device='cpu'), then load_state_dict(), or build it "
    "without the meta device"
)

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth")
"""The ends of the names of files with weights."""
_DTYPES_WITH_KERNELS = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
"""The dtypes for which torch has kernels. Others, such as float8_e4m3fn, only store values."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def unsupported_reason(tensor: Tensor) -> str | None:
    """Return why torch cannot compute with a tensor, as the end of a sentence, or None if it
    can.

    >>> (
    ...     unsupported_reason(torch.zeros(2, 2).to_sparse()),
    ...     unsupported_reason(torch.zeros(2, device="meta")),
    ...     unsupported_reason(torch.zeros(2)),
    ... )
    ('is sparse', 'has no values', None)
    """
    if isinstance(tensor, DeferredTensor):
        return None
    if tensor.is_nested:
        return "is nested"
    if tensor.is_quantized:
        return "is quantized"
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").strip("_")
        return "is sparse" if layout.startswith("sparse") else f"has the layout {layout}"
    if tensor.is_meta:
        return _NO_VALUES
    if tensor.dtype not in _DTYPES_WITH_KERNELS:
        return f"has the dtype {dtype_name(tensor.dtype)}"
    if tensor.device.type == torch._C._get_privateuse1_backend_name():
        # A device that is written in Python has tensors of a class of its own
        return None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}"
    return None if _has_values(tensor) else _NO_VALUES


def _has_values(tensor: Tensor) -> bool:
    """Return whether values are stored. Memory may have been given back, and tensors inside
    torch's own transformations have none.
    """
    if not tensor.numel():
        return True
    last = tensor.storage_offset()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    try:
        stored = tensor.untyped_storage().nbytes()
        tensor.detach()[(0,) * tensor.dim()].tolist()
    except (RuntimeError, NotImplementedError):
        return False
    return stored >= (last + 1) * tensor.element_size()


def count_not_finite(
    tensor: Tensor, is_sound: Callable[[Tensor], Tensor] = torch.isfinite
) -> int:
    """Count the values of a tensor that are not finite, or for which `is_sound` is false.

    Args:
        tensor: of any dtype.
        is_sound: returns a boolean for each value. It must be true for finite values.
    """
    if not tensor.is_floating_point():
        return 0
    # If the sum is finite, so are all values, which is the usual case and takes one pass. torch
    # has no sum for formats of one byte. Others are not converted: it takes eight times as long
    is_narrow = tensor.element_size() == 1
    total = tensor.float().sum() if is_narrow else tensor.sum()
    if torch.isfinite(total):
        return 0
    sound = is_sound(tensor.double())
    return tensor.numel() - int(sound.sum())


def check_finite(module: nn.Module) -> None:
    """Check that parameters are finite and that buffers have no NaN. Infinity is allowed in
    buffers: masks have it.

    Raises:
        ModelError: naming the first that is not, or that torch cannot compute with.
    """
    check_kinds(module)
    for name, tensor in _named_tensors(module):
        if isinstance(tensor, nn.Parameter):
            fault = "NaN or Inf"
            count = count_not_finite(tensor.detach())
        else:
            fault = "NaN"
            count = count_not_finite(tensor.detach(), _is_number)
        if count:
            raise ModelError(
                f"the weights hold {fault}: {count} of {tensor.numel()} values of {name}",
                help="load other weights: training diverged, or float16 overflowed",
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
            remedy = PLAIN_TENSORS_HELP
            if reason == _NO_VALUES:
                remedy = _NO_VALUES_HELP
            raise ModelError(f"the model cannot be computed with: {name} {reason}", help=remedy)
