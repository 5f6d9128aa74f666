"""Tokens that weigh by the gradient of the loss, in GPTQ and its kin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.roundings import CHANNELS, decaying, layer_names, resumed, task_of
from torch import Tensor, nn

from quantizer.algorithms.gptq.algorithms import gptaq, gptq, qronos
from quantizer.algorithms.gptq.guidance import token_weights
from quantizer.algorithms.gptq.settings import (
    ColumnRounding,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
)
from quantizer.distributed import Ranks
from quantizer.errors import DataError
from quantizer.layerwise.adjustment import Adjustment, Run
from quantizer.nn.network import Network

RUNS: dict[str, tuple[Run, ColumnRounding]] = {
    "gptq": (gptq, GPTQConfig()),
    "gptaq": (gptaq, GPTAQConfig()),
    "qronos": (qronos, QronosConfig()),
}
CLASSES = 8


class Gated(nn.Module):
    """Multiplies the outputs for each token with the token's last channel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[..., :-1]) * x[..., -1:]


class Sure(nn.Module):
    """Knows the next token after even ones, and nothing after odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, CLASSES)
        self.linear = nn.Linear(CLASSES, CLASSES, bias=False)
        rows = torch.eye(CLASSES)
        rows[1::2] = 0
        self.embedding.weight.data = rows
        self.linear.weight.data = 100 * torch.eye(CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.embedding(ids))


def gated_batches(tokens: int, seed: int) -> list[Tensor]:
    """Two batches with one open token in two, in places that differ."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(2):
        gate = torch.zeros(tokens)
        gate[torch.randperm(tokens, generator=generator)[: tokens // 2]] = 1
        x = decaying(tokens, 32, seed + number)
        batches.append(torch.cat([x, gate[:, None]], 1)[None])
    return batches


def rounded(batches: list[Tensor], name: str, guidance: float) -> Tensor:
    run, settings = RUNS[name]
    task = task_of(Gated(), batches, CHANNELS)
    adjustment = run(task, replace(settings, guidance=guidance), Adjustment())
    [layer] = layer_names(task.graph)
    return adjustment.rounded[layer].weight


@pytest.mark.parametrize("name", RUNS)
def test_a_token_without_effect_does_not_count(name: str) -> None:
    """All others weigh alike, so that the result is that of their data alone."""
    batches = gated_batches(512, seed=1)
    guided = rounded(batches, name, 1.0)
    open_only = [x[:, x[0, :, -1] == 1] for x in batches]
    assert torch.equal(guided, rounded(open_only, name, 0.0))
    assert not torch.equal(guided, rounded(batches, name, 0.0))
    assert torch.equal(guided, rounded(batches, name, 1.0))


def test_a_token_weighs_as_its_loss_depends_on_it() -> None:
    """The gradient p - e of the cross entropy is 0 if a class has the probability 1, and has
    the squared norm 1 - 1/K for K equal ones, whatever class is drawn.
    """
    batches = [torch.arange(6)[None], torch.tensor([[7, 0, 2, 4]])]
    task = task_of(Sure(), batches, CHANNELS)
    [weights] = token_weights(Network(task.graph), task, 1.0).values()
    odd = torch.cat([ids.flatten() for ids in batches]) % 2
    expected = odd * len(odd) / odd.sum()
    torch.testing.assert_close(weights, expected.float(), atol=1e-6, rtol=1e-6)


def test_the_power_flattens_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    task = task_of(model, [torch.randn(64, 8)], CHANNELS)
    network = Network(task.graph)
    full = token_weights(network, task, 1.0)
    half = token_weights(network, task, 0.5)
    assert full.keys() == half.keys()
    assert len(full) == 2
    for value, weights in full.items():
        root = weights.sqrt()
        torch.testing.assert_close(half[value], root / root.mean())
        assert float(weights.mean()) == pytest.approx(1, rel=1e-5)


class OneOfTwo(Ranks):
    """A rank that was given what the other one gathers."""

    world_size = 2

    def __init__(self, rank: int, of_other: list[Any]) -> None:
        self.rank = rank
        self.of_other = of_other
        self.gathered: list[Any] = []

    def gather(self, value: Any, place: str) -> list[Any]:
        self.gathered.append(value)
        return [value, *self.of_other]


def test_ranks_weigh_their_tokens_as_one_process_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    batches = [torch.randn(16, 8) for _ in range(3)]
    task = task_of(model, batches, CHANNELS)
    network = Network(task.graph)
    alone = token_weights(network, task, 0.5)
    gathered = []
    for rank in range(2):
        ranks = OneOfTwo(rank, [])
        token_weights(network, replace(task, ranks=ranks), 0.5)
        gathered.append(ranks.gathered)
    for rank in range(2):
        ranks = OneOfTwo(rank, gathered[1 - rank])
        shared = token_weights(network, replace(task, ranks=ranks), 0.5)
        for value, weights in alone.items():
            own = torch.cat(weights.split(16)[rank::2])
            torch.testing.assert_close(shared[value], own)


class Choice(nn.Module):
    """Its output has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


def test_an_output_without_gradient_is_refused() -> None:
    task = task_of(Choice(), [torch.randn(16, 8)], CHANNELS)
    with pytest.raises(DataError, match="gradient") as error:
        gptq(task, GPTQConfig(guidance=0.5), Adjustment())
    assert error.value.help is not None
    assert "guidance" in error.value.help


def test_layers_that_are_not_linear_are_named() -> None:
    """Their positions count alike, so without linear layers nothing changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    task = task_of(model, [torch.randn(8, 3, 12, 12)], CHANNELS)
    plain = gptq(task, GPTQConfig(), Adjustment())
    guided = gptq(task, GPTQConfig(guidance=1.0), Adjustment())
    named = [remark.layer for remark in guided.remarks if "guidance" in remark.text]
    assert named == layer_names(task.graph)
    for name, rounded_weight in plain.rounded.items():
        assert torch.equal(guided.rounded[name].weight, rounded_weight.weight)


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_ends_as_a_whole_one(name: str) -> None:
    run, settings = RUNS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    task = task_of(model, [decaying(256, 32, 1)], CHANNELS)
    settings = replace(settings, guidance=0.5)
    whole = run(task, settings, Adjustment())
    first, second = layer_names(task.graph)
    begun = Adjustment(rounded={first: whole.rounded[first]})
    ended = run(resumed(task, 1), settings, begun)
    assert torch.equal(ended.rounded[second].weight, whole.rounded[second].weight)
