"""The order of images in memory: convolutions run with the channels last, which on CPUs takes a
fifth less time, as does pooling.

Their outputs stay so through layers that compute alike on any order of memory
(`Op.any_layout`). All other layers get the order that the model gave them, with the channels
first. Exported programs do not choose the order of memory.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.graph.tracing.parameters import Module
from quantizer.storage.deferred_tensor import DeferredTensor

_IMAGE_DIMS = 4
"""The dimensions of a batch of images: [b, channels, height, width]."""
_PREFER_CHANNELS_FIRST = ("cuda", "mps")
"""Devices whose libraries choose the order, and prefer float32 with the channels first."""


def channels_last(x: Tensor) -> Tensor:
    """Return the same images, with the channels of a pixel next to each other in memory."""
    if x.dim() != _IMAGE_DIMS or torch.compiler.is_exporting():
        return x
    if x.device.type in _PREFER_CHANNELS_FIRST:
        return x
    return x.contiguous(memory_format=torch.channels_last)


def weights_last(network: Module) -> Module:
    """Return the network with the weights of its convolutions of images in this order, too.

    Otherwise torch reorders them at every call, which takes 3 % of a pass. Those of kernels
    larger than a pixel become copies. Deferred ones stay as they are.
    """
    for layer in network.modules():
        if not isinstance(layer, nn.Conv2d):
            continue
        weight = layer.weight
        if isinstance(weight, DeferredTensor):
            continue
        reordered = channels_last(weight.detach())
        layer.weight = nn.Parameter(reordered, requires_grad=weight.requires_grad)
    return network


def channels_first(value: Any) -> Any:
    """Return the same nested value, in which the pixels of a row of an image, or of a part of
    one, are next to each other.
    """
    if isinstance(value, Tensor):
        if value.dim() != _IMAGE_DIMS:
            return value
        if value.stride(1) >= value.stride(3):
            return value
        # A size of 1 has any stride, so the value may be in order already
        if value.is_contiguous():
            return value
        return value.contiguous()
    if type(value) in (tuple, list):
        return type(value)(map(channels_first, value))
    if type(value) is dict:
        return {key: channels_first(item) for key, item in value.items()}
    return value
