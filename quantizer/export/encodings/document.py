"""The JSON of encodings that AIMET writes and QNN's converters read, in two versions.

Source: aimet-onnx 2.42, the classes of its module `_encoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import quantizer
from quantizer.config.json_types import JsonMapping, JsonObject

ENCODINGS_VERSIONS = ("1.0.0", "2.0.0")
"""What `--encodings_version` may be, the default first."""
WITH_AXES = "2.0.0"
"""The version whose entries state their axis."""
_PER_TENSOR = "PER_TENSOR"
_PER_CHANNEL = "PER_CHANNEL"
_PER_BLOCK = "PER_BLOCK"


@dataclass(frozen=True)
class TensorEncoding:
    """How one tensor of an ONNX file is quantized.

    The value of a code is scale * (code - zero_point). Codes are integers of `bits` bits.

    Attributes:
        name: of the tensor, or of the initializer.
        is_signed: whether codes are on both sides of zero. Encodings call that symmetric.
        scale: float64, (), [channels], or the blocked shape that ONNX's DequantizeLinear has.
        zero_point: int64, in the same shape.
        axis: of the channels, or the one that blocks run along.
        block_size: of the blocks; None without blocks.
        is_parameter: whether it is an initializer.
    """

    name: str
    bits: int
    is_signed: bool
    scale: NDArray[np.float64]
    zero_point: NDArray[np.int64]
    axis: int | None = None
    block_size: int | None = None
    is_parameter: bool = False

    @property
    def lowest(self) -> int:
        """Return the smallest code."""
        return -(1 << (self.bits - 1)) if self.is_signed else 0

    @property
    def highest(self) -> int:
        """Return the largest code."""
        return self.lowest + (1 << self.bits) - 1

    def has_same_codes(self, other: TensorEncoding) -> bool:
        """Return whether both give a tensor the same codes with the same values."""
        same_range = (self.bits, self.is_signed) == (other.bits, other.is_signed)
        same_scale = np.array_equal(self.scale, other.scale)
        return same_range and same_scale and np.array_equal(self.zero_point, other.zero_point)


def encodings_document(encodings: Sequence[TensorEncoding], version: str) -> JsonObject:
    """Return the content of the file.

    Args:
        encodings: in the order of the file.
        version: one of `ENCODINGS_VERSIONS`.
    """
    producer = {"package": "quantizer", "version": quantizer.__version__}
    document: JsonObject = {"producer": producer, "version": version}
    if version == WITH_AXES:
        document["encodings"] = [_with_axis(encoding) for encoding in encodings]
        return document
    activations: list[JsonObject] = []
    parameters: list[JsonObject] = []
    for encoding in encodings:
        section = parameters if encoding.is_parameter else activations
        section.append(_with_offset(encoding))
    document["activation_encodings"] = activations
    document["param_encodings"] = parameters
    return document


def _with_axis(encoding: TensorEncoding) -> JsonObject:
    """Return an entry of version 2.0.0."""
    word = "int" if encoding.is_signed else "uint"
    entry: JsonObject = {
        "name": encoding.name,
        "output_dtype": f"{word}{encoding.bits}",
        "y_scale": encoding.scale.tolist(),
    }
    if encoding.zero_point.any():
        entry["y_zero_point"] = encoding.zero_point.tolist()
    if encoding.axis is not None:
        entry["axis"] = encoding.axis
    if encoding.block_size is not None:
        entry["block_size"] = encoding.block_size
    return entry


def _with_offset(encoding: TensorEncoding) -> JsonObject:
    """Return an entry of version 1.0.0.

    Its offset is that of unsigned codes, with the opposite sign of a zero point. Channels and
    blocks have no axis: readers know it from the operator.
    """
    kind = _PER_TENSOR
    scale = encoding.scale
    offset = encoding.lowest - encoding.zero_point
    if encoding.block_size is not None:
        kind = _PER_BLOCK
        if encoding.axis == 0:
            # The outputs come first, also for a weight [inputs, outputs].
            scale = scale.T
            offset = offset.T
    elif encoding.axis is not None:
        kind = _PER_CHANNEL
    entry: JsonObject = {
        "name": encoding.name,
        "dtype": "INT",
        "bw": encoding.bits,
        "is_sym": encoding.is_signed,
        "enc_type": kind,
        "scale": scale.flatten().tolist(),
        "offset": offset.flatten().tolist(),
    }
    if encoding.block_size is not None:
        entry["block_size"] = encoding.block_size
    return entry


def read_document(
    document: JsonMapping, shapes: dict[str, tuple[int, ...]], axes: dict[str, int]
) -> list[TensorEncoding]:
    """Return the encodings of a file, as its readers understand it.

    Args:
        document: the content of the file.
        shapes: of the initializers, by name.
        axes: of their channels, by name, as the operator that reads them has them.
    """
    if document["version"] == WITH_AXES:
        return [_read_with_axis(entry, shapes) for entry in document["encodings"]]
    encodings: list[TensorEncoding] = []
    for entry in document["activation_encodings"]:
        encodings.append(_read_with_offset(entry, (), 0, is_parameter=False))
    for entry in document["param_encodings"]:
        name = entry["name"]
        axis = axes.get(name, 0)
        encodings.append(_read_with_offset(entry, shapes[name], axis, is_parameter=True))
    return encodings


def _read_with_axis(entry: JsonMapping, shapes: dict[str, tuple[int, ...]]) -> TensorEncoding:
    word, _, bits = entry["output_dtype"].partition("int")
    scale = np.array(entry["y_scale"], np.float64)
    zero_point = np.array(entry.get("y_zero_point", np.zeros(scale.shape)), np.int64)
    return TensorEncoding(
        entry["name"],
        int(bits),
        is_signed=word != "u",
        scale=scale,
        zero_point=zero_point,
        axis=entry.get("axis"),
        block_size=entry.get("block_size"),
        is_parameter=entry["name"] in shapes,
    )


def _read_with_offset(
    entry: JsonMapping, shape: tuple[int, ...], axis: int, *, is_parameter: bool
) -> TensorEncoding:
    """Read an entry of a version with an offset for each scale.

    Args:
        entry: of one tensor.
        shape: of the tensor.
        axis: that of the channels.
        is_parameter: whether it is a weight or a bias.
    """
    scale = np.array(entry["scale"], np.float64)
    offset = np.array(entry["offset"], np.int64)
    block_size = entry.get("block_size")
    block_axis: int | None = axis
    if entry["enc_type"] == _PER_TENSOR:
        scale = scale.reshape(())
        offset = offset.reshape(())
        block_axis = None
    elif block_size is not None:
        blocks = (shape[axis], shape[1 - axis] // block_size)
        scale = scale.reshape(blocks)
        offset = offset.reshape(blocks)
        block_axis = 1 - axis
        if block_axis == 0:
            scale = scale.T
            offset = offset.T
    lowest = -(1 << (entry["bw"] - 1)) if entry["is_sym"] else 0
    return TensorEncoding(
        entry["name"],
        entry["bw"],
        is_signed=entry["is_sym"],
        scale=scale,
        zero_point=lowest - offset,
        axis=block_axis,
        block_size=block_size,
        is_parameter=is_parameter,
    )
