"""Dequantize layers. These are fp8 with a scale for each tensor, channel or block (DeepSeek,
Qwen), experts in mxfp4 (gpt-oss), and codes that are packed into words (GPTQ, AWQ).

Source: `Fp8Dequantize` and `convert_moe_packed_tensors` of transformers; the weight_dequant of
DeepSeek-V3; `pack` and `forward` of AutoGPTQ's qlinear_cuda.py; GPTQModel for the format
gptq_v2; `WQLinear_GEMM` and packing_utils.py of AutoAWQ.
"""

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from quantizer.config.wording import listed
from quantizer.numerics.granularity import BlockSize, block_counts
from quantizer.sources.quantized_folders.stored_layer import (
    FLOAT8_DTYPES,
    INTEGERS,
    SCALE_DTYPES,
    WORD_BITS,
    DequantizedLayer,
    GroupedCodes,
    MethodSettings,
    StoredLayer,
    column_groups,
    float_scales,
    listed_groups,
    unpack_fp4,
    unpack_words,
    words_of,
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
            layer.part(scale_name, BLOCK_SCALE_DTYPES, shape=expected)
        load = partial(self._values, layer, scale_name, block_size)
        values = DeferredTensor(weight.shape, self._dtype, load)
        return DequantizedLayer({_WEIGHT: values}, (_WEIGHT, scale_name))

    def _values(self, layer: StoredLayer, scale_name: str, block_size: BlockSize) -> Tensor:
        """Return the values of a layer's weight."""
        codes = layer.load(_WEIGHT)
        scale = spread_blocks(float_scales(layer.load(scale_name)), block_size, codes.shape)
        groups = column_groups(codes.shape[1], block_size[1])
        return GroupedCodes(codes, scale, groups).values(self._dtype)


def read_block_size(settings: MethodSettings, name: str) -> BlockSize | None:
    """Return the size of blocks that a setting gives, or None if it is null or missing.

    Raises:
        ModelError: it is something else than two integers above zero.
    """
    value = settings.fields.get(name)
    if value is None:
        return None
    if isinstance(value, list) and [type(size) for size in value] == [int, int]:
        rows, columns = value
        if min(rows, columns) > 0:
            return (rows, columns)
    raise settings.refusal(name, value, "two integers above zero")


def scale_shape_of(layer: StoredLayer, name: str, dtypes: Collection[torch.dtype]) -> BlockSize:
    """Return the shape of scales as rows and columns: one scale is [1, 1], and one scale for
    each row [rows, 1].

    Raises:
        ModelError: they are missing, or have another dtype or more axes.
    """
    rank = min(2, layer.parts[name].dim()) if name in layer.parts else 2
    scale = layer.part(name, dtypes, rank)
    rows, columns = scale.shape if rank == 2 else (scale.numel(), 1)
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
    why = f"has the shape {stored}, which does not fit {list(shape)} codes"
    raise layer.damage(name, why)


def spread_blocks(values: Tensor, block_size: BlockSize, shape: Sequence[int]) -> Tensor:
    """Return values of blocks with a row for each row of the weight.

    Args:
        values: with one element for each block.
        block_size: of the blocks.
        shape: of the weight.

    >>> spread_blocks(torch.tensor([1.0, 2.0]), (2, 8), (3, 8)).tolist()
    [[1.0], [1.0], [2.0]]
    """
    rows = shape[0]
    by_block = values.reshape(block_counts(shape, block_size))
    # A config may have blocks of any size
    return by_block.repeat_interleave(min(block_size[0], rows), 0)[:rows]


_BLOCK = 32
_BLOCKS = "_blocks"
_SCALES = "_scales"


class Mxfp4Reader:
    """Reads stacks of weights: `X_blocks` [experts, outputs, groups, 16] has two values in a
    byte, `X_scales` [experts, outputs, groups] exponents with 127 added. `X` is [experts,
    inputs, outputs].
    """

    def __init__(self, settings: MethodSettings, dtype: torch.dtype) -> None:
        """Read weights in `dtype`. The method has no settings that change what is stored."""
        self._dtype = dtype

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weights of the experts of a layer.

        Raises:
            ModelError: its tensors do not fit each other.
        """
        weights: dict[str, DeferredTensor] = {}
        used: list[str] = []
        for name in layer.parts:
            if not name.endswith(_BLOCKS):
                continue
            weight = name.removesuffix(_BLOCKS)
            scale_name = weight + _SCALES
            blocks = layer.part(name, [torch.uint8], rank=4)
            experts, outputs, groups, _ = blocks.shape
            counts = [experts, outputs, groups]
            layer.part(name, [torch.uint8], shape=[*counts, _BLOCK // 2])
            layer.part(scale_name, [torch.uint8], shape=counts)
            shape = (experts, groups * _BLOCK, outputs)
            load = partial(self._values, layer, weight, shape)
            weights[weight] = DeferredTensor(shape, self._dtype, load)
            used += [name, scale_name]
        return DequantizedLayer(weights, used) if weights else None

    def _values(self, layer: StoredLayer, weight: str, shape: tuple[int, int, int]) -> Tensor:
        """Return the values of a stack, one expert after the other."""
        blocks = layer.load(weight + _BLOCKS)
        scales = layer.load(weight + _SCALES)
        values = torch.empty(shape, dtype=self._dtype)
        groups = column_groups(shape[1], _BLOCK)
        for expert, packed in enumerate(blocks):
            codes = unpack_fp4(packed.flatten(1))
            scale = float_scales(scales[expert])
            values[expert] = GroupedCodes(codes, scale, groups).values(self._dtype).t()
        return values


_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_PARTS = ("qweight", "qzeros", "scales")
_GROUPS = "g_idx"
_AWQ_BITS = 4
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble that holds each of the eight columns of an int32."""


class GptqReader:
    """Reads `qweight`, `qzeros`, `scales` and `g_idx` of layers.

    `qweight` [inputs, outputs] is packed along the inputs, `qzeros` [groups, outputs] along the
    outputs. The format gptq stores zero points minus one, gptq_v2 as they are.
    """

    def __init__(self, settings: MethodSettings, dtype: torch.dtype) -> None:
        """Check the settings, and read weights in `dtype`.

        Raises:
            ModelError: widths or formats are unknown.
        """
        format_key = "format"
        if settings.fields.get("checkpoint_format") is not None:
            format_key = "checkpoint_format"
        stored_format = settings.one_of(format_key, _FORMATS, "gptq")
        self._zero_offset = 1 if stored_format == "gptq" else 0
        self._bits: int = settings.one_of("bits", _BITS)
        self._group_size = settings.group_size()
        # Rules for some layers may give them other widths and groups
        self._has_rules = bool(settings.fields.get("dynamic"))
        self._dtype = dtype

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weight of a layer.

        Raises:
            ModelError: its tensors do not fit each other.
        """
        if "qweight" not in layer.parts:
            return None
        words, outputs = layer.part("qweight", [torch.int32]).shape
        bits = self._bits_of(layer, words)
        inputs = words * WORD_BITS // bits
        groups = len(layer.part("scales", SCALE_DTYPES))
        layer.part("scales", SCALE_DTYPES, shape=[groups, outputs])
        layer.part("qzeros", [torch.int32], shape=[groups, words_of(outputs, bits)])
        if _GROUPS in layer.parts:
            layer.part(_GROUPS, INTEGERS, shape=[inputs])
        else:
            expected = -(-inputs // (self._group_size or inputs))
            layer.part("scales", SCALE_DTYPES, shape=[expected, outputs])
        load = partial(self._values, layer, bits, outputs, inputs)
        weight = DeferredTensor((outputs, inputs), self._dtype, load)
        return DequantizedLayer({"weight": weight}, (*_PARTS, _GROUPS))

    def _bits_of(self, layer: StoredLayer, words: int) -> int:
        """Return the width of a layer's codes. With rules, it follows from the shapes."""
        bits = self._bits
        if self._has_rules and _GROUPS in layer.parts:
            groups = layer.part(_GROUPS, INTEGERS, rank=1)
            bits = words * WORD_BITS // len(groups)
        if bits not in _BITS:
            raise layer.damage("qweight", f"has codes of {bits} bits, not of {listed(_BITS)}")
        return bits

    def _values(self, layer: StoredLayer, bits: int, outputs: int, inputs: int) -> Tensor:
        """Return the values of a layer's weight."""
        scale = layer.load("scales").float()
        zeros = unpack_words(layer.load("qzeros"), bits, outputs)
        groups = column_groups(inputs, self._group_size or inputs)
        if _GROUPS in layer.parts:
            groups = listed_groups(layer, _GROUPS, len(scale))
        codes = GroupedCodes(
            unpack_words(layer.load("qweight").t(), bits, inputs),
            scale.t(),
            groups,
            (zeros.int() + self._zero_offset).t(),
        )
        return codes.values(self._dtype)


class AwqReader:
    """Reads `qweight` [inputs, outputs], `qzeros` and `scales` [groups, outputs] of layers, in
    the layout `gemm` of AutoAWQ. Codes are packed along the outputs, eight in an int32.
    """

    def __init__(self, settings: MethodSettings, dtype: torch.dtype) -> None:
        """Check the settings, and read weights in `dtype`.

        Raises:
            ModelError: widths or layouts are unknown.
        """
        layout_key = "version" if "version" in settings.fields else "format"
        layout = settings.fields.get(layout_key) or "gemm"
        if str(layout).lower() != "gemm":
            raise settings.refusal(layout_key, layout, '"gemm"')
        bits_key = "w_bit" if "w_bit" in settings.fields else "bits"
        settings.one_of(bits_key, [_AWQ_BITS], _AWQ_BITS)
        self._group_size = settings.group_size()
        self._dtype = dtype

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weight of a layer.

        Raises:
            ModelError: its tensors do not fit each other.
        """
        if "qweight" not in layer.parts:
            return None
        inputs, words = layer.part("qweight", [torch.int32]).shape
        outputs = words * len(_AWQ_PLACES)
        group_size = self._group_size or inputs
        groups = -(-inputs // group_size)
        layer.part("scales", SCALE_DTYPES, shape=[groups, outputs])
        layer.part("qzeros", [torch.int32], shape=[groups, words])
        load = partial(self._values, layer, column_groups(inputs, group_size))
        weight = DeferredTensor((outputs, inputs), self._dtype, load)
        return DequantizedLayer({"weight": weight}, _PARTS)

    def _values(self, layer: StoredLayer, groups: Tensor) -> Tensor:
        """Return the values of a layer's weight."""
        codes = _columns(layer.load("qweight")).t().contiguous()
        zero_point = _columns(layer.load("qzeros")).t()
        scale = layer.load("scales").float().t()
        return GroupedCodes(codes, scale, groups, zero_point).values(self._dtype)


def _columns(words: Tensor) -> Tensor:
    """Return the codes of words in the order of the columns."""
    rows, count = words.shape
    by_place = unpack_words(words, _AWQ_BITS, count * len(_AWQ_PLACES))
    by_word = by_place.view(rows, count, -1)
    return by_word[..., _AWQ_PLACES].reshape(rows, -1)
