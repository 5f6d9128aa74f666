"""Save and restore checkpoints of the stages of a run. A run that is killed at any moment
leaves a consistent checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantizer.calibration import steps
from quantizer.calibration.events import Events, RunStage, Snapshot
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.config.wording import counted
from quantizer.errors import BatchError, CheckpointError, DataError, QuantizerError, ResultError
from quantizer.option_words import Sentence, marked_text
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

SAVE_INTERVAL_S = 30.0
"""Seconds between two checkpoints, which is the work that a kill may cost."""
_PREFIX = "checkpoint."
"""What the names of all files of checkpoints begin with."""
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


class Checkpoints(Events):
    """Saves checkpoints of the stages of a run: at their boundaries, every `SAVE_INTERVAL_S`
    seconds, and when the run stops with an error.

    Args:
        folder: the result folder.
        resume: whether stages continue from the checkpoints in the folder.

    Attributes:
        how_to_resume: the end of the message of a run that stops.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self.resume = resume
        self.how_to_resume: str = Sentence("<--resume> continues from there")
        self._keys: dict[str, Mapping[str, Any]] = {}
        self._open: dict[str, Checkpoint] = {}
        self._last_save = time.monotonic()
        self._is_unsaved = False

    def restore(self, name: str, key: Mapping[str, Any]) -> Snapshot | None:
        """Return the snapshot of a stage from which this run continues, or None if it begins
        anew.

        Raises:
            ResultError: the checkpoint is damaged, or belongs to another run.
        """
        self._keys[name] = key
        self._open.pop(name, None)
        if not self.resume:
            return None
        return self._of_stage(name).restore()

    def stored_key(self, name: str) -> Mapping[str, Any]:
        """Return the key of a checkpoint, or an empty one if there is no readable
        checkpoint.
        """
        path = self.folder / f"checkpoint.{name}.json"
        info = read_json(path) if path.exists() else None
        key = info.get("key") if isinstance(info, dict) else None
        return key if isinstance(key, dict) else {}

    def exist(self) -> bool:
        """Return whether there is anything to resume from."""
        return bool(listed_files(self.folder, _PREFIX))

    def remove(self) -> None:
        """Remove all checkpoints of a complete run."""
        # The JSON files go first: they refer to the others
        paths = listed_files(self.folder, _PREFIX)
        for path in sorted(paths, key=lambda path: path.suffix != ".json"):
            remove_file(path)

    def started(self, stage: RunStage) -> None:
        """Note that the stage has nothing to save yet."""
        self._is_unsaved = False

    def advanced(self, stage: RunStage) -> None:
        """Save at a boundary, or if the last save is long enough ago."""
        self._is_unsaved = stage.snapshot is not None
        is_due = time.monotonic() - self._last_save >= SAVE_INTERVAL_S
        if self._is_unsaved and (stage.at_boundary or is_due):
            self._save(stage)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Save the work since the last checkpoint, if the run stops with an error that a later
        run may not have.

        Nothing is saved if the data have to change, because a run could not resume from it.
        After any error of the data they have to change if the stage needs the same data.
        """
        if not isinstance(error, (KeyboardInterrupt, QuantizerError)):
            return
        if isinstance(error, BatchError):
            return
        if isinstance(error, DataError) and stage.needs_same_data:
            return
        if stage.snapshot is None or not stage.done or not self._is_unsaved:
            return
        # With several ranks, the snapshot has fewer batches: those until the last exchange
        snapshot = self._save(stage)
        done = snapshot.state.get("batches", stage.done)
        progress = f"{done} of {stage.total} {stage.unit}"
        if stage.unit == "batches":
            progress = counted(done, "batch")
        how_to_resume = marked_text(self.how_to_resume)
        text = Sentence(f"{stage.name} stopped after {progress}; {how_to_resume}")
        stage.events.message(logging.WARNING, text)

    def _of_stage(self, name: str) -> Checkpoint:
        """Return the open checkpoint of a stage."""
        if name not in self._open:
            self._open[name] = Checkpoint(self.folder, name, self._keys[name])
        return self._open[name]

    def _save(self, stage: RunStage) -> Snapshot:
        assert stage.snapshot is not None
        snapshot = stage.snapshot()
        self._of_stage(stage.saved_as).save(snapshot)
        self._last_save = time.monotonic()
        return snapshot


def calibrated(request: CalibrationRequest, *, must_resume: bool) -> CalibrationState:
    """Calibrate from where a stopped run has left off, or from the beginning.

    Args:
        request: with the checkpoints of its folder, or without any.
        must_resume: whether a checkpoint of another run is an error. If not, it is replaced.

    Raises:
        QuantizerError: the calibration failed.
    """
    checkpoints = request.checkpoints
    if must_resume or not isinstance(checkpoints, Checkpoints) or not request.ranks.is_alone:
        return steps.run_calibration(request)
    checkpoints.resume = checkpoints.exist()
    try:
        return steps.run_calibration(request)
    except CheckpointError as error:
        checkpoints.resume = False
        text = Sentence(f"{error.message.marked}, so calibration begins anew")
        request.events.message(logging.INFO, text)
        return steps.run_calibration(request)


def check_checkpoint(checkpoints: Checkpoints, mode: str | None) -> None:
    """Check that a run resumes with the finetuning mode of its checkpoint. This is called
    before anything is computed.

    Args:
        checkpoints: of the run.
        mode: of `--fast_finetune`, or None without it.

    Raises:
        ResultError: the checkpoint has another mode.
    """
    stored = checkpoints.stored_key("finetune").get("mode")
    if stored and stored != mode:
        option = f"<--fast_finetune {mode}>" if mode else "no <--fast_finetune>"
        raise ResultError(
            f"the checkpoint in {checkpoints.folder} was finetuning with {stored}, and this "
            f"run has {option}",
            help=f"add <--fast_finetune {stored}>, or run without <--resume>",
        )
