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
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its eight columns."""


class AwqReader:
    """Reads `qweight` [inputs, outputs], `qzeros` and `scales` [groups, outputs] of layers. Codes
    are packed along the outputs, eight in a word.
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
        inputs, words = layer.part("qweight", [torch.int32]).shape
        outputs = words * _PER_WORD
        groups = -(-inputs // (self._group_size or inputs))
        layer.part("scales", SCALE_DTYPES)
        layer.require_shape("scales", [groups, outputs])
        layer.part("qzeros", [torch.int32])
        layer.require_shape("qzeros", [groups, words])
        load = partial(self._values, layer, inputs)
        weight = DeferredTensor((outputs, inputs), self._dtype, load)
        return DequantizedLayer({"weight": weight}, ("qweight", "qzeros", "scales"))

    def _values(self, layer: StoredLayer, inputs: int) -> Tensor:
        """Return the values of a layer's weight."""
        codes = GroupedCodes(
            codes=_columns(layer.parts["qweight"].load()).t().contiguous(),
            scale=layer.parts["scales"].load().float().t(),
            groups=column_groups(inputs, self._group_size or inputs),
            zero_point=_columns(layer.parts["qzeros"].load()).t(),
        )
        return codes.values(self._dtype)


def _columns(words: Tensor) -> Tensor:
    """Return the codes of words in the order of the columns."""
    rows, count = words.shape
    by_place = unpack_words(words, _BITS, count * _PER_WORD)
    return by_place.view(rows, count, _PER_WORD)[..., list(_PLACES)].reshape(rows, -1)
