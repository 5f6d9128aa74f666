"""Dequantize fp8 folders with a scale for each tensor, channel or block, as DeepSeek and Qwen
publish them.

Source: `Fp8Dequantize` of transformers; the weight_dequant of DeepSeek-V3.
"""

from functools import partial

import torch
from torch import Tensor

from quantizer.sources.quantized_folders.grouped_codes import GroupedCodes, float_scales
from quantizer.sources.quantized_folders.method_settings import MethodSettings
from quantizer.sources.quantized_folders.stored_layer import (
    FLOAT8_DTYPES,
    SCALE_DTYPES,
    DequantizedLayer,
    StoredLayer,
    column_groups,
)
from quantizer.storage.deferred_tensor import DeferredTensor

BlockSize = tuple[int, int]
"""The rows and columns of a block that shares a scale."""
BLOCK_SCALE_DTYPES = (*SCALE_DTYPES, torch.uint8, torch.float8_e8m0fnu)
_WEIGHT = "weight"
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


class Fp8Reader:
    """Reads `weight` and `weight_scale_inv` of layers; some tools call it `weight_scale`. Values
    are codes times scales, although the name says the inverse.
    """

    def __init__(self, settings: MethodSettings, dtype: torch.dtype) -> None:
        """Check the settings, and read weights in `dtype`.

        Raises:
            ModelError: the size of blocks is not two integers.
        """
        self._block_size = read_block_size(settings, "weight_block_size")
        self._dtype = dtype

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weight of a layer.

        Raises:
            ModelError: its tensors do not fit each other.
        """
        names = [name for name in _SCALE_NAMES if name in layer.parts]
        weight = layer.parts.get(_WEIGHT)
        if weight is None or (not names and weight.dtype not in FLOAT8_DTYPES):
            return None
        layer.part(_WEIGHT, FLOAT8_DTYPES)
        scale_name = names[0] if names else _SCALE_NAMES[0]
        scale_shape = scale_shape_of(layer, scale_name, BLOCK_SCALE_DTYPES)
        block_size = self._block_size
        if block_size is None:
            block_size = row_blocks(layer, scale_name, scale_shape, tuple(weight.shape))
        rows, columns = weight.shape
        expected = (-(-rows // block_size[0]), -(-columns // block_size[1]))
        if scale_shape != expected:
            layer.require_shape(scale_name, expected)
        load = partial(block_values, layer, scale_name, block_size, self._dtype)
        values = DeferredTensor(weight.shape, self._dtype, load)
        return DequantizedLayer({_WEIGHT: values}, (_WEIGHT, scale_name))


def read_block_size(settings: MethodSettings, name: str) -> BlockSize | None:
    """Return the size of blocks that a setting gives, or None if it is null or missing.

    Raises:
        ModelError: it is something else than two integers above zero.
    """
    value = settings.fields.get(name)
    if value is None:
        return None
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise settings.refusal(name, value, "two integers above zero")
    return (value[0], value[1])


def scale_shape_of(layer: StoredLayer, name: str, dtypes: tuple[torch.dtype, ...]) -> BlockSize:
    """Return the shape of scales as rows and columns: one scale is [1, 1], and one scale for
    each row [rows, 1].

    Raises:
        ModelError: they are missing, or have another dtype or more axes.
    """
    rank = 2
    if name in layer.parts:
        rank = min(rank, layer.parts[name].dim())
    shape = layer.part(name, dtypes, rank).shape
    if rank == 2:
        return (shape[0], shape[1])
    return (shape.numel(), 1)


def row_blocks(
    layer: StoredLayer, name: str, scale_shape: BlockSize, shape: tuple[int, ...]
) -> BlockSize:
    """Return the size of blocks of weights that have one scale for the tensor or for each row.

    Args:
        layer: with the scales.
        name: of the scales.
        scale_shape: of the scales, as `scale_shape_of` returns it.
        shape: of the weight.

    Raises:
        ModelError: there are other numbers of scales.
    """
    rows, columns = shape
    if scale_shape == (1, 1):
        return (rows, columns)
    if scale_shape == (rows, 1):
        return (1, columns)
    stored = list(layer.parts[name].shape)
    raise layer.damage(name, f"has the shape {stored}, which does not fit {list(shape)} codes")


def block_values(
    layer: StoredLayer, scale_name: str, block_size: BlockSize, dtype: torch.dtype
) -> Tensor:
    """Return the values of a layer's weight.

    Args:
        layer: with the weight, whose codes are signed, and the scales.
        scale_name: of the scales.
        block_size: of the values that share a scale.
        dtype: of the result.
    """
    codes = layer.parts[_WEIGHT].load()
    rows, columns = codes.shape
    # A config may have blocks of any size
    block_rows = min(block_size[0], rows)
    block_columns = min(block_size[1], columns)
    scale = float_scales(layer.parts[scale_name].load())
    scale = scale.reshape(-(-rows // block_rows), -1)
    scale = scale.repeat_interleave(block_rows, 0)[:rows]
    groups = column_groups(columns, block_columns)
    return GroupedCodes(codes, scale, groups).values(dtype)
