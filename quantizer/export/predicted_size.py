"""How many bytes the weights of a checkpoint take at most, before anything is calibrated."""

import math
from collections.abc import Collection

from torch import nn

from quantizer.config.model import QuantizationSpec
from quantizer.export.stored_weights import is_symmetric
from quantizer.numerics.codes import bits_of

_ENTRY_BYTES = 128
"""At most what the header of a .safetensors file has of one tensor, without the name."""
_WORD_BITS = 32
_WORD_BYTES = 4
_PARTS = 4
"""The tensors of a layer with codes: codes, scales, zero points, and the shape."""
_SHAPE_BYTES = 16


def float_bytes(model: nn.Module, coded: Collection[str]) -> int:
    """Return the most bytes that the tensors take in files that are not codes.

    Args:
        model: the float model. A tensor with several names is stored once.
        coded: the names of the weights that become codes.
    """
    total = _ENTRY_BYTES
    counted: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in coded or id(tensor) in counted:
            continue
        counted.add(id(tensor))
        values = tensor.numel() * tensor.element_size()
        total += values + len(name) + _ENTRY_BYTES
    return total


def coded_bytes(
    name: str, shape: tuple[int, int], spec: QuantizationSpec, *, scales: int, experts: int = 1
) -> int:
    """Return the most bytes that a weight takes in files as codes.

    Args:
        name: of the weight.
        shape: its rows and columns, of all experts together.
        spec: of the weight.
        scales: how many scales it has.
        experts: how many experts it has, whose layers are stored apart, or in halves.
    """
    rows, columns = shape
    bits = bits_of(spec)
    stored_scales = max(scales, rows)
    words = rows * math.ceil(columns * bits / _WORD_BITS) + stored_scales
    if not is_symmetric(spec):
        words += math.ceil(stored_scales / rows) * math.ceil(rows * bits / _WORD_BITS)
    layers = 2 * experts if experts > 1 else 1
    overhead = _PARTS * (len(name) + _ENTRY_BYTES) + _SHAPE_BYTES
    return words * _WORD_BYTES + layers * overhead
