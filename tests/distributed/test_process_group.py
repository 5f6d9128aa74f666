"""Exchanges between ranks: values in the order of ranks, sums in float64, NaN kept, and ranks
that diverge told.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantizer.calibration.events import Snapshot
from quantizer.calibration.snapshots import share_snapshot
from quantizer.distributed import ALONE, Ranks
from quantizer.distributed.process_group import ProcessGroup
from quantizer.errors import QuantizerError, RankError
from quantizer.storage.deferred_tensor import DeferredTensor, move_to_disk

VALUES = [[1.0, 1e8, float("nan")], [2.0, 1.0, 0.0], [4.0, -1e8, 0.0]]


def on_ranks(count: int, folder: Path, work: Callable[[ProcessGroup], Any]) -> list[Any]:
    """What `work` returns on each rank, as JSON has it; or the error."""
    pids = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            found: Any = "nothing"
            try:
                torch.set_num_threads(1)
                group = ProcessGroup(
                    f"file://{folder}/meeting?rank={rank}&world_size={count}", "gloo", 20
                )
                try:
                    found = work(group)
                except QuantizerError as error:
                    group.fail(error)
                    found = error.message
                group.leave()
            finally:
                (folder / str(rank)).write_text(json.dumps(found))
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(count)]


def test_values_come_in_the_order_of_ranks_whatever_they_are(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        tensors = [
            torch.full((2, 0), 1),
            torch.tensor(group.rank),
            torch.ones(3, dtype=torch.bfloat16) * group.rank,
        ]
        rows = group.gather({"rank": group.rank, "tensors": tensors}, "here")
        sizes = [[list(each.shape) for each in row["tensors"]] for row in rows]
        kinds = {str(row["tensors"][2].dtype) for row in rows}
        sent = group.broadcast("x" * 1000 if group.rank == 1 else None, "there", 1)
        order = [
            [row["rank"], int(row["tensors"][1]), row["tensors"][2].tolist()] for row in rows
        ]
        return [order, sizes, sorted(kinds), sent]

    found = on_ranks(3, tmp_path, work)
    order = [[rank, rank, [float(rank)] * 3] for rank in range(3)]
    assert found == [[order, [[[2, 0], [], [3]]] * 3, ["torch.bfloat16"], "x" * 1000]] * 3


def test_what_is_out_of_memory_on_one_rank_is_so_on_all(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        own = Snapshot({"a": move_to_disk(torch.arange(3)), "b": torch.ones(1)}, {"done": 2})
        found = share_snapshot(own if group.is_first else Snapshot({}, {}), group, "here")
        rows = {
            name: [isinstance(each, DeferredTensor), each.tolist()]
            for name, each in found.tensors.items()
        }
        return [rows, found.state]

    assert (
        on_ranks(2, tmp_path, work)
        == [[{"a": [True, [0, 1, 2]], "b": [False, [1.0]]}, {"done": 2}]] * 2
    )


def test_sums_are_of_float64_in_the_order_of_ranks_and_keep_nan(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        own = torch.tensor(VALUES[group.rank])
        every, first = group.sum(own, "a sum"), group.sum(own, "another", to=0)
        return [repr(every.tolist()), str(every.dtype), first.numel()]

    total = repr([7.0, 1.0, float("nan")])  # float32 would lose the 1 beside 1e8
    assert on_ranks(3, tmp_path, work) == [[total, "torch.float32", size] for size in (3, 0, 0)]


def test_ranks_at_different_places_are_told(tmp_path: Path) -> None:
    found = on_ranks(2, tmp_path, lambda group: group.gather(0, f"step {group.rank}"))
    assert found == ["the ranks are at different steps: rank 0 at step 0, rank 1 at step 1"] * 2


def test_an_error_of_one_rank_reaches_those_that_wait(tmp_path: Path) -> None:
    def work(group: ProcessGroup) -> Any:
        if group.rank == 1:
            raise QuantizerError("no more")
        return group.gather(0, "a place")

    assert on_ranks(3, tmp_path, work) == ["rank 1: no more"] * 3


def test_ranks_that_do_not_meet_are_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=r"did not find each other within 0\.2 s: 1 of 2 have joined"
    ):
        ProcessGroup(f"file://{tmp_path}/meeting?rank=0&world_size=2", "gloo", 0.2)


def test_work_is_shared_out_by_cost() -> None:
    class Three(Ranks):
        world_size = 3

    assert Three().by_cost([5, 1, 4, 3, 2]) == [0, 1, 1, 2, 2]
    assert ALONE.by_cost([5, 1]) == [0, 0]
