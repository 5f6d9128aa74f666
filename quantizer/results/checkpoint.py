"""Checkpoints of a run's stages: files of one folder that are consistent after a stop at any
write.
"""

import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantizer.calibration.events import Events, RunStage, Snapshot
from quantizer.calibration.snapshots import other_run, reporting_damage
from quantizer.config.wording import counted
from quantizer.errors import BatchError, DataError, QuantizerError, ResultError
from quantizer.storage.deferred_tensor import DeferredTensor, out_of_memory
from quantizer.storage.files import (
    deferred_tensors,
    read_json,
    sha256,
    write_json,
    write_tensors,
)
from quantizer.storage.opened_files import json_digest

EVERY_S = 30.0
"""Seconds of work that a kill may cost."""
# 3: which values were out of memory; 4: files by digest, a checksum; 5: histograms of samples
# have weights.
_FORMAT = 5
_AGAIN = "run without --resume"


class _Stored(NamedTuple):
    """A tensor with the digest of the file that holds it, and its name there."""

    tensor: Tensor
    digest: str
    name: str


class Checkpoint:
    """`checkpoint.<name>.json` and the files of tensors that it names, which are called by
    their digests. The JSON file is written last.

    A save writes only tensors that are new. Tensors are compared by identity, so a changed one
    must be another object. Each is restored on its device, and out of memory if it was.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        key: Mapping[str, Any],
    ) -> None:
        self._info = folder / f"checkpoint.{name}.json"
        self._key = {"format": _FORMAT, **key}
        self._stored: dict[int, _Stored] = {}
        """By the tensor's id. It is kept here so that no other tensor gets this id."""

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot. A stop in the middle leaves the one before."""
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
        content: dict[str, Any] = {
            "key": self._key,
            "state": snapshot.state,
            "tensors": places,
        }
        checksum = json_digest(content)
        write_json(self._info, content | {"checksum": checksum})
        used = {self._path(entry.digest) for entry in stored.values()}
        present = set(self._info.parent.glob(f"{self._info.stem}.*.safetensors"))
        for path in present - used:
            path.unlink(missing_ok=True)

    def _write_new(self, tensors: Mapping[str, Tensor]) -> None:
        new: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in self._stored:
                new[name] = tensor
        if not new:
            return
        part = self._info.with_suffix(".part.safetensors")
        digest = write_tensors(part, new)
        os.replace(part, self._path(digest))
        for name, tensor in new.items():
            self._stored[id(tensor)] = _Stored(tensor, digest, name)

    def restore(self) -> Snapshot | None:
        """Return the last snapshot of a run with the same key; None if there is none.

        Raises:
            ResultError: it is damaged, or belongs to another run.
        """
        if not self._info.exists():
            return None
        info = read_json(self._info)
        with reporting_damage(str(self._info)):
            for name, value in self._key.items():
                if info["key"].get(name) != value:
                    raise other_run(f"{name} differs")
            content = {name: info[name] for name in ("key", "state", "tensors")}
            if json_digest(content) != info.get("checksum"):
                raise ValueError("it was changed after it was written")
            if not isinstance(info["state"], dict):
                raise ValueError("its state is no object")
            tensors = self._read(info["tensors"])
            return Snapshot(tensors, info["state"])

    def _read(self, places: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors at the places that `save` wrote down."""
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
                tensor = _placed(stored, device, is_deferred)
                restored[key] = tensor
                self._stored[id(tensor)] = _Stored(tensor, digest, stored_name)
            tensors[name] = restored[key]
        return tensors

    def _open(self, digest: str) -> dict[str, DeferredTensor]:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{digest!r:.80} is no digest")
        path = self._path(digest)
        if not path.is_file() or sha256(path) != digest:
            raise ResultError(f"{path} is damaged", help=_AGAIN)
        return deferred_tensors(path)

    def _path(self, digest: str) -> Path:
        return self._info.with_suffix(f".{digest}.safetensors")


def _placed(
    stored: DeferredTensor,
    device: str,
    is_deferred: bool,
) -> Tensor:
    """Return a stored tensor on its device, out of memory if it was.

    The checkpoint may be removed first, so a deferred tensor is written to another file.
    """
    if not isinstance(device, str):
        raise ValueError(f"{device!r} is no device")
    target = torch.device(device)
    tensor = stored.load().to(target)
    if is_deferred:
        return out_of_memory(tensor)
    return tensor


class Checkpoints(Events):
    """Saves checkpoints of a run's stages in one folder: at boundaries, from time to time, and
    when the run stops.

    Args:
        folder: the result folder.
        resume: whether stages resume from what is there.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self.resume = resume
        self._open: dict[str, Checkpoint] = {}
        self._last_save = time.monotonic()
        self._is_unsaved = False

    def restore(
        self,
        name: str,
        key: Mapping[str, Any],
    ) -> Snapshot | None:
        """Return the snapshot of a stage that a stopped run left, if this run resumes it.

        Raises:
            ResultError: as `Checkpoint.restore` says.
        """
        checkpoint = Checkpoint(self.folder, name, key)
        self._open[name] = checkpoint
        if not self.resume:
            return None
        return checkpoint.restore()

    def stored_key(self, name: str) -> Mapping[str, Any]:
        """Return the key of a checkpoint; an empty one if there is none that can be read."""
        path = self.folder / f"checkpoint.{name}.json"
        info = read_json(path) if path.exists() else None
        key = info.get("key") if isinstance(info, dict) else None
        return key if isinstance(key, dict) else {}

    def exist(self) -> bool:
        """Return whether there is anything to resume from."""
        return any(self.folder.glob("checkpoint.*"))

    def remove(self) -> None:
        """Remove all checkpoints, as the run is complete."""
        for pattern in ("checkpoint.*.json", "checkpoint.*"):
            for path in sorted(self.folder.glob(pattern)):
                path.unlink(missing_ok=True)

    def started(self, stage: RunStage) -> None:
        """Note that the stage has nothing to save yet."""
        self._is_unsaved = False

    def advanced(self, stage: RunStage) -> None:
        """Save at a boundary, or if the last save is long enough ago."""
        self._is_unsaved = stage.snapshot is not None
        is_due = time.monotonic() - self._last_save >= EVERY_S
        if self._is_unsaved and (stage.at_boundary or is_due):
            self._save(stage)

    def stopped(
        self,
        stage: RunStage,
        error: BaseException | None,
    ) -> None:
        """Save what a stop would lose.

        Nothing is saved if the data have to change, which they also have to after any error of
        the data if the stage needs the same data: a run could not resume from it.
        """
        if not isinstance(error, (KeyboardInterrupt, QuantizerError)):
            return
        if isinstance(error, BatchError):
            return
        if isinstance(error, DataError) and stage.needs_same_data:
            return
        if stage.snapshot is None or not stage.done or not self._is_unsaved:
            return
        # Several ranks exchange their batches only now and then.
        snapshot = self._save(stage)
        done = snapshot.state.get("batches", stage.done)
        progress = f"{done} {stage.unit}"
        if stage.unit == "batches":
            progress = counted(done, "batch")
        if stage.total and stage.unit != "batches":
            progress = f"{done} of {stage.total} {stage.unit}"
        text = f"{stage.name} stopped after {progress}; --resume goes on from there"
        stage.events.message(logging.WARNING, text)

    def _save(self, stage: RunStage) -> Snapshot:
        assert stage.snapshot is not None
        snapshot = stage.snapshot()
        self._open[stage.saved_as].save(snapshot)
        self._last_save = time.monotonic()
        return snapshot


def check_checkpoint(checkpoints: Checkpoints, mode: str | None) -> None:
    """Refuse to resume in another mode than the checkpoint's, before anything is computed
    again.

    Raises:
        ResultError: there is a checkpoint, and it is of another mode.
    """
    stored = checkpoints.stored_key("finetune").get("mode")
    if stored and stored != mode:
        option = f"--fast_finetune {mode}" if mode else "no --fast_finetune"
        raise ResultError(
            f"the checkpoint in {checkpoints.folder} was finetuning with {stored}, and this "
            f"run has {option}",
            help=f"add --fast_finetune {stored}, or run without --resume",
        )
