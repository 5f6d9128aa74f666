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
from quantizer.storage.opened_files import OpenFile

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

    def load(self, name: str) -> Tensor:
        """Return the values of a tensor."""
        return self.parts[name].load()

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
            stored = sorted(self.parts)
            others = first_names(stored)
            file = self._file_of(stored[0])
            full_name = self.full_name(name)
            message = (
                f"{file} has no {full_name}, which its layer needs in addition to {others}"
            )
            raise ModelError(message, help=_AGAIN)
        tensor = self.parts[name]
        if tensor.dtype not in dtypes:
            stored_name = dtype_name(tensor.dtype)
            names = map(dtype_name, dtypes)
            known = " or ".join(names)
            raise self.damage(name, f"is {stored_name}, not {known}")
        if tensor.dim() != rank:
            shape = list(tensor.shape)
            raise self.damage(name, f"has the shape {shape}, not {rank} axes")
        if not tensor.numel():
            raise self.damage(name, "has no values")
        return tensor

    def require_shape(self, name: str, shape: Sequence[int]) -> None:
        """Check the shape of a tensor that `part` has returned.

        Raises:
            ModelError: it is another one.
        """
        stored = list(self.parts[name].shape)
        expected = list(shape)
        if stored != expected:
            raise self.damage(name, f"has the shape {stored}, not {expected}")

    def damage(self, name: str, why: str) -> ModelError:
        """Return the error for a tensor that does not fit the others.

        Args:
            name: of the tensor.
            why: the end of the sentence that the names of file and tensor begin.
        """
        file = self._file_of(name)
        full_name = self.full_name(name)
        return ModelError(f"{file}: {full_name} {why}", help=_AGAIN)

    def _file_of(self, name: str) -> str:
        place = self.parts[name].place
        if place is not None and isinstance(place.file, OpenFile):
            return str(place.file.path)
        return "the folder"


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
    parts_by_path: dict[str, dict[str, DeferredTensor]] = {}
    for name, tensor in stored.items():
        path, _, part = name.rpartition(".")
        parts = parts_by_path.setdefault(path, {})
        parts[part] = tensor
    layers: list[StoredLayer] = []
    for path, parts in parts_by_path.items():
        layers.append(StoredLayer(path, parts))
    return layers


def column_groups(columns: int, group_size: int) -> Tensor:
    """Return the group of each column, where groups are runs of columns.

    >>> column_groups(5, 2).tolist()
    [0, 0, 1, 1, 2]
    """
    # A config may have groups of any size
    size = min(group_size, columns)
    return torch.arange(columns) // size


def listed_groups(layer: StoredLayer, name: str, groups: int) -> Tensor:
    """Return the group of each column as a tensor of the layer lists it.

    Raises:
        ModelError: there are fewer groups.
    """
    numbers = layer.load(name).long()
    first = int(numbers.min())
    last = int(numbers.max())
    if first < 0 or last >= groups:
        raise layer.damage(name, f"names groups outside of 0 to {groups - 1}")
    return numbers
