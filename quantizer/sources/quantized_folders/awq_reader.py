"""Dequantize folders of AWQ in the layout `gemm` of AutoAWQ.

Source: `WQLinear_GEMM` and packing_utils.py of AutoAWQ.
"""

from functools import partial

import torch
from torch import Tensor

from quantizer.sources.quantized_folders.grouped_codes import GroupedCodes, unpack_words
from quantizer.sources.quantized_folders.method_settings import MethodSettings
from quantizer.sources.quantized_folders.stored_layer import (
    SCALE_DTYPES,
    DequantizedLayer,
    StoredLayer,
    column_groups,
)
from quantizer.storage.deferred_tensor import DeferredTensor

_BITS = 4
_PER_WORD = 8
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble that holds each of the eight columns of an int32."""


class AwqReader:
    """Reads `qweight` [inputs, outputs], `qzeros` and `scales` [groups, outputs] of layers.
    Codes are packed along the outputs, eight in an int32.
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
        settings.one_of(bits_key, [_BITS], _BITS)
        self._group_size = settings.group_size()
        self._dtype = dtype

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weight of a layer.

        Raises:
            ModelError: its tensors do not fit each other.
        """
        if "qweight" not in layer.parts:
            return None
        words = layer.part("qweight", [torch.int32])
        inputs, word_count = words.shape
        outputs = word_count * _PER_WORD
        group_size = self._group_size or inputs
        groups = -(-inputs // group_size)
        layer.part("scales", SCALE_DTYPES)
        layer.require_shape("scales", [groups, outputs])
        layer.part("qzeros", [torch.int32])
        layer.require_shape("qzeros", [groups, word_count])
        load = partial(self._values, layer, column_groups(inputs, group_size))
        weight = DeferredTensor((outputs, inputs), self._dtype, load)
        return DequantizedLayer({"weight": weight}, ("qweight", "qzeros", "scales"))

    def _values(self, layer: StoredLayer, groups: Tensor) -> Tensor:
        """Return the values of a layer's weight."""
        codes = _columns(layer.load("qweight"))
        scale = layer.load("scales").float()
        zero_point = _columns(layer.load("qzeros"))
        grouped = GroupedCodes(
            codes=codes.t().contiguous(),
            scale=scale.t(),
            groups=groups,
            zero_point=zero_point.t(),
        )
        return grouped.values(self._dtype)


def _columns(words: Tensor) -> Tensor:
    """Return the codes of words in the order of the columns."""
    rows, count = words.shape
    by_place = unpack_words(words, _BITS, count * _PER_WORD)
    by_word = by_place.view(rows, count, _PER_WORD)
    ordered = by_word[..., _PLACES]
    return ordered.reshape(rows, -1)
