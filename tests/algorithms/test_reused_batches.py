"""Loaders that write into batches which they have given before: results are those of a loader
with fresh tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.configs import document
from support.extended import extended_except
from torch import Tensor, nn

from quantizer import Config, ModelQuantizer, calibrate
from quantizer.config.algorithms import ALGORITHMS
from quantizer.sources.data import load_batches
from quantizer.storage.folder_list import LIST_FILE


class Net(nn.Module):
    """Reads two inputs, and returns a part of one of them beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = (
            nn.LayerNorm(16),
            nn.Linear(16, 24),
            nn.Linear(24, 16),
        )

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(torch.relu(self.first(self.norm(x + shift)))), x[:, :2]


def fresh() -> list[dict[str, Tensor]]:
    """Batches of growing size: with one of them in place of another, every scale would
    differ.
    """
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 6, 16, generator=generator)
    shifts = torch.randn(4, 1, 16, generator=generator)
    return [
        {"x": (k + 1) * rows[k], "shift": (k + 1) * shifts[k].expand(6, 16)} for k in range(4)
    ]


def one_buffer() -> Iterator[dict[str, Tensor]]:
    buffer = {name: torch.empty_like(tensor) for name, tensor in fresh()[0].items()}
    for batch in fresh():
        for name, tensor in batch.items():
            buffer[name].copy_(tensor)
        yield buffer


def views() -> Iterator[dict[str, Tensor]]:
    """Of larger memory: every second column, and a row that stands for all."""
    wide, row = torch.empty(6, 32), torch.empty(1, 16)
    for batch in fresh():
        wide[:, ::2] = batch["x"]
        row[:] = batch["shift"][:1]
        yield {"x": wide[:, ::2], "shift": row.expand(6, 16)}


def arrays() -> Iterator[dict[str, Tensor]]:
    """Which numpy writes to, so that torch counts no change."""
    buffer = {name: np.empty((6, 16), np.float32) for name in ("x", "shift")}
    for batch in fresh():
        for name, tensor in batch.items():
            buffer[name][:] = tensor.numpy()
        yield {name: torch.from_numpy(array) for name, array in buffer.items()}


def one_dict() -> Iterator[dict[str, Tensor]]:
    """Emptied when the next batch is asked for."""
    batch: dict[str, Tensor] = {}
    for tensors in fresh():
        batch.update(tensors)
        yield batch
        batch.clear()


def spoiled() -> Iterator[dict[str, Tensor]]:
    """Memory that is never given again."""
    for batch in fresh():
        tensors = {name: tensor.contiguous() for name, tensor in batch.items()}
        yield tensors
        for tensor in tensors.values():
            tensor.fill_(float("nan"))


LOADERS = [one_buffer, views, arrays, one_dict, spoiled]


class Loader:
    """Can be gone through several times."""

    def __init__(self, batches: Callable[[], Iterator[Any]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self.batches()


def hierarchical(name: str) -> Config:
    """An algorithm, with ranges of inputs that data give."""
    blocks = {"weight": {"dtype": "int4"}, "input_tensors": {"dtype": "int8"}}
    return Config.from_dict({"global_quant_config": blocks, "algo_config": {"name": name}})


RUNS: dict[str, tuple[Any, str | None]] = {
    "bias correction": (document(include_bias_corr=True, include_cle=True), None),
    "adaround": (document(), "adaround"),
    "adaquant": (document(), "adaquant"),
    **{name: (hierarchical(name), None) for name in ALGORITHMS},
}
USUAL = ("bias correction", "adaround", "rotation", "smoothquant", "gptq", "gptaq")
"""Those that read batches each in a way of its own."""


def results(name: str, data: Any, folder: Path) -> dict[str, bytes]:
    """All files that calibration writes, without the list of them, which has a random token."""
    config, finetuned = RUNS[name]
    calibrate(Net(), config, data, fast_finetune=finetuned, memory="1GB").save(folder)
    files = [path for path in folder.iterdir() if path.is_file() and path.name != LIST_FILE]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(RUNS, *USUAL))
def test_calibration_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    expected = results(name, fresh(), tmp_path / "fresh")
    for loader in LOADERS if name in ("bias correction", "gptq") else [spoiled]:
        assert results(name, Loader(loader), tmp_path / loader.__name__) == expected, (
            loader.__name__
        )


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_model_in_place_gets_the_same_weights(name: str) -> None:
    def quantized(batches: Any) -> dict[str, Tensor]:
        model = ModelQuantizer(hierarchical(name)).quantize_model(Net(), batches)
        return dict(model.state_dict())

    expected = quantized(fresh())
    for loader in (one_buffer, spoiled):
        found = quantized(loader())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items()), (
            loader.__name__
        )


def test_test_mode_and_exports_find_the_same(tmp_path: Path) -> None:
    def figures(data: Any, name: str) -> tuple[Any, bytes]:
        result = calibrate(Net(), document(), data)
        result.export("safetensors", tmp_path / name)
        return result.test().metrics, (tmp_path / name).read_bytes()

    assert figures(Loader(spoiled), "spoiled.safetensors") == figures(
        fresh(), "fresh.safetensors"
    )


def test_only_batches_that_may_change_are_copied() -> None:
    """A list is in memory anyway."""
    tensors = [batch["x"] for batch in fresh()]
    assert load_batches(tensors).first().stable().args[0] is tensors[0]
    assert load_batches(lambda: tensors).first().stable().args[0] is tensors[0]
    loader = Loader(lambda: (tensor for tensor in tensors))
    assert load_batches(loader).first().args[0] is not tensors[0]
    batch = next(iter(load_batches(loader)))
    assert batch.args[0] is tensors[0], "one that nobody keeps is not copied"
    assert batch.stable().args[0] is not tensors[0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(1, 3).expand(5, 3),
        torch.randn(8).unfold(0, 4, 1),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 6).T,
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ],
    ids=lambda tensor: f"{[*tensor.shape]} {tensor.stride()}",
)
def test_a_copy_lies_in_memory_as_the_tensor_does(tensor: Tensor) -> None:
    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.ones(2, 2), copy.copy(tensor)

    batch = next(iter(load_batches(Loader(pairs))))
    assert batch.target is not None
    copied = batch.stable().target
    assert copied is not None
    assert torch.equal(copied, tensor)
    assert copied.stride() == tensor.stride()
    assert copied.data_ptr() != batch.target.data_ptr() or not tensor.numel()
