"""Dequantize the experts of folders in mxfp4, as OpenAI publishes gpt-oss.

Source: `convert_moe_packed_tensors` of transformers.
"""

from functools import partial

import torch
from torch import Tensor

from quantizer.sources.quantized_folders.grouped_codes import (
    GroupedCodes,
    float_scales,
    unpack_fp4,
)
from quantizer.sources.quantized_folders.method_settings import MethodSettings
from quantizer.sources.quantized_folders.stored_layer import (
    DequantizedLayer,
    StoredLayer,
    column_groups,
)
from quantizer.storage.deferred_tensor import DeferredTensor

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
            layer.require_shape(name, [experts, outputs, groups, _BLOCK // 2])
            layer.part(scale_name, [torch.uint8], rank=3)
            layer.require_shape(scale_name, [experts, outputs, groups])
            load = partial(self._values, layer, weight)
            shape = (experts, groups * _BLOCK, outputs)
            weights[weight] = DeferredTensor(shape, self._dtype, load)
            used += [name, scale_name]
        if not weights:
            return None
        return DequantizedLayer(weights, used)

    def _values(self, layer: StoredLayer, weight: str) -> Tensor:
        """Return the values of a stack, one expert after the other."""
        blocks = layer.load(weight + _BLOCKS)
        scales = layer.load(weight + _SCALES)
        experts, outputs, group_count, _ = blocks.shape
        columns = group_count * _BLOCK
        shape = (experts, columns, outputs)
        values = torch.empty(shape, dtype=self._dtype)
        groups = column_groups(columns, _BLOCK)
        for expert in range(experts):
            packed = blocks[expert].reshape(outputs, -1)
            scale = float_scales(scales[expert])
            grouped = GroupedCodes(unpack_fp4(packed), scale, groups)
            matrix = grouped.values(self._dtype)
            values[expert] = matrix.t()
        return values
