"""A safetensors file as deferred tensors, each mapped into memory for as long as it is computed with."""

from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from quantizer.numerics.deferred import DeferredTensor

STORED: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The dtypes of safetensors files by their names there."""


def deferred_file(path: Path) -> dict[str, DeferredTensor]:
    """The tensors of a safetensors file, each mapped into memory when it is needed.

    Raises:
        OSError, SafetensorError: it cannot be read.
        KeyError: it has a dtype that torch has not.
    """
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        found = {name: (each.get_shape(), STORED[each.get_dtype()]) for name, each in slices.items()}
    return {name: DeferredTensor(shape, dtype, partial(_read, path, name)) for name, (shape, dtype) in found.items()}


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
