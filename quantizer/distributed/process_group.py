"""Several processes joined by torch.distributed: exchanges that notice when another rank has
stopped or is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from quantizer.distributed.ranks import Ranks
from quantizer.errors import DataError, QuantizerError, RankError

T = TypeVar("T")
PART = 1 << 24  # elements summed at once
NEVER = timedelta(days=30)  # a collective waits as long as the other ranks show signs of life
POLL_S = 0.0005
HELP = (
    "see what it printed, and whether its machine had enough memory; --resume goes on from "
    "the last checkpoint"
)


class ProcessGroup(Ranks):
    """The ranks that torchrun has started, joined; see `Ranks`.

    A thread of each rank counts up a number in the group's store and reads those of the others:
    a rank whose number stands still for `timeout` seconds is lost. So a rank may compute as
    long as it likes, and one that is stopped or cut off does not keep the others waiting.
    Through the store a rank also tells the others of its error.

    Args:
        url: where ranks meet: "env://", as torchrun says, or "file://…?rank=0&world_size=2".
        backend: of torch.distributed.
        timeout: seconds, to join and without a sign of life.
        device: where this rank keeps what others have on their GPUs.

    Raises:
        RankError: not all ranks have come within the timeout.
    """

    def __init__(self, url: str, backend: str, timeout: float, device: str = "cpu") -> None:
        self.timeout, self._device, self._beat_s = timeout, device, min(1.0, timeout / 10)
        limit = timedelta(seconds=timeout)
        try:
            store, self.rank, self.world_size = next(rendezvous(url, timeout=limit))
            store.set_timeout(limit)
            self._store = PrefixStore("quantizer", store)
            shared = PrefixStore("group", store)
            self._meet()
            dist.init_process_group(
                backend, store=shared, rank=self.rank, world_size=self.world_size, timeout=NEVER
            )
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"the ranks did not find each other within {timeout:g} s: {_line(error)}"
            ) from error
        self.failed: BaseException | None = None
        self._stopped = threading.Event()
        self._error: QuantizerError | None = None
        self._seen = {rank: (0, time.monotonic()) for rank in range(self.world_size)}
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def gather(self, value: T, place: str) -> list[T]:
        content = _packed((place, value))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._run(dist.all_gather, sizes, torch.tensor([len(content)]))
        longest = max(int(size) for size in sizes)
        padded = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        self._run(
            dist.all_gather,
            padded,
            torch.nn.functional.pad(content, (0, longest - len(content))),
        )
        found = [
            self._unpacked(row, int(size)) for row, size in zip(padded, sizes, strict=True)
        ]
        self._compare([there for there, _ in found])
        return [given for _, given in found]

    def broadcast(self, value: T, place: str, source: int = 0) -> T:
        content = _packed(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        length = self.gather(len(content), place)[source]
        if self.rank != source:
            content = torch.empty(length, dtype=torch.uint8)
        self._run(dist.broadcast, content, source)
        found: T = value if self.rank == source else self._unpacked(content, length)
        return found

    def sum(self, tensor: Tensor, place: str, to: int | None = None) -> Tensor:
        self.gather((), f"{place}, {tuple(tensor.shape)}")
        flat = tensor.contiguous().view(-1)
        mine, parts = to in (None, self.rank), []
        for start in range(0, len(flat), PART):
            part = flat[start : start + PART]
            rows = [torch.empty_like(part) for _ in range(self.world_size)] if mine else None
            if to is None:
                self._run(dist.all_gather, rows, part)
            else:
                self._run(dist.gather, part, rows, to)
            if rows is not None:
                total = rows[0].double()
                for row in rows[1:]:
                    total += row
                parts.append(total.to(tensor.dtype))
        return torch.cat(parts).view(tensor.shape) if mine else tensor.new_empty(0)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an error that this one stops with; the first that is told
        counts.
        """
        self.failed = error
        if error is self._error or isinstance(error, RankError | KeyboardInterrupt):
            return
        said = {
            "rank": self.rank,
            "message": f"rank {self.rank}: {type(error).__name__}: {error}",
            "help": None,
        }
        said["code"] = QuantizerError.exit_code
        if isinstance(error, QuantizerError):
            # Of other errors of rank 0 there is nothing to tell
            if not self.is_first or isinstance(error, DataError):
                error.message = f"rank {self.rank}: {error.message}"
            said |= {"message": error.message, "help": error.help, "code": error.exit_code}
        with contextlib.suppress(RuntimeError):  # there is nobody any more
            if self._store.add("errors", 1) == 1:
                self._store.set("error", json.dumps(said))

    def leave(self) -> None:
        """The run is over: rank 0 says so once all is printed, and the others end after it, as
        torchrun ends all ranks when one has failed.
        """
        if self.is_first:
            with contextlib.suppress(RuntimeError):
                self._store.add("left", 1)
        elif not isinstance(self.failed, KeyboardInterrupt):
            with contextlib.suppress(RuntimeError):
                while not self._store.add("left", 0) and self._lost() != 0:
                    time.sleep(0.05)
        self._stopped.set()
        self._thread.join()
        if self.failed is None:  # else exchanges may be pending, which cannot be broken off
            dist.destroy_process_group()

    def _unpacked(self, content: Tensor, length: int) -> Any:
        # Without numpy
        return _Unpickler(ctypes.string_at(content.data_ptr(), length), self._device).load()

    def _run(self, collective: Callable[..., Any], *given: Any) -> None:
        """A collective that ends when another rank has stopped, and on Ctrl-C."""
        try:
            work = collective(*given, async_op=True)
            while not work.is_completed():
                self.check()
                time.sleep(POLL_S)
            work.wait()
        except RuntimeError as error:
            self._explain(error)

    def _explain(self, error: RuntimeError) -> None:
        """Raise what is behind a broken connection: soon it shows whose number stands still."""
        time.sleep(2 * self._beat_s)
        began = {rank: count for rank, (count, _) in self._seen.items()}
        time.sleep(3 * self._beat_s)
        self.check()
        silent = [
            str(rank)
            for rank, count in began.items()
            if rank != self.rank and self._seen[rank][0] == count
        ]
        who = f"rank {' and '.join(silent)} has" if silent else "another rank has"
        raise RankError(
            f"{who} ended or cannot be reached: {_line(error)}", help=HELP
        ) from error

    def _watch(self) -> None:
        """Show that this rank lives, and look after the others, until it leaves."""
        while not self._stopped.wait(self._beat_s):
            try:
                self._store.add(f"beat{self.rank}", 1)
                now = time.monotonic()
                for rank in self._seen:
                    count = self._store.add(f"beat{rank}", 0)
                    if count != self._seen[rank][0]:
                        self._seen[rank] = (count, now)
                if self._store.check(["error"]) and self._error is None:
                    self._error = _error_of(json.loads(self._store.get("error")), self.rank)
            except RuntimeError:  # whoever keeps the store is gone: its number stands still
                pass
            lost = self._lost()
            if lost is not None and self._error is None:
                said = f"rank {lost} has shown no sign of life for {self.timeout:g} s"
                self._error = RankError(said, help=HELP)

    def _lost(self) -> int | None:
        late = time.monotonic() - self.timeout
        return next(
            (
                rank
                for rank, (_, when) in self._seen.items()
                if rank != self.rank and when < late
            ),
            None,
        )

    def _compare(self, places: list[str]) -> None:
        """Ranks that are not at the same exchange have read other data, or have another config
        or version.
        """
        other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
        if other is not None:
            raise RankError(
                f"the ranks do not do the same: rank 0 is at {places[0]}, rank {other} at "
                f"{places[other]}",
                help="give all ranks the same model, config and data, in the same order; "
                "quantizer deals out batches",
            )

    def _meet(self) -> None:
        until = time.monotonic() + self.timeout
        here = self._store.add("joined", 1)
        while here < self.world_size:
            if time.monotonic() > until:
                raise RuntimeError(f"{here} of {self.world_size} have come")
            time.sleep(0.005)
            here = self._store.add("joined", 0)


def _error_of(said: dict[str, Any], rank: int) -> QuantizerError | None:
    """The error that a rank told of; None if it was this one."""
    if said["rank"] == rank:
        return None
    kinds = {kind.exit_code: kind for kind in QuantizerError.__subclasses__()}
    error = kinds.get(said["code"], QuantizerError)(
        said["message"], help=said["help"] and said["help"].split("\n")
    )
    error.exit_code = said["code"]
    return error


def _packed(value: Any) -> Tensor:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


class _Pickler(pickle.Pickler):
    """Sends tensors as their bytes, and says which are on a GPU; torch's own way is slow for
    small ones. Those of another class say themselves how they are sent.
    """

    def persistent_id(
        self, value: Any
    ) -> tuple[torch.dtype, tuple[int, ...], bytes, bool] | None:
        if type(value) not in (Tensor, nn.Parameter):
            return None
        own = value.detach().cpu().contiguous()
        # Without numpy
        content = ctypes.string_at(own.data_ptr(), own.numel() * own.element_size())
        return own.dtype, tuple(own.shape), content, value.device.type != "cpu"


class _Unpickler(pickle.Unpickler):
    """Makes tensors of bytes; those of a GPU go to the device of this rank."""

    def __init__(self, content: bytes, device: str) -> None:
        super().__init__(io.BytesIO(content))
        self._device = device

    def persistent_load(self, sent: Any) -> Tensor:
        dtype, shape, content, on_gpu = sent
        if not content:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = (
                torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(shape)
            )
        return tensor.to(self._device) if on_gpu else tensor


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
