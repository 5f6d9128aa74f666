"""Dequantize folders of GPTQ and AWQ, whose codes are packed into words.

Source: `pack` and `forward` of AutoGPTQ's qlinear_cuda.py; GPTQModel for the format gptq_v2;
`WQLinear_GEMM` and packing_utils.py of AutoAWQ.
"""

from functools import partial

import torch
from torch import Tensor

from quantizer.config.wording import listed
from quantizer.sources.quantized_folders.grouped_codes import (
    WORD_BITS,
    GroupedCodes,
    column_groups,
    unpack_words,
    words_of,
)
from quantizer.sources.quantized_folders.stored_layer import (
    INTEGERS,
    SCALE_DTYPES,
    DequantizedLayer,
    MethodSettings,
    StoredLayer,
    listed_groups,
)
from quantizer.storage.deferred_tensor import DeferredTensor

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
