"""Describe a quantized layer as a folder stores it, and check its tensors before their use."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quantizer.config.wording import first_names
from quantizer.errors import ModelError
from quantizer.sources.tensor_kinds import dtype_name
from quantizer.storage.deferred_tensor import DeferredTensor

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_AGAIN = "copy or download the folder again, or give the folder of the float model"


@dataclass(frozen=True)
class StoredLayer:
    """The tensors of one layer.

    Attributes:
        path: of the layer.
        parts: its tensors, by the names that follow the path.
    """

    path: str
    parts: Mapping[str, DeferredTensor]

    def full_name(self, part: str) -> str:
        """Return the name of a tensor in its file."""
        return f"{self.path}.{part}" if self.path else part

    def part(self, name: str, dtypes: Collection[torch.dtype], rank: int = 2) -> DeferredTensor:
        """Return a tensor of the layer.

        Args:
            name: of the tensor.
            dtypes: that it may have.
            rank: the number of its axes.

        Raises:
            ModelError: it is missing or empty, or has another dtype or number of axes.
        """
        if name not in self.parts:
            others = first_names(sorted(self.parts))
            place = self._file_of(next(iter(self.parts)))
            raise ModelError(
                f"{place} has no {self.full_name(name)}, which its layer needs beside {others}",
                help=_AGAIN,
            )
        tensor = self.parts[name]
        if tensor.dtype not in dtypes:
            known = " or ".join(dtype_name(dtype) for dtype in dtypes)
            raise self.damage(name, f"is {dtype_name(tensor.dtype)}, not {known}")
        if tensor.dim() != rank:
            raise self.damage(name, f"has the shape {list(tensor.shape)}, not {rank} axes")
        if not tensor.numel():
            raise self.damage(name, "has no values")
        return tensor

    def require_shape(self, name: str, shape: Sequence[int]) -> None:
        """Check the shape of a tensor that `part` has returned.

        Raises:
            ModelError: it is another one.
        """
        stored = list(self.parts[name].shape)
        if stored != list(shape):
            raise self.damage(name, f"has the shape {stored}, not {list(shape)}")

    def damage(self, name: str, why: str) -> ModelError:
        """Return the error for a tensor that does not fit the others.

        Args:
            name: of the tensor.
            why: the end of the sentence that the names of file and tensor begin.
        """
        message = f"{self._file_of(name)}: {self.full_name(name)} {why}"
        return ModelError(message, help=_AGAIN)

    def _file_of(self, name: str) -> str:
        place = self.parts[name].place
        return "the folder" if place is None else str(place.file.path)


@dataclass(frozen=True)
class DequantizedLayer:
    """The float weights of a layer.

    Attributes:
        weights: by the names that follow the path.
        used: the names of the tensors that they are computed from.
    """

    weights: Mapping[str, DeferredTensor]
    used: Collection[str]


class LayerReader(Protocol):
    """Dequantizes the layers of a folder."""

    def read(self, layer: StoredLayer) -> DequantizedLayer | None:
        """Return the float weights of a layer, deferred; None if it is not quantized.

        Raises:
            ModelError: its tensors do not fit each other or the config.
        """


def split_into_layers(stored: Mapping[str, DeferredTensor]) -> list[StoredLayer]:
    """Return the tensors of a folder layer by layer, in the order of the folder."""
    layers: dict[str, dict[str, DeferredTensor]] = {}
    for name, tensor in stored.items():
        path, _, part = name.rpartition(".")
        layers.setdefault(path, {})[part] = tensor
    return [StoredLayer(path, parts) for path, parts in layers.items()]


def column_groups(columns: int, group_size: int) -> Tensor:
    """Return the group of each column, where groups are runs of columns.

    >>> column_groups(5, 2).tolist()
    [0, 0, 1, 1, 2]
    """
    return torch.arange(columns) // min(group_size, columns)


def listed_groups(layer: StoredLayer, name: str, groups: int) -> Tensor:
    """Return the group of each column as a tensor of the layer lists it.

    Raises:
        ModelError: there are fewer groups.
    """
    numbers = layer.parts[name].load().long()
    if int(numbers.min()) < 0 or int(numbers.max()) >= groups:
        raise layer.damage(name, f"names groups outside of 0 to {groups - 1}")
    return numbers
