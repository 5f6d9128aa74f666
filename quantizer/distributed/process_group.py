"""Join several processes with torch.distributed. Exchanges notice if another rank has stopped
or is lost.
"""

import contextlib
import io
import json
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from quantizer.distributed import Ranks
from quantizer.errors import DataError, QuantizerError, RankError, first_line
from quantizer.option_words import Sentence
from quantizer.storage.deferred_tensor import bytes_of

_T = TypeVar("_T")
_MAX_SUMMED = 1 << 24
"""The most elements that are summed at once. Larger tensors are summed part by part."""
# Lost ranks are found by their counters instead: a rank may compute for any time
_COLLECTIVE_TIMEOUT = timedelta(days=30)
_POLL_S = 0.0005
"""Seconds between two looks at a collective that is not complete."""
_LOST_HELP = (
    "see what it printed, and whether its machine had enough memory; <--resume> continues from "
    "the last checkpoint"
)


class ProcessGroup(Ranks):
    """The processes that torchrun has started; see `Ranks`.

    A thread of each rank increments its counter in the group's store and reads the counters of
    the others. A rank whose counter has not changed for `timeout` seconds is lost. So a rank
    may compute for any time, but one that is stopped or disconnected does not block the others.
    Ranks also report their errors through the store.

    Args:
        url: where ranks meet: "env://" for torchrun, or "file://…?rank=0&world_size=2".
        backend: of torch.distributed.
        timeout: seconds to wait for other ranks to join, or to show that they are running.
        device: of this rank, for tensors that other ranks have on a GPU.

    Raises:
        RankError: not all ranks have joined within the timeout.
    """

    def __init__(self, url: str, backend: str, timeout: float, device: str = "cpu") -> None:
        self._timeout = timeout
        self._device = device
        self._beat_s = min(1.0, timeout / 10)
        limit = timedelta(seconds=timeout)
        try:
            store, self.rank, self.world_size = next(rendezvous(url, timeout=limit))
            store.set_timeout(limit)
            self._store = PrefixStore("quantizer", store)
            self._wait_for_others()
            dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=_COLLECTIVE_TIMEOUT,
            )
        except (RuntimeError, ValueError) as error:
            reason = first_line(error)
            raise RankError(
                f"the ranks did not find each other within {timeout:g} s: {reason}"
            ) from error
        self._own_error: BaseException | None = None
        self._other_error: QuantizerError | None = None
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._counters = dict.fromkeys(others, 0)
        self._changed_at = dict.fromkeys(others, time.monotonic())
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._other_error is not None:
            raise self._other_error

    def gather(self, value: _T, place: str) -> list[_T]:
        """Return on each rank the values of all ranks; see `Ranks`."""
        content = pickled((place, value))
        size = len(content)
        # all_gather needs tensors of one size: sizes are exchanged first, and contents are
        # padded
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        self._run(dist.all_gather, sizes, torch.tensor([size]))
        longest = max(map(int, sizes))
        rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = torch.nn.functional.pad(content, (0, longest - size))
        self._run(dist.all_gather, rows, padded)
        places: list[str] = []
        values: list[_T] = []
        for row, length in zip(rows, sizes, strict=True):
            other_place, other_value = unpickled(row[: int(length)], self._device)
            places.append(other_place)
            values.append(other_value)
        _require_same_place(places)
        return values

    def broadcast(self, value: _T, place: str, source: int = 0) -> _T:
        """Return on each rank the value of rank `source`; see `Ranks`."""
        is_source = self.rank == source
        content = torch.empty(0, dtype=torch.uint8)
        if is_source:
            content = pickled(value)
        length = self.gather(len(content), place)[source]
        if not is_source:
            content = torch.empty(length, dtype=torch.uint8)
        self._run(dist.broadcast, content, source)
        if not is_source:
            value = unpickled(content, self._device)
        return value

    def sum(self, tensor: Tensor, place: str, to: int | None = None) -> Tensor:
        """Return the sum over ranks; see `Ranks`.

        Gathering and adding here fixes the order of additions, which all_reduce does not.
        """
        # Nothing is gathered, but the ranks compare their places and shapes
        self.gather((), f"{place}, {tuple(tensor.shape)}")
        is_receiver = to in (None, self.rank)
        parts: list[Tensor] = []
        flat = tensor.contiguous().view(-1)
        for part in torch.split(flat, _MAX_SUMMED):
            rows = None
            if is_receiver:
                rows = [torch.empty_like(part) for _ in range(self.world_size)]
            if to is None:
                self._run(dist.all_gather, rows, part)
            else:
                self._run(dist.gather, part, rows, to)
            if rows is not None:
                total = rows[0].double()
                for row in rows[1:]:
                    total += row
                parts.append(total.to(tensor.dtype))
        if not is_receiver:
            return tensor.new_empty(0)
        return torch.cat(parts).view(tensor.shape)

    def fail(self, error: BaseException) -> None:
        """Report the error that ends this rank to the others. Only the first report counts."""
        self._own_error = error
        if error is self._other_error or isinstance(error, RankError | KeyboardInterrupt):
            return
        report = {
            "rank": self.rank,
            "message": f"rank {self.rank}: {type(error).__name__}: {error}",
            "help": None,
            "code": QuantizerError.exit_code,
        }
        if isinstance(error, QuantizerError):
            # Ranks have different data, so errors of data name the rank. All ranks have the
            # other errors alike, and rank 0 prints its own
            if not self.is_first or isinstance(error, DataError):
                error.message = Sentence(f"rank {self.rank}: {error.message.marked}")
            report["message"] = error.message
            report["help"] = error.help
            report["code"] = error.exit_code
        # The store raises RuntimeError if the other ranks have ended
        with contextlib.suppress(RuntimeError):
            if self._store.add("errors", 1) == 1:
                self._store.set("error", json.dumps(report))

    def leave(self) -> None:
        """End the run on this rank. The others wait until rank 0 ends: torchrun kills all ranks
        when the first one fails, and rank 0 must be able to print its messages.
        """
        with contextlib.suppress(RuntimeError):
            if self.is_first:
                self._store.add("left", 1)
            elif not isinstance(self._own_error, KeyboardInterrupt):
                while not self._store.add("left", 0) and self._lost_rank() != 0:
                    time.sleep(0.05)
        self._is_over.set()
        self._thread.join()
        # After an error, exchanges may be pending that cannot be cancelled
        if self._own_error is None:
            dist.destroy_process_group()

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        """Run a collective until it is complete, another rank has stopped, or Ctrl-C."""
        try:
            work = collective(*arguments, async_op=True)
            while not work.is_completed():
                self.check()
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            self._raise_disconnected(error)

    def _raise_disconnected(self, error: RuntimeError) -> NoReturn:
        """Raise the error behind a broken connection, once the counters show which ranks have
        stopped.
        """
        time.sleep(2 * self._beat_s)
        counters = dict(self._counters)
        time.sleep(3 * self._beat_s)
        self.check()
        silent = [
            str(rank) for rank, count in counters.items() if self._counters[rank] == count
        ]
        who = "another rank has"
        if len(silent) == 1:
            who = f"rank {silent[0]} has"
        elif silent:
            who = f"ranks {' and '.join(silent)} have"
        message = f"{who} ended or cannot be reached: {first_line(error)}"
        raise RankError(message, help=_LOST_HELP) from error

    def _watch(self) -> None:
        """Show that this rank is running, and watch the others, until it leaves."""
        while not self._is_over.wait(self._beat_s):
            # The store raises RuntimeError if its process has ended. Then no counter changes,
            # and its rank will count as lost
            with contextlib.suppress(RuntimeError):
                self._exchange_counters()
                if self._other_error is None and self._store.check(["error"]):
                    report = json.loads(self._store.get("error"))
                    if report["rank"] != self.rank:
                        self._other_error = _reported_error(report)
            rank = self._lost_rank()
            if rank is not None and self._other_error is None:
                self._other_error = RankError(
                    f"rank {rank} has shown no sign of life for {self._timeout:g} s",
                    help=_LOST_HELP,
                )

    def _exchange_counters(self) -> None:
        """Add 1 to the counter of this rank, and read those of the others."""
        self._store.add(f"beat{self.rank}", 1)
        now = time.monotonic()
        for rank, count in self._counters.items():
            new_count = self._store.add(f"beat{rank}", 0)
            if new_count != count:
                self._counters[rank] = new_count
                self._changed_at[rank] = now

    def _lost_rank(self) -> int | None:
        """Return a rank whose counter has not changed for `timeout` seconds, or None."""
        latest = time.monotonic() - self._timeout
        for rank, changed_at in self._changed_at.items():
            if changed_at < latest:
                return rank
        return None

    def _wait_for_others(self) -> None:
        """Wait until all ranks have joined.

        Raises:
            RuntimeError: not all have joined within the timeout.
        """
        deadline = time.monotonic() + self._timeout
        joined = self._store.add("joined", 1)
        while joined < self.world_size:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{joined} of {self.world_size} have joined")
            time.sleep(0.005)
            joined = self._store.add("joined", 0)


def _require_same_place(places: list[str]) -> None:
    """Raise `RankError` if ranks are at different exchanges: they have read other data, or have
    another config or version.
    """
    for rank, place in enumerate(places):
        if place != places[0]:
            raise RankError(
                f"the ranks are at different steps: rank 0 at {places[0]}, rank {rank} at "
                f"{place}",
                help="give all ranks the same model, config and data, in the same order; "
                "quantizer distributes the batches",
            )


def _reported_error(report: dict[str, Any]) -> QuantizerError:
    """Return the error that another rank has reported."""
    classes = {kind.exit_code: kind for kind in QuantizerError.__subclasses__()}
    code = report["code"]
    help_ = report["help"]
    if help_ is not None:
        help_ = help_.split("\n")
    error = classes.get(code, QuantizerError)(report["message"], help=help_)
    error.exit_code = code
    return error


def pickled(value: Any) -> Tensor:
    """Return a value as a tensor of bytes."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpickled(content: Tensor, device: str) -> Any:
    """Return the value in a tensor of bytes, with tensors of a GPU on `device`."""
    unpickler = _Unpickler(bytes(bytes_of(content)), device)
    return unpickler.load()


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its dtype, shape and bytes, and whether it is on a GPU. Tensors of
    subclasses pickle themselves.
    """

    def persistent_id(
        self, value: Any
    ) -> tuple[torch.dtype, tuple[int, ...], bytes, bool] | None:
        """Return what is pickled instead of a tensor, or None for other objects."""
        if type(value) not in (Tensor, nn.Parameter):
            return None
        is_on_gpu = value.device.type != "cpu"
        return value.dtype, tuple(value.shape), bytes(bytes_of(value)), is_on_gpu


class _Unpickler(pickle.Unpickler):
    """Rebuilds tensors from bytes."""

    def __init__(self, content: bytes, device: str) -> None:
        super().__init__(io.BytesIO(content))
        self._device = device

    def persistent_load(self, stored: Any) -> Tensor:
        """Return the tensor of which `persistent_id` has returned `stored`."""
        dtype, shape, content, is_on_gpu = stored
        tensor = torch.empty(shape, dtype=dtype)
        if content:
            octets = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            tensor = octets.view(dtype).view(shape)
        if is_on_gpu:
            return tensor.to(self._device)
        return tensor
