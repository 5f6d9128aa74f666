"""Which tensors can be computed with: dense ones of plain numbers, in memory. Says of others
what they are.
"""

import torch
from torch import Tensor

from quantizer.storage.deferred_tensor import DeferredTensor

_COMPUTED = (
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
"""Types for which torch has kernels; others, such as float8_e4m3fn, are there to store
values.
"""


def oddity(tensor: Tensor) -> str | None:
    """Return what keeps a tensor from being computed with, as the end of a sentence; None for a
    plain one.

    >>> (
    ...     oddity(torch.zeros(2, 2).to_sparse()),
    ...     oddity(torch.zeros(2, device="meta")),
    ...     oddity(torch.zeros(2)),
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
        kind = str(tensor.layout).removeprefix("torch.").strip("_")
        return "is sparse" if kind.startswith("sparse") else f"has the layout {kind}"
    if tensor.is_meta:
        return "has no values"
    if tensor.dtype not in _COMPUTED:
        return f"is of the type {str(tensor.dtype).removeprefix('torch.')}"
    return None if _has_values(tensor) else "has no values"


def _has_values(tensor: Tensor) -> bool:
    """Return whether the first value can be read, which tensors of a trace refuse."""
    if not tensor.numel():
        return True
    try:
        tensor.detach()[(0,) * tensor.dim()].item()
    except (RuntimeError, NotImplementedError):
        return False
    return True
