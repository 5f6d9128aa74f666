"""Convolutions of images run with their channels last in memory: on CPUs they, and pooling,
take a fifth less time.

What they make stays so for as long as layers follow that compute alike on any order of memory
(`Op.any_layout`). The others get what the model gave them, with the channels first. Exported
programs have no say in the order of memory.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.graph.parameters import Module
from quantizer.storage.deferred_tensor import DeferredTensor

IMAGES = 4
"""The dimensions of a batch of images: [b, channels, height, width]."""
_FIRST = ("cuda", "mps")
"""Devices whose own libraries choose, and prefer float32 with the channels first."""


def channels_last(x: Tensor) -> Tensor:
    """The same images, with the channels of a pixel next to each other in memory."""
    if x.dim() != IMAGES or x.device.type in _FIRST or torch.compiler.is_exporting():
        return x
    return x.contiguous(memory_format=torch.channels_last)


def weights_last(network: Module) -> Module:
    """The network with the weights of its convolutions of images in this order, too, which
    torch else puts them in at every call: 3 % of a pass. Those of kernels larger than a pixel
    become copies; deferred ones stay as they are.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d) and not isinstance(layer.weight, DeferredTensor):
            layer.weight = nn.Parameter(
                channels_last(layer.weight.detach()), requires_grad=layer.weight.requires_grad
            )
    return network


def channels_first(value: Any) -> Any:
    """The same nested value, the images in it, or parts of images, with the pixels of a row
    next to each other.
    """
    if isinstance(value, Tensor):
        # A size of 1 has any stride; the last question keeps what is in order already.
        is_last = (
            value.dim() == IMAGES
            and value.stride(1) < value.stride(3)
            and not value.is_contiguous()
        )
        return value.contiguous() if is_last else value
    if type(value) in (tuple, list):
        return type(value)(map(channels_first, value))
    if type(value) is dict:
        return {key: channels_first(each) for key, each in value.items()}
    return value
