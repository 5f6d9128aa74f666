"""Dequantize folders of compressed-tensors, which llm-compressor and quantizer write.

Source: the compressors of the package compressed-tensors, 0.15 to 0.20. Earlier versions stored
zero points unpacked, and the group of each column in `weight_g_idx`.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quantizer.sources.quantized_folders.compressed_schemes import WeightScheme, WeightSchemes
from quantizer.sources.quantized_folders.fp8_reader import (
    BLOCK_SCALE_DTYPES,
    BlockSize,
    row_blocks,
    scale_shape_of,
)
from quantizer.sources.quantized_folders.grouped_codes import (
    GroupedCodes,
    float_scales,
    unpack_fp4,
    unpack_words,
    words_of,
)
from quantizer.sources.quantized_folders.method_settings import MethodSettings
from quantizer.sources.quantized_folders.stored_layer import (
    FLOAT8_DTYPES,
    SCALE_DTYPES,
    DequantizedLayer,
    StoredLayer,
    column_groups,
    listed_groups,
)
from quantizer.storage.deferred_tensor import DeferredTensor

_WEIGHT = "weight"
_PACKED = "weight_packed"
_SCALE = "weight_scale"
_SHAPE = "weight_shape"
_ZERO_POINT = "weight_zero_point"
_GROUPS = "weight_g_idx"
_GLOBAL_SCALE = "weight_global_scale"
_INTEGERS = (torch.int32, torch.int64)
_CODE_DTYPES = (torch.int8, *FLOAT8_DTYPES)


@dataclass(frozen=True)
class _Layout:
    """What the tensors of a layer mean, after they were checked.

    Attributes:
        shape: of the weight.
        block_size: of the values that share a scale.
        bits: the width of packed integers; 0 if codes are not packed integers.
        has_zero_point: whether the layer has zero points.
    """

    shape: tuple[int, int]
    block_size: BlockSize
    bits: int
    has_zero_point: bool

    @property
    def scale_shape(self) -> BlockSize:
        """Return the shape of the scales, as `scale_shape_of` returns it."""
        rows, columns = self.shape
        return (-(-rows // self.block_size[0]), -(-columns // self.block_size[1]))


class CompressedTensorsReader:
    """Reads `weight_packed` or `weight`, and what belongs to it: `weight_scale`,
    `weight_zero_point`, `weight_global_scale`, `weight_shape` and `weight_g_idx`.
    """

    def __init__(self, settings: MethodSettings, dtype: torch.dtype) -> None:
        """Read the schemes, and weights in `dtype`.

        Raises:
            ModelError: the schemes cannot be read.
        """
        self._schemes = WeightSchemes.of(settings)
        self._dtype = dtype

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weight of a layer. Weights that were saved as floats stay as they
        are.

        Raises:
            ModelError: its tensors do not fit each other or the scheme.
        """
        weight = layer.parts.get(_WEIGHT)
        is_packed = _PACKED in layer.parts
        is_coded = weight is not None and weight.dtype in _CODE_DTYPES
        if not is_packed and not is_coded:
            return None
        scheme = self._schemes.scheme_of(layer.path)
        layout = _layout_of(layer, scheme)
        load = partial(_weight_values, layer, layout, self._dtype)
        values = DeferredTensor(layout.shape, self._dtype, load)
        names = (_WEIGHT, _PACKED, _SCALE, _SHAPE, _ZERO_POINT, _GROUPS, _GLOBAL_SCALE)
        used = [name for name in names if name in layer.parts]
        return DequantizedLayer({_WEIGHT: values}, used)


def _layout_of(layer: StoredLayer, scheme: WeightScheme) -> _Layout:
    """Return what the tensors of a layer mean.

    Raises:
        ModelError: they do not fit each other or the scheme.
    """
    bits = 0
    is_packed = _PACKED in layer.parts
    if is_packed and scheme.number_type == "int":
        bits = scheme.bits
        shape = _packed_shape(layer, bits)
    elif is_packed:
        shape = _fp4_shape(layer, scheme)
    else:
        is_integer = scheme.number_type == "int"
        dtypes = (torch.int8,) if is_integer else FLOAT8_DTYPES
        rows, columns = layer.part(_WEIGHT, dtypes).shape
        shape = (rows, columns)
    scale_dtypes = BLOCK_SCALE_DTYPES
    if is_packed and scheme.number_type == "float":
        scale_dtypes = (*scale_dtypes, torch.float8_e4m3fn)
    scale_shape = scale_shape_of(layer, _SCALE, scale_dtypes)
    block_size = _block_size(layer, scheme, shape, scale_shape)
    has_zero_point = not scheme.symmetric
    layout = _Layout(shape, block_size, bits, has_zero_point)
    if scale_shape != layout.scale_shape:
        layer.require_shape(_SCALE, layout.scale_shape)
    if has_zero_point:
        _require_zero_points(layer, layout)
    if _GLOBAL_SCALE in layer.parts:
        layer.part(_GLOBAL_SCALE, SCALE_DTYPES, min(1, layer.parts[_GLOBAL_SCALE].dim()))
        if layer.parts[_GLOBAL_SCALE].numel() != 1:
            layer.require_shape(_GLOBAL_SCALE, [1])
    if _GROUPS in layer.parts:
        layer.part(_GROUPS, _INTEGERS, rank=1)
        layer.require_shape(_GROUPS, [shape[1]])
    return layout


def _packed_shape(layer: StoredLayer, bits: int) -> tuple[int, int]:
    """Return the shape of a weight whose integers are packed into words.

    Raises:
        ModelError: the words are more or fewer than its values need.
    """
    words = layer.part(_PACKED, [torch.int32]).shape
    layer.part(_SHAPE, _INTEGERS, rank=1)
    layer.require_shape(_SHAPE, [2])
    rows, columns = layer.parts[_SHAPE].load().tolist()
    if rows < 1 or columns < 1:
        raise layer.damage(_SHAPE, f"is {[rows, columns]}, which is no shape")
    if tuple(words) != (rows, words_of(columns, bits)):
        raise layer.damage(
            _PACKED,
            f"has the shape {list(words)}, which does not hold {[rows, columns]} codes of "
            f"{bits} bits",
        )
    return (rows, columns)


def _fp4_shape(layer: StoredLayer, scheme: WeightScheme) -> tuple[int, int]:
    """Return the shape of a weight in fp4.

    Raises:
        ModelError: it is in a float format of another width.
    """
    rows, pairs = layer.part(_PACKED, [torch.uint8]).shape
    if scheme.bits != 4:
        raise layer.damage(_PACKED, f"has floats of {scheme.bits} bits, not of 4")
    return (rows, 2 * pairs)


def _block_size(
    layer: StoredLayer,
    scheme: WeightScheme,
    shape: tuple[int, int],
    scale_shape: BlockSize,
) -> BlockSize:
    """Return the size of the blocks that share a scale.

    Raises:
        ModelError: the scales do not fit the weight.
    """
    if scheme.block_size is not None:
        return scheme.block_size
    is_grouped = scheme.group_size is not None and layer.parts[_SCALE].dim() == 2
    if is_grouped and scheme.group_size is not None:
        return (1, scheme.group_size)
    return row_blocks(layer, _SCALE, scale_shape, shape)


def _require_zero_points(layer: StoredLayer, layout: _Layout) -> None:
    """Check the zero points of a layer. They may be packed if the codes are.

    Raises:
        ModelError: they are missing, or do not fit the scales.
    """
    rows, groups = layout.scale_shape
    is_packed = layout.bits > 0 and _is_packed_zero_point(layer)
    if is_packed:
        layer.part(_ZERO_POINT, [torch.int32])
        layer.require_shape(_ZERO_POINT, [words_of(rows, layout.bits), groups])
    elif scale_shape_of(layer, _ZERO_POINT, (torch.int8,)) != (rows, groups):
        layer.require_shape(_ZERO_POINT, [rows, groups])


def _is_packed_zero_point(layer: StoredLayer) -> bool:
    """Return whether zero points are words; a missing one counts as packed."""
    return _ZERO_POINT not in layer.parts or layer.parts[_ZERO_POINT].dtype == torch.int32


def _weight_values(layer: StoredLayer, layout: _Layout, dtype: torch.dtype) -> Tensor:
    """Return the values of a layer's weight."""
    rows, columns = layout.shape
    # A config may have blocks of any size
    block_rows = min(layout.block_size[0], rows)
    groups = column_groups(columns, layout.block_size[1])
    if _GROUPS in layer.parts and not _is_unset(layer.parts[_GROUPS].load()):
        groups = listed_groups(layer, _GROUPS, layout.scale_shape[1])
    global_scale = None
    if _GLOBAL_SCALE in layer.parts:
        global_scale = layer.parts[_GLOBAL_SCALE].load().reshape(())
    scale = float_scales(layer.parts[_SCALE].load(), global_scale)
    zero_point = _zero_points(layer, layout)
    codes = GroupedCodes(
        codes=_codes(layer, layout),
        scale=_by_row(scale, layout, block_rows),
        groups=groups,
        zero_point=None if zero_point is None else _by_row(zero_point, layout, block_rows),
    )
    return codes.values(dtype)


def _is_unset(groups: Tensor) -> bool:
    """Return whether columns have no groups of their own: early versions stored -1."""
    return bool((groups == -1).all())


def _codes(layer: StoredLayer, layout: _Layout) -> Tensor:
    """Return the codes of a layer; integers that are packed begin at zero."""
    if layout.bits:
        return unpack_words(layer.parts[_PACKED].load(), layout.bits, layout.shape[1])
    if _PACKED in layer.parts:
        return unpack_fp4(layer.parts[_PACKED].load())
    return layer.parts[_WEIGHT].load()


def _zero_points(layer: StoredLayer, layout: _Layout) -> Tensor | None:
    """Return the zero points of a layer, float32 in the shape of the scales; None if there are
    none. Symmetric packed codes have theirs in the middle.
    """
    rows, groups = layout.scale_shape
    middle = 1 << (layout.bits - 1) if layout.bits else 0
    if not layout.has_zero_point:
        return torch.full((rows, groups), float(middle)) if middle else None
    stored = layer.parts[_ZERO_POINT].load()
    if layout.bits and _is_packed_zero_point(layer):
        return unpack_words(stored.t(), layout.bits, rows).t().float()
    return stored.float().reshape(rows, groups) + middle


def _by_row(values: Tensor, layout: _Layout, block_rows: int) -> Tensor:
    """Return values of blocks with a row for each row of the weight."""
    by_block = values.reshape(layout.scale_shape)
    return by_block.repeat_interleave(block_rows, 0)[: layout.shape[0]]
