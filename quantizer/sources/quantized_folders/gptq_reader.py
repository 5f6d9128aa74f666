"""Dequantize folders of GPTQ as AutoGPTQ and GPTQModel write them.

Source: `pack` and `forward` of AutoGPTQ's qlinear_cuda.py; GPTQModel for the format gptq_v2.
"""

from functools import partial

import torch
from torch import Tensor

from quantizer.config.wording import listed
from quantizer.sources.quantized_folders.grouped_codes import (
    WORD_BITS,
    GroupedCodes,
    unpack_words,
    words_of,
)
from quantizer.sources.quantized_folders.method_settings import MethodSettings
from quantizer.sources.quantized_folders.stored_layer import (
    SCALE_DTYPES,
    DequantizedLayer,
    StoredLayer,
    column_groups,
    listed_groups,
)
from quantizer.storage.deferred_tensor import DeferredTensor

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_GROUPS = "g_idx"
_INTEGERS = (torch.int32, torch.int64)


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
        self._bits = settings.one_of("bits", _BITS)
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
        scales = layer.part("scales", SCALE_DTYPES)
        groups = len(scales)
        layer.require_shape("scales", [groups, outputs])
        layer.part("qzeros", [torch.int32])
        zero_words = words_of(outputs, bits)
        layer.require_shape("qzeros", [groups, zero_words])
        used = {"qweight", "qzeros", "scales"}
        if _GROUPS in layer.parts:
            layer.part(_GROUPS, _INTEGERS, rank=1)
            layer.require_shape(_GROUPS, [inputs])
            used.add(_GROUPS)
        else:
            group_size = self._group_size or inputs
            expected = -(-inputs // group_size)
            layer.require_shape("scales", [expected, outputs])
        load = partial(self._values, layer, bits)
        weight = DeferredTensor((outputs, inputs), self._dtype, load)
        return DequantizedLayer({"weight": weight}, used)

    def _bits_of(self, layer: StoredLayer, words: int) -> int:
        """Return the width of a layer's codes. With rules, it follows from the shapes."""
        bits: int = self._bits
        if self._has_rules and _GROUPS in layer.parts:
            groups = layer.part(_GROUPS, _INTEGERS, rank=1)
            bits = words * WORD_BITS // len(groups)
        if bits not in _BITS:
            widths = listed(_BITS)
            raise layer.damage("qweight", f"has codes of {bits} bits, not of {widths}")
        return bits

    def _values(self, layer: StoredLayer, bits: int) -> Tensor:
        """Return the values of a layer's weight."""
        words = layer.load("qweight").t()
        outputs, word_count = words.shape
        inputs = word_count * WORD_BITS // bits
        scale = layer.load("scales").float()
        zero_words = layer.load("qzeros")
        zeros = unpack_words(zero_words, bits, outputs)
        if _GROUPS in layer.parts:
            groups = listed_groups(layer, _GROUPS, len(scale))
        else:
            group_size = self._group_size or inputs
            groups = column_groups(inputs, group_size)
        zero_point = zeros.int() + self._zero_offset
        codes = GroupedCodes(
            codes=unpack_words(words, bits, inputs),
            scale=scale.t(),
            groups=groups,
            zero_point=zero_point.t(),
        )
        return codes.values(self._dtype)
