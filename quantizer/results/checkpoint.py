"""What interrupted stages of a run need to go on: files of one folder, consistent after a stop
at any write.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantizer.calibration.events import Events, RunStage, Snapshot
from quantizer.calibration.snapshots import other_run, reporting_damage
from quantizer.errors import DataError, QuantizerError, ResultError
from quantizer.storage.deferred_tensor import DeferredTensor, out_of_memory
from quantizer.storage.files import (
    deferred_tensors,
    read_json,
    sha256,
    write_json,
    write_tensors,
)

EVERY_S = 30.0  # seconds of work that a kill may cost
# 3: which values were out of memory; 4: files by digest, a checksum; 5: histograms of samples
# have weights
FORMAT = 5
AGAIN = "run without --resume"
T = TypeVar("T")


class Checkpoint:
    """`checkpoint.<name>.json`, written last, names the files of tensors, which are called by
    their digest: each is the one that it was, or not there. A save writes only tensors that are
    new.

    A changed tensor must be another object: tensors are told apart by identity. Each comes back
    on its own device, and out of memory if it was.
    """

    def __init__(self, folder: Path, name: str, key: Mapping[str, Any]) -> None:
        self._info, self._key = folder / f"checkpoint.{name}.json", {"format": FORMAT, **key}
        # By id: the tensor, its file's digest, its name there
        self._stored: dict[int, tuple[Tensor, str, str]] = {}

    def save(self, snapshot: Snapshot) -> None:
        """Write it; a stop in the middle leaves the snapshot before."""
        new = {
            name: tensor
            for name, tensor in snapshot.tensors.items()
            if id(tensor) not in self._stored
        }
        if new:
            part = self._info.with_suffix(".part.safetensors")
            digest = write_tensors(part, new)
            os.replace(part, self._path(digest))
            self._stored |= {id(tensor): (tensor, digest, name) for name, tensor in new.items()}
        self._stored = {
            id(tensor): self._stored[id(tensor)] for tensor in snapshot.tensors.values()
        }
        tensors = snapshot.tensors.items()
        places = {
            name: [*self._stored[id(tensor)][1:], *_whereabouts(tensor)]
            for name, tensor in tensors
        }
        content = {"key": self._key, "state": snapshot.state, "tensors": places}
        write_json(self._info, content | {"checksum": _checksum(content)})
        used = {self._path(digest) for _, digest, _ in self._stored.values()}
        for path in {*self._info.parent.glob(f"{self._info.stem}.*.safetensors")} - used:
            path.unlink(missing_ok=True)

    def restore(self) -> Snapshot | None:
        """The last snapshot of a run with the same key; None if there is none.

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
            if _checksum(
                {name: info[name] for name in ("key", "state", "tensors")}
            ) != info.get("checksum"):
                raise ValueError("it was changed after it was written")
            return self._read(info)

    def _read(self, info: Mapping[str, Any]) -> Snapshot:
        parts = {}
        for digest in {digest for digest, *_ in info["tensors"].values()}:
            path = self._path(digest)
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"{digest!r:.80} is no digest")
            if not path.is_file() or sha256(path) != digest:
                raise ResultError(f"{path} is damaged", help=AGAIN)
            parts[digest] = deferred_tensors(path)
        if not isinstance(info["state"], dict):
            raise ValueError("its state is no object")
        tensors: dict[str, Tensor] = {}
        found: dict[tuple[str, str], Tensor] = {}
        for name, (digest, stored, *where) in info["tensors"].items():
            if (digest, stored) not in found:
                tensor = found[digest, stored] = _placed(parts[digest][stored], *where)
                self._stored[id(tensor)] = (tensor, digest, stored)
            tensors[name] = found[digest, stored]
        return Snapshot(tensors, info["state"])

    def _path(self, digest: str) -> Path:
        return self._info.with_suffix(f".{digest}.safetensors")


def _whereabouts(tensor: Tensor) -> tuple[str, bool]:
    """The tensor's device, and whether it is out of memory."""
    return str(tensor.device), isinstance(tensor, DeferredTensor)


def _placed(stored: DeferredTensor, device: str, is_deferred: bool) -> Tensor:
    """A stored tensor where it was; one out of memory is in another file, as the checkpoint
    goes before it does.
    """
    if not isinstance(device, str):
        raise ValueError(f"{device!r} is no device")
    tensor = stored.load().to(torch.device(device))
    return out_of_memory(tensor) if is_deferred else tensor


class Checkpoints(Events):
    """The checkpoints of a run's stages in one folder. Follows the run's events: saves at
    boundaries and when it stops.

    Args:
        folder: the result folder.
        resume: whether stages go on from what is there.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder, self.resume = folder, resume
        self._open: dict[str, Checkpoint] = {}
        self._saved, self._news = time.monotonic(), False

    def restore(self, name: str, key: Mapping[str, Any]) -> Snapshot | None:
        """What a stopped run has left of a stage, if this run is to go on from it.

        Raises:
            ResultError: as `Checkpoint.restore` says.
        """
        self._open[name] = Checkpoint(self.folder, name, key)
        return self._open[name].restore() if self.resume else None

    def stored_key(self, name: str) -> Mapping[str, Any]:
        """What a checkpoint belongs to, as far as it is there and readable."""
        path = self.folder / f"checkpoint.{name}.json"
        info = read_json(path) if path.exists() else None
        key = info.get("key", {}) if isinstance(info, dict) else {}
        return key if isinstance(key, Mapping) else {}

    def exist(self) -> bool:
        """Whether there is anything to go on from."""
        return any(self.folder.glob("checkpoint.*"))

    def remove(self) -> None:
        """The run is complete."""
        for path in sorted(self.folder.glob("checkpoint.*.json")) + sorted(
            self.folder.glob("checkpoint.*")
        ):
            path.unlink(missing_ok=True)

    def started(self, stage: RunStage) -> None:
        self._news = False

    def advanced(self, stage: RunStage) -> None:
        """Save at a boundary, or when the last save is long enough ago."""
        self._news = stage.snapshot is not None
        if self._news and (stage.at_boundary or time.monotonic() - self._saved >= EVERY_S):
            self._save(stage)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Save what a stop would lose. Where the data are the reason, a run with other data
        cannot go on from it.
        """
        resumable = isinstance(error, (KeyboardInterrupt, QuantizerError))
        if stage.snapshot is None or not resumable or not stage.done or not self._news:
            return
        if isinstance(error, DataError) and stage.needs_same_data:
            return
        # Which several ranks exchange now and then only
        done = self._save(stage).state.get("batches", stage.done)
        of_all = f" of {stage.total}" if stage.total and stage.unit != "batches" else ""
        text = (
            f"{stage.name} stopped after {done}{of_all} {stage.unit}; --resume goes on from "
            "there"
        )
        stage.events.message(logging.WARNING, text)

    def _save(self, stage: RunStage) -> Snapshot:
        assert stage.snapshot is not None
        snapshot = stage.snapshot()
        self._open[stage.saved_as].save(snapshot)
        self._saved = time.monotonic()
        return snapshot


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_checkpoint(checkpoints: Checkpoints, mode: str | None) -> None:
    """Refuse to go on in another mode than the checkpoint's, before anything is computed again.

    Raises:
        ResultError: there is a checkpoint, and it is of another mode.
    """
    stored = checkpoints.stored_key("finetune").get("mode")
    if stored and stored != mode:
        given = f"--fast_finetune {mode}" if mode else "no --fast_finetune"
        raise ResultError(
            f"the checkpoint in {checkpoints.folder} was finetuning with {stored}, and this "
            f"run has {given}",
            help=f"add --fast_finetune {stored}, or run without --resume",
        )
