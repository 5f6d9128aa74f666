"""How much memory the algorithms take above the float model and what they find: it does not
grow with the depth.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.rescaling import task_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quantizer.calibration.run_algorithms import load_run
from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.adjustment import Adjustment
from quantizer.storage.deferred_tensor import Spool

READS_DATA = [name for name, row in ALGORITHMS.items() if row.needs_data]
FOR_WEIGHTS = [name for name in READS_DATA if not ALGORITHMS[name].eases_activations]
WIDTH, TOKENS, BATCHES = 32, 256, 8
INT4 = QuantizationSpec(bit_width=4, qscheme="per_channel", ch_axis=0)


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time, by their storages; memory of
    kernels is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        before = {
            leaf.untyped_storage()._cdata
            for leaf in pytree.tree_leaves((args, kwargs))
            if is_tensor(leaf)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in filter(is_tensor, pytree.tree_leaves(out)):
            storage = leaf.untyped_storage()
            if storage._cdata not in before:
                # It is gone, and its address used again
                self.held -= self.live.get(storage._cdata, (None, 0))[1]
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.held += storage.nbytes()
        if self.held > self.peak:
            self.live = {key: row for key, row in self.live.items() if not row[0].expired()}
            self.held = sum(size for _, size in self.live.values())
            self.peak = max(self.peak, self.held)
        return out


def is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor)


class Block(nn.Module):
    """A gated feed-forward part around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, WIDTH] to the same."""
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def found_bytes(found: Adjustment) -> int:
    """What an algorithm returns."""
    tensors = [value for own in found.parameters.values() for value in own.values()]
    for rounded in found.rounded.values():
        tensors += [rounded.weight, rounded.qparams.scale, rounded.qparams.zero_point]
    tensors += [
        value
        for qparams in found.qparams.values()
        for value in (qparams.scale, qparams.zero_point)
    ]
    return sum(each.nbytes for each in {id(each): each for each in tensors}.values())


def above(name: str, blocks: int) -> int:
    """Bytes above the model, the data and the result, at the worst moment."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    inputs = list(torch.randn(BATCHES, 1, TOKENS, WIDTH))
    task = task_of(model, inputs, INT4, QuantizationSpec())
    assert len(task.structure.blocks) == blocks
    run, settings = load_run(name), ALGORITHMS[name]()
    with LiveBytes() as seen:
        found = run(task, settings, Adjustment())
    return seen.peak - found_bytes(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", READS_DATA)
def test_no_more_than_two_blocks_activations_and_one_hessian(name: str) -> None:
    """What a block reads and what a group in it reads, of all batches; the rest is one batch
    inside a block, and a Hessian with its copies and factor. GPTAQ and Qronos run the float
    network beside the rounded one.
    """
    activations, hessian = 4 * BATCHES * TOKENS * WIDTH, 4 * WIDTH * WIDTH
    networks = 2 if name in ("gptaq", "qronos") else 1
    few, many = above(name, 2), above(name, 5)
    assert many - few <= 0.1 * activations, "three blocks more"
    assert few <= networks * (2 * activations + 2 * activations / BATCHES) + 12 * hessian


@pytest.mark.parametrize("name", [name for name in FOR_WEIGHTS if ALGORITHMS[name].matrices])
def test_values_in_files_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget of memory, which is nothing here, what goes from block to block lies on
    disk.
    """
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Block(), Block()), list(torch.randn(3, 1, 32, WIDTH))
    task, run, settings = task_of(model, inputs, INT4), load_run(name), ALGORITHMS[name]()
    expected = run(task, settings, Adjustment())
    with_spool, spilled = Spool.put, list[Tensor]()
    monkeypatch.setattr(
        Spool, "put", lambda self, tensor: spilled.append(tensor) or with_spool(self, tensor)
    )
    found = run(replace(task, memory=0), settings, Adjustment())
    assert len(spilled) >= 2 * len(inputs)
    assert found.rounded.keys() == expected.rounded.keys() and len(found.rounded) == 6
    assert all(
        torch.equal(found.rounded[layer].weight, own.weight)
        for layer, own in expected.rounded.items()
    )
