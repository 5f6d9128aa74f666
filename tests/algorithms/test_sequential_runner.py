"""Running node by node gives every layer's values as the network does, however little memory
there is.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deployments import deployment
from support.extended import extended_except
from support.toys import TOYS, built, leaves_equal, traced
from torch import nn

from quantizer.errors import DataError
from quantizer.graph.tracing.trace import trace
from quantizer.layerwise.sequential_runner import ActivationStore, SequentialRunner
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch
from quantizer.storage.deferred_tensor import DeferredTensor, loaded


def batches(name: str) -> list[Batch]:
    """Two batches of different size, where the toy takes them."""
    return [
        Batch(*built(name).call(size), None, None)
        for size in ((2, 3) if built(name).batched else (2, 2))
    ]


def walked(network: Network, data: list[Batch], budget: int | None) -> dict[str, list[Any]]:
    """Copies of each node's values, made when the runner hands them on."""
    runner, found = SequentialRunner(network, data, ActivationStore(budget)), {}
    with torch.no_grad():
        for node in network.graph.nodes:
            kept = runner.store(runner.compute(node))
            found[node.name] = [
                value.clone() if isinstance(value, torch.Tensor) else value for value in kept
            ]
            runner.release(kept)
    return found


USUAL = (
    "residual containers several_outputs in_place_view view_read_later nested_inputs constants "
    "recurrent masked two_batches"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(TOYS, *USUAL.split()))
def test_node_by_node_makes_the_values_of_a_pass(name: str) -> None:
    network = deployment(name, 2).network() if name != "constants" else Network(traced(name))
    data = batches(name)
    by_budget = {budget: walked(network, data, budget) for budget in (0, 1000, None)}
    for index, batch in enumerate(data):
        with torch.no_grad():
            for node, value in network.start(batch.args, batch.kwargs).steps():
                for budget, found in by_budget.items():
                    assert leaves_equal(found[node][index], value), (node, budget)


def test_a_batch_that_does_not_fit_is_named() -> None:
    network, data = Network(traced("residual")), batches("residual")
    data[1] = Batch((data[1].args[0].double(), *data[1].args[1:]), data[1].kwargs, None, None)
    with pytest.raises(DataError, match=r"^batch 1: .*: expected \["):
        SequentialRunner(network, data)


def test_the_users_batches_stay_as_they_are() -> None:
    given, data = batches("residual"), batches("residual")
    walked(deployment("residual", 2).network(), given, None)
    assert all(leaves_equal(a.args, b.args) for a, b in zip(given, data, strict=True))


def test_what_is_kept_may_be_changed_before_the_next_layer_reads_it() -> None:
    network, data = Network(traced("residual")), batches("residual")
    runner = SequentialRunner(network, data, ActivationStore(0))
    first, second = network.graph.nodes[:2]
    kept = runner.store(runner.compute(first))
    runner.change(kept, lambda value: value.zero_())
    runner.release(kept)
    assert not any(call["input"].any() for call in runner.calls(second))


class Tokens(nn.Module):
    """Of token ids, or of floats, what a linear layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.embed(ids))
        return y


def of_ids(*shapes: tuple[int, int]) -> list[Batch]:
    """A batch of ids of each shape; id 7 is in none."""
    draw = torch.Generator().manual_seed(0)
    return [Batch.of(torch.randint(8, 50, shape, generator=draw)) for shape in shapes]


def joined(
    model: nn.Module, data: list[Batch], *, together: bool = True
) -> tuple[SequentialRunner, str]:
    """A runner, and the last layer of its network."""
    network = Network(trace(model.eval(), data[0].args))
    return SequentialRunner(network, data, together=together), network.graph.nodes[-1].name


@pytest.mark.parametrize(
    ("shapes", "sizes"),
    [
        ([(1, 256)] * 6, [4, 2]),
        ([(3, 200), (2, 200), (1, 200)], [5, 1]),
        ([(1, 8), (1, 8), (1, 9), (1, 8)], [2, 1, 1]),
        ([(1, 2000), (1, 2000)], [1, 1]),
    ],
    ids=["1024 ids", "samples", "lengths", "long ones"],
)
def test_batches_of_few_token_ids_run_as_one(
    shapes: list[tuple[int, int]], sizes: list[int]
) -> None:
    torch.manual_seed(0)
    model, data = Tokens(), of_ids(*shapes)
    runner, last = joined(model, data)
    runner.advance(last)
    values = runner.value(last)
    assert [len(value) for value in values] == sizes
    alone, _ = joined(model, data, together=False)
    alone.advance(last)
    assert [len(value) for value in alone.value(last)] == [shape[0] for shape in shapes]
    rows = ([row for value in each for row in value] for each in (values, alone.value(last)))
    for ours, theirs in zip(*rows, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_batches_of_floats_never_do() -> None:
    data = [Batch.of(torch.ones(1, 8))] * 3
    runner, last = joined(nn.Sequential(nn.Linear(8, 4)), data)
    runner.advance(last)
    assert len(runner.value(last)) == 3


def test_an_error_names_the_batches_that_run_as_one() -> None:
    """By what a watcher sees, and where the network cannot run."""
    model, data = Tokens(), of_ids(*[(1, 16)] * 5)
    model.embed.weight.data[7] = math.nan
    data[3].args[0][0, 5] = 7
    runner, last = joined(model, data)

    def refuse(value: torch.Tensor) -> None:
        if value.isnan().any():
            raise DataError("NaN in it")

    with pytest.raises(DataError, match=r"^batches 0 to 4: NaN in it"):
        runner.advance(last, {last: refuse})
    data[4].args[0][0, 0] = 50
    runner, last = joined(model, data)
    with pytest.raises(DataError, match=r"^batches 0 to 4: .*cannot run on this input"):
        runner.advance(last)


def test_values_beyond_the_budget_go_to_files_that_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store, ones = ActivationStore(100), torch.ones(20)
    assert store.keep(ones) is ones
    spilled = store.keep(ones)
    assert isinstance(spilled, DeferredTensor)
    assert torch.equal(spilled, ones)
    assert not list(tmp_path.iterdir())
    store.free(spilled)
    assert store.keep(ones) is not ones, "freeing what was in a file makes no room in memory"
    store.free(ones)
    assert store.keep(ones) is ones, "freed memory is there again"


def test_a_value_in_a_file_is_written_once() -> None:
    store = ActivationStore(0)
    spilled = store.keep(torch.ones(4, 5))
    assert store.keep(spilled) is spilled


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
        torch.arange(6, dtype=torch.int64),
        torch.tensor([True, False]),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor(2.5),
        torch.ones(0, 3),
    ],
    ids=[
        "channels last",
        "transposed",
        "integers",
        "booleans",
        "bfloat16",
        "a number",
        "empty",
    ],
)
def test_a_tensor_in_a_file_has_the_same_values_type_and_layout(value: torch.Tensor) -> None:
    kept, rest = ActivationStore(0).keep((value, {"size": 3}))
    assert rest == {"size": 3}
    assert torch.equal(kept, value)
    assert (kept.dtype, kept.shape, kept.stride()) == (value.dtype, value.shape, value.stride())
    assert loaded(kept).stride() == value.stride()


def test_a_full_disk_is_told_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, content: object, start: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        DataError, match=r"cannot write values of .*: No space left on device"
    ) as refused:
        ActivationStore(0).keep(torch.ones(3))
    assert refused.value.help is not None and "TMPDIR" in refused.value.help
    assert not list(tmp_path.iterdir())
