"""Data made from the model itself: what they match, that they are the same each time, and for
which models there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.llamas import VOCABULARY, llama
from torch import Tensor, nn

from quantizer.errors import DataError, UsageError
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches, load_batches
from quantizer.sources.synthetic import batch_norm_inputs, synthetic

WINDOW = 12
TOKENS = 16


class Normalized(nn.Module):
    """A network whose inputs are normalized first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2)
        self.conv = nn.Conv2d(2, 3, 3)
        self.last = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(self.norm(x)))


def trained(mean: float, deviation: float) -> nn.Module:
    """The network after a training on inputs with this mean and deviation."""
    torch.manual_seed(0)
    module = Normalized()
    generator = torch.Generator().manual_seed(1)
    for _ in range(40):
        module(mean + deviation * torch.randn(16, 2, 6, 6, generator=generator))
    return module.eval()


@pytest.fixture
def normalized() -> nn.Module:
    return trained(3, 0.5)


class NextToken(nn.Module):
    """Predicts the token after its input, modulo the vocabulary, except that token 5 may be
    followed by 6 or 9.
    """

    def __init__(self, outputs: int = TOKENS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, TOKENS)
        self.outputs = outputs

    def forward(self, ids: Tensor) -> Tensor:
        logits = torch.full((*ids.shape, self.outputs), -50.0)
        logits.scatter_(2, ((ids + 1) % self.outputs)[..., None], 50.0)
        logits[..., 9] = torch.where(ids == 5, 50.0, logits[..., 9])
        return logits


def made(
    spec: str, module: nn.Module, example: Batch | None, samples: int | None = None, **more: Any
) -> Batches:
    return load_batches(
        spec, module=module, example=lambda: example, subset_len=samples, **more
    )


def image_batches(module: nn.Module, **wanted: Any) -> Batches:
    """The synthetic batches of a network of images."""
    example = Batch.of(torch.zeros(1, 2, 6, 6))
    return made("synthetic", module, example, **wanted)


def refusal(batches: Any, **settings: Any) -> str:
    """The sentences of the error that a call raises."""
    with pytest.raises((DataError, UsageError)) as caught:
        batches(**settings)
    return f"{caught.value.message} | {caught.value.help}"


@pytest.mark.parametrize(("mean", "deviation"), [(3, 0.5), (120, 60), (-0.01, 0.02)])
def test_inputs_have_the_statistics_that_the_model_was_trained_on(
    mean: float, deviation: float
) -> None:
    normalized = trained(mean, deviation)
    batches = image_batches(normalized, samples=24, batch_size=16)
    values = [batch.args[0] for batch in batches]
    assert [tuple(value.shape) for value in values] == [(16, 2, 6, 6), (8, 2, 6, 6)]
    images = torch.cat(values)
    norm = normalized.get_submodule("norm")
    near = 0.5 * deviation
    assert torch.allclose(images.mean((0, 2, 3)), norm.running_mean, rtol=0, atol=near)
    assert torch.allclose(images.var((0, 2, 3)), norm.running_var, rtol=0.5)
    noise = Batch.of(torch.randn(16, 2, 6, 6))
    distance = batch_norm_inputs.batch_norm_distance(normalized, next(iter(batches)))
    assert distance < 0.1
    assert distance < batch_norm_inputs.batch_norm_distance(normalized, noise) / 10
    assert batches.stamp == "synthetic data, made from the model itself"
    assert not any(batch.target is not None for batch in batches)


def test_a_seed_gives_the_same_inputs_and_another_one_others(normalized: nn.Module) -> None:
    first, again, other = (
        next(iter(image_batches(normalized, samples=2, seed=seed))).args[0]
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_model_stays_as_it_is(normalized: nn.Module) -> None:
    normalized.train()
    before = {name: value.clone() for name, value in normalized.state_dict().items()}
    list(image_batches(normalized, samples=2))
    assert normalized.training
    assert all(parameter.requires_grad for parameter in normalized.parameters())
    assert all(parameter.grad is None for parameter in normalized.parameters())
    after = normalized.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(layer._forward_pre_hooks for layer in normalized.modules())


def test_data_are_made_once_and_only_when_they_are_read(
    normalized: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        "quantizer.sources.synthetic.synthetic.match_batch_norms",
        lambda module, noise, scaling: calls.append(scaling) or noise,
    )
    batches = image_batches(normalized, samples=4)
    shapes = [tuple(batch.args[0].shape) for batch in batches.for_shapes()]
    assert (shapes, calls) == ([(4, 2, 6, 6)], [])
    assert [len(list(batches)) for _ in range(2)] == [1, 1]
    assert len(calls) == 1


def test_a_shape_takes_the_place_of_an_example(normalized: nn.Module) -> None:
    batches = made("synthetic:3x2x5x5", normalized, None)
    (batch,) = batches
    assert batch.args[0].shape == (3, 2, 5, 5)
    (batch,) = made("synthetic:3x2x5x5", normalized, None, samples=2)
    assert batch.args[0].shape == (2, 2, 5, 5)


def test_a_window_continues_its_first_token_and_then_draws() -> None:
    fill = Batch.of
    first = torch.tensor([[4]] * 40)
    ids = synthetic.sample_tokens(NextToken(), fill, first, WINDOW, seed=0)
    assert ids.shape == (40, WINDOW)
    assert ids[:, :3].tolist() == [[4, 5, 6]] * 40, "greedy: the first of two equal tokens"
    ids = synthetic.sample_tokens(NextToken(), fill, first * 0, WINDOW, seed=0)
    assert ids[:, :6].tolist() == [[0, 1, 2, 3, 4, 5]] * 40
    drawn = ids[:, 6]
    assert set(drawn.tolist()) == {6, 9}, "drawn from the model's own distribution"


def test_the_sequences_of_a_language_model_are_its_own() -> None:
    model = llama().eval()
    ids = torch.zeros(1, WINDOW, dtype=torch.long)
    example = Batch((), {"input_ids": ids}, None, None)
    first, again, other = (
        list(made("synthetic", model, example, samples=3, seed=seed)) for seed in (1, 1, 2)
    )
    sequences = torch.cat([batch.kwargs["input_ids"] for batch in first])
    assert sequences.shape == (3, WINDOW)
    assert sequences.max() < VOCABULARY
    with torch.no_grad():
        greedy = model(sequences).logits.argmax(-1)
    count = synthetic.GREEDY_TOKENS
    assert torch.equal(sequences[:, 1 : 1 + count], greedy[:, :count])
    assert torch.equal(sequences, torch.cat([batch.kwargs["input_ids"] for batch in again]))
    assert not torch.equal(sequences, torch.cat([batch.kwargs["input_ids"] for batch in other]))
    assert all(batch.target is None for batch in first), "no perplexity on synthetic text"


class Mixed(nn.Module):
    """Takes token ids beside an image."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.mean() + ids


class NoGradient(Normalized):
    """Hides its inputs from gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def examples() -> Iterator[tuple[str, nn.Module, Batch | None, str]]:
    """Yield a spec, a model, its example, and what the refusal says."""
    image = Batch.of(torch.zeros(1, 2, 6, 6))
    ids = Batch.of(torch.zeros(1, 4, dtype=torch.long))
    yield "synthetic", nn.Flatten(), None, "the shape of synthetic data is not known | add exam"
    yield "synthetic:3", nn.Flatten(), None, "'synthetic:3' is not synthetic:NxCxHxW"
    yield "synthetic", nn.Conv2d(2, 3, 3), image, "Conv2d: it has no batch normalization with"
    yield "synthetic", Normalized(), image, "statistics of training"
    yield "synthetic", NextToken(20), ids, "has no output with a logit of each token"
    yield "synthetic", nn.Embedding(3, 4), ids, "has no output with a logit of each token"
    yield "synthetic", nn.Flatten(), ids, "Flatten, which takes token ids: it has no output"
    two = Batch((image.args[0], ids.args[0]), {}, None, None)
    yield "synthetic", Mixed(), two, "Mixed, which takes integers and floating-point inputs"
    pair = Batch((ids.args[0], ids.args[0]), {}, None, None)
    yield "synthetic", Mixed(), pair, "have the shapes [1, 4] and [1, 4]"


@pytest.mark.parametrize(("spec", "module", "example", "sentence"), list(examples()))
def test_a_model_without_synthetic_data_is_refused_before_any_are_made(
    spec: str, module: nn.Module, example: Batch | None, sentence: str
) -> None:
    assert sentence in refusal(made, spec=spec, module=module, example=example)


def test_an_encoder_of_transformers_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
    )
    ids = torch.zeros(1, 4, dtype=torch.long)
    example = Batch((), {"input_ids": ids}, None, None)
    module = transformers.BertModel(config)
    sentence = refusal(made, spec="synthetic", module=module, example=example)
    assert "BertModel, which takes token ids: it is not a decoder of transformers" in sentence


def test_inputs_without_a_gradient_are_an_error(
    normalized: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_norm_inputs, "STEPS", 1)
    module = NoGradient()
    module.load_state_dict(normalized.state_dict())
    assert "no gradient of the model's batch norms reaches its inputs" in refusal(
        image_batches(module).first
    )
