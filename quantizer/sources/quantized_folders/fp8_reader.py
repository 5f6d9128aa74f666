"""Dequantize fp8 folders with a scale for each tensor, channel or block, as DeepSeek and Qwen
publish them.

Source: `Fp8Dequantize` of transformers; the weight_dequant of DeepSeek-V3.
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from quantizer.numerics.granularity import BlockSize, block_counts
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

BLOCK_SCALE_DTYPES = (*SCALE_DTYPES, torch.uint8, torch.float8_e8m0fnu)
_WEIGHT = "weight"
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


class Fp8Reader:
    """Reads `weight` and `weight_scale_inv` of layers; some tools call it `weight_scale`.
    Values are codes times scales, although the name says the inverse.
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
            block_size = row_blocks(layer, scale_name, scale_shape, weight.shape)
        expected = block_counts(weight.shape, block_size)
        if scale_shape != expected:
            layer.require_shape(scale_name, expected)
        load = partial(self._values, layer, scale_name, block_size)
        values = DeferredTensor(weight.shape, self._dtype, load)
        return DequantizedLayer({_WEIGHT: values}, (_WEIGHT, scale_name))

    def _values(self, layer: StoredLayer, scale_name: str, block_size: BlockSize) -> Tensor:
        """Return the values of a layer's weight."""
        codes = layer.load(_WEIGHT)
        stored = layer.load(scale_name)
        scale = spread_blocks(float_scales(stored), block_size, codes.shape)
        columns = codes.shape[1]
        groups = column_groups(columns, block_size[1])
        grouped = GroupedCodes(codes, scale, groups)
        return grouped.values(self._dtype)


def read_block_size(settings: MethodSettings, name: str) -> BlockSize | None:
    """Return the size of blocks that a setting gives, or None if it is null or missing.

    Raises:
        ModelError: it is something else than two integers above zero.
    """
    value = settings.fields.get(name)
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        is_valid = type(rows) is int and type(columns) is int
        if is_valid and min(rows, columns) > 0:
            return (rows, columns)
    raise settings.refusal(name, value, "two integers above zero")


def scale_shape_of(layer: StoredLayer, name: str, dtypes: Collection[torch.dtype]) -> BlockSize:
    """Return the shape of scales as rows and columns: one scale is [1, 1], and one scale for
    each row [rows, 1].

    Raises:
        ModelError: they are missing, or have another dtype or more axes.
    """
    rank = 2
    if name in layer.parts:
        stored = layer.parts[name]
        rank = min(rank, stored.dim())
    scale = layer.part(name, dtypes, rank)
    if rank < 2:
        return (scale.numel(), 1)
    rows, columns = scale.shape
    return (rows, columns)


def row_blocks(
    layer: StoredLayer, name: str, scale_shape: BlockSize, shape: Sequence[int]
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
    expected = list(shape)
    raise layer.damage(name, f"has the shape {stored}, which does not fit {expected} codes")


def spread_blocks(values: Tensor, block_size: BlockSize, shape: Sequence[int]) -> Tensor:
    """Return values of blocks with a row for each row of the weight.

    Args:
        values: with one element for each block.
        block_size: of the blocks.
        shape: of the weight.

    >>> spread_blocks(torch.tensor([1.0, 2.0]), (2, 8), (3, 8)).tolist()
    [[1.0], [1.0], [2.0]]
    """
    counts = block_counts(shape, block_size)
    rows = shape[0]
    # A config may have blocks of any size
    block_rows = min(block_size[0], rows)
    by_block = values.reshape(counts)
    by_row = by_block.repeat_interleave(block_rows, 0)
    return by_row[:rows]
