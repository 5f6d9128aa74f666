"""What interrupted stages of a run need to go on: files of one folder, consistent after a stop at any write."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.distributed import Ranks
from quantizer.engine.events import Events, Snapshot, Stage
from quantizer.engine.result_files import deferred_tensors, read_json, sha256, write_json, write_tensors
from quantizer.errors import DataError, QuantizerError, ResultError
from quantizer.numerics.deferred import DeferredTensor, out_of_memory

EVERY_S = 30.0  # seconds of work that a kill may cost
FORMAT = 3  # 2: nested values (`snapshot_of`); 3: which of them were out of memory
AGAIN = "run without --resume"


class Checkpoint:
    """`checkpoint.<name>.json`, written last, names numbered tensor files; a save writes only tensors that are new.

    A changed tensor must be another object: tensors are told apart by identity. Each comes back on its own device, and
    out of memory if it was.
    """

    def __init__(self, folder: Path, name: str, key: Mapping[str, Any]) -> None:
        self._info, self._key = folder / f"checkpoint.{name}.json", {"format": FORMAT, **key}
        self._files: dict[int, str] = {}  # checksum by number
        self._stored: dict[int, tuple[Tensor, int, str]] = {}  # by id: the tensor, its file and its name there
        self._is_ours = False

    def save(self, snapshot: Snapshot) -> None:
        """Write it; a stop in the middle leaves the snapshot before."""
        if not self._is_ours:
            self._info.unlink(missing_ok=True)  # another run's, whose files this one writes over
            self._is_ours = True
        new = {name: tensor for name, tensor in snapshot.tensors.items() if id(tensor) not in self._stored}
        if new:
            number = max(self._files, default=-1) + 1
            self._files[number] = write_tensors(self._path(number), new)
            self._stored |= {id(tensor): (tensor, number, name) for name, tensor in new.items()}
        self._stored = {id(tensor): self._stored[id(tensor)] for tensor in snapshot.tensors.values()}
        used = {number for _, number, _ in self._stored.values()}
        unused, self._files = self._files.keys() - used, {at: self._files[at] for at in sorted(used)}
        tensors = snapshot.tensors.items()
        places = {name: [*self._stored[id(tensor)][1:], *_whereabouts(tensor)] for name, tensor in tensors}
        content = {"key": self._key, "state": snapshot.state, "files": self._files, "tensors": places}
        write_json(self._info, content)
        for number in unused:
            self._path(number).unlink(missing_ok=True)

    def restore(self) -> Snapshot | None:
        """The last snapshot of a run with the same key; None if there is none.

        Raises:
            ResultError: it is damaged, or belongs to another run.
        """
        if not self._info.exists():
            return None
        info = read_json(self._info)
        if not isinstance(info, dict) or not info.keys() >= {"key", "state", "files", "tensors"}:
            raise ResultError(f"{self._info} is damaged", help=AGAIN)
        for name, value in self._key.items():
            if info["key"].get(name) != value:
                raise other_run(f"{name} differs")
        self._files = {int(number): digest for number, digest in info["files"].items()}
        parts = {}
        for number, digest in self._files.items():
            path = self._path(number)
            if not path.is_file() or sha256(path) != digest:
                raise ResultError(f"{path} is damaged", help=AGAIN)
            parts[number] = deferred_tensors(path)
        tensors: dict[str, Tensor] = {}
        found: dict[tuple[int, str], Tensor] = {}
        for name, (number, stored, *where) in info["tensors"].items():
            if (number, stored) not in found:
                tensor = found[number, stored] = _placed(parts[number][stored], *where)
                self._stored[id(tensor)] = (tensor, number, stored)
            tensors[name] = found[number, stored]
        self._is_ours = True
        return Snapshot(tensors, info["state"])

    def _path(self, number: int) -> Path:
        return self._info.with_suffix(f".{number:04}.safetensors")


def _whereabouts(tensor: Tensor) -> tuple[str, bool]:
    """The tensor's device, and whether it is out of memory."""
    return str(tensor.device), isinstance(tensor, DeferredTensor)


def _placed(stored: DeferredTensor, device: str, is_deferred: bool) -> Tensor:
    """A stored tensor where it was; one out of memory is in another file, as the checkpoint goes before it does."""
    tensor = stored.load().to(device)
    return out_of_memory(tensor) if is_deferred else tensor


class Checkpoints(Events):
    """The checkpoints of a run's stages in one folder. Follows the run's events: saves at boundaries and when it stops.

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
        for path in sorted(self.folder.glob("checkpoint.*.json")) + sorted(self.folder.glob("checkpoint.*")):
            path.unlink(missing_ok=True)

    def started(self, stage: Stage) -> None:
        self._news = False

    def advanced(self, stage: Stage) -> None:
        """Save at a boundary, or when the last save is long enough ago."""
        self._news = stage.snapshot is not None
        if self._news and (stage.at_boundary or time.monotonic() - self._saved >= EVERY_S):
            self._save(stage)

    def stopped(self, stage: Stage, error: BaseException | None) -> None:
        """Save what a stop would lose. Where the data are the reason, a run with other data cannot go on from it."""
        resumable = isinstance(error, (KeyboardInterrupt, QuantizerError))
        if stage.snapshot is None or not resumable or not stage.done or not self._news:
            return
        if isinstance(error, DataError) and stage.needs_same_data:
            return
        done = self._save(stage).state.get("batches", stage.done)  # which several ranks exchange now and then only
        of_all = f" of {stage.total}" if stage.total and stage.unit != "batches" else ""
        text = f"{stage.name} stopped after {done}{of_all} {stage.unit}; --resume goes on from there"
        stage.events.message(logging.WARNING, text)

    def _save(self, stage: Stage) -> Snapshot:
        assert stage.snapshot is not None
        snapshot = stage.snapshot()
        self._open[stage.saved_as].save(snapshot)
        self._saved = time.monotonic()
        return snapshot


def snapshot_of(value: Any, data: Mapping[str, Any] | None = None) -> Snapshot:
    """Of nested dicts, tuples and registered dataclasses; `data` is the fingerprint of what it was found on."""
    leaves, structure = pytree.tree_flatten(value)
    tensors = {str(at): leaf for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Snapshot(tensors, {"structure": pytree.treespec_dumps(structure), "values": others, "data": data})


def shared(snapshot: Snapshot, ranks: Ranks, place: str) -> Snapshot:
    """Rank 0's on all ranks, tensor by tensor, so that none has more of them in memory than it keeps there."""
    names, state = ranks.broadcast((list(snapshot.tensors), snapshot.state), place)
    own = snapshot.tensors if ranks.is_first else dict.fromkeys(names, torch.empty(0))
    return Snapshot({name: ranks.broadcast(own[name], f"{place}, {name}") for name in names}, state)


def value_of(snapshot: Snapshot) -> Any:
    """The inverse of `snapshot_of`.

    Raises:
        ResultError: it is of something else.
    """
    try:
        leaves = [snapshot.tensors.get(str(at), value) for at, value in enumerate(snapshot.state["values"])]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(snapshot.state["structure"]))
    except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise ResultError(f"the checkpoint is damaged: {error}", help=AGAIN) from error


def register(*classes: type) -> None:
    """Dataclasses that snapshots may hold."""
    for cls in classes:
        torch.export.register_dataclass(cls, serialized_type_name=f"quantizer.{cls.__name__}")


def other_run(why: str) -> ResultError:
    """The error about a checkpoint that this run cannot go on from."""
    return ResultError(f"the checkpoint belongs to another run: {why}", help=AGAIN)
