"""Decide whether torch can compute with a tensor: it has to be dense, of a standard dtype, and
have values.
"""

import torch
from torch import Tensor

from quantizer.storage.deferred_tensor import DeferredTensor

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
        return "has no values"
    if tensor.dtype not in _DTYPES_WITH_KERNELS:
        return f"has the dtype {dtype_name(tensor.dtype)}"
    if tensor.device.type == torch._C._get_privateuse1_backend_name():
        # A device that is written in Python has tensors of a class of its own
        return None
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"is a {type(tensor).__name__}"
    return None if _has_values(tensor) else "has no values"


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
