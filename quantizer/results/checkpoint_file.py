"""Save and restore the checkpoint of one stage. A run that is killed at any moment leaves a
consistent checkpoint.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantizer.calibration.events import Snapshot
from quantizer.errors import CheckpointError, ResultError
from quantizer.results.result_set import holding
from quantizer.storage.deferred_tensor import DeferredTensor, move_to_disk
from quantizer.storage.files import (
    deferred_tensors,
    read_json,
    sha256,
    write_json,
    write_tensors,
)
from quantizer.storage.folder_list import is_digest
from quantizer.storage.opened_files import json_digest
from quantizer.storage.ownership import listed_files
from quantizer.storage.replacing import remove_file

# 3: says which tensors were deferred. 4: files are named by digest, and there is a checksum.
# 5: the histograms of samples have weights.
_FORMAT = 5


_WITHOUT_RESUME = "run without <--resume>"


class _Stored(NamedTuple):
    """A tensor, the digest of the file that it is in, and its name in that file."""

    tensor: Tensor
    digest: str
    name: str


class Checkpoint:
    """A checkpoint of one stage: `checkpoint.<name>.json`, and tensor files that it refers to.

    Tensor files are called by their digests, so a new one replaces none that the JSON file
    refers to. The JSON file is written last.

    A save writes only tensors that no file has yet. They are recognized by identity: a tensor
    must not be changed in place between two saves. Tensors are restored on their devices, and
    deferred ones as deferred ones.

    Args:
        folder: the folder of the files.
        name: the name of the stage.
        key: what must be equal in the run that resumes.
    """

    def __init__(self, folder: Path, name: str, key: Mapping[str, Any]) -> None:
        self._info = folder / f"checkpoint.{name}.json"
        self._key = {"format": _FORMAT, **key}
        self._stored: dict[int, _Stored] = {}
        """By the id of the tensor. The tensor is referred to, so that no other one gets its id.
        """

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot. If the process is stopped meanwhile, the previous one stays
        valid.
        """
        self._write_new(snapshot.tensors)
        stored: dict[int, _Stored] = {}
        places: dict[str, list[Any]] = {}
        for name, tensor in snapshot.tensors.items():
            entry = self._stored[id(tensor)]
            stored[id(tensor)] = entry
            places[name] = [
                entry.digest,
                entry.name,
                str(tensor.device),
                isinstance(tensor, DeferredTensor),
            ]
        self._stored = stored
        content: dict[str, Any] = {"key": self._key, "state": snapshot.state, "tensors": places}
        checksum = json_digest(content)
        write_json(self._info, content | {"checksum": checksum})
        # Tensor files of earlier snapshots are not needed any more
        used = {self._path(entry.digest) for entry in stored.values()}
        for path in listed_files(self._info.parent, f"{self._info.stem}."):
            if path != self._info and path not in used:
                remove_file(path)

    def _write_new(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors that no file has yet to a new file."""
        new: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in self._stored:
                new[name] = tensor
        if not new:
            return
        with holding(self._info.parent) as place:
            part = place.work / "part.safetensors"
            digest = write_tensors(part, new)
            place.take(part, self._path(digest).name, digest)
        for name, tensor in new.items():
            self._stored[id(tensor)] = _Stored(tensor, digest, name)

    def restore(self) -> Snapshot | None:
        """Return the last snapshot of a run with the same key, or None if there is none.

        Raises:
            ResultError: it is damaged, or belongs to another run.
        """
        if not self._info.exists():
            return None
        from quantizer.calibration.snapshots import other_run, reporting_damage

        try:
            info = read_json(self._info)
        except ResultError as error:
            raise CheckpointError(error.message, help=_WITHOUT_RESUME) from error
        with reporting_damage(str(self._info)):
            for name, value in self._key.items():
                if info["key"].get(name) != value:
                    raise other_run(f"{name} differs")
            content = {name: info[name] for name in ("key", "state", "tensors")}
            if json_digest(content) != info.get("checksum"):
                raise ValueError("it was changed after it was written")
            if not isinstance(info["state"], dict):
                raise ValueError("its state is not an object")
            tensors = self._read(info["tensors"])
            return Snapshot(tensors, info["state"])

    def _read(self, places: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors of a snapshot by name.

        Args:
            places: by name, what `save` has written: the digest of the file, the name in it,
                the device, and whether the tensor was deferred.
        """
        files: dict[str, dict[str, DeferredTensor]] = {}
        restored: dict[tuple[str, str], Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for name, place in places.items():
            digest, stored_name, device, is_deferred = place
            if digest not in files:
                files[digest] = self._open(digest)
            key = (digest, stored_name)
            if key not in restored:
                stored = files[digest][stored_name]
                tensor = _move_to_device(stored, device, is_deferred)
                restored[key] = tensor
                self._stored[id(tensor)] = _Stored(tensor, digest, stored_name)
            tensors[name] = restored[key]
        return tensors

    def _open(self, digest: str) -> dict[str, DeferredTensor]:
        """Return the tensors of a file, after comparing it with its digest.

        Raises:
            ResultError: the file is missing or was changed.
        """
        if not is_digest(digest):
            raise ValueError(f"{digest!r:.80} is not a digest")
        path = self._path(digest)
        if not path.is_file() or sha256(path) != digest:
            raise CheckpointError(f"{path} is damaged", help=_WITHOUT_RESUME)
        return deferred_tensors(path)

    def _path(self, digest: str) -> Path:
        return self._info.with_suffix(f".{digest}.safetensors")


def _move_to_device(stored: DeferredTensor, device: str, is_deferred: bool) -> Tensor:
    """Return a stored tensor on its device, deferred if it was deferred when it was saved.

    A deferred tensor is copied to a temporary file, as the file of the checkpoint may be
    removed while the tensor is still needed.
    """
    if not isinstance(device, str):
        raise ValueError(f"{device!r} is not a device")
    target = torch.device(device)
    tensor = stored.load().to(target)
    if is_deferred:
        return move_to_disk(tensor)
    return tensor
