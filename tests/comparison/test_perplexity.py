"""Perplexity: which tokens count, and the number itself against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from quantizer.comparison import perplexity
from quantizer.comparison.perplexity import TokenLoss, next_tokens
from quantizer.errors import DataError
from quantizer.evaluation.compare import compare
from quantizer.evaluation.scores import target_metrics
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch

IDS = torch.tensor([[3, 1, 4, 1], [2, 0, 2, 3]])
VOCABULARY = 5


def batch(target: Tensor | None) -> Batch:
    return Batch((), {"input_ids": IDS}, target, None)


class Bigram(nn.Module):
    """Logits of the next token from the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.table = nn.Embedding.from_pretrained(weight)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


def by_definition(model: Bigram, scored: list[tuple[int, int]]) -> float:
    """exp(-mean log p(token | the one before)), one token after the other."""
    table = model.table.weight.double().log_softmax(1)
    return math.exp(-sum(float(table[before, token]) for before, token in scored) / len(scored))


PAIRS = [(3, 1), (1, 4), (4, 1), (2, 0), (0, 2), (2, 3)]


def test_the_tokens_themselves_as_labels() -> None:
    found = next_tokens(batch(IDS))
    assert found is not None
    assert found.tolist() == [[1, 4, 1, -100], [0, 2, 3, -100]]
    assert target_metrics(Bigram(), [batch(IDS)])["perplexity"] == pytest.approx(
        by_definition(Bigram(), PAIRS)
    )


def test_targets_that_are_moved_already() -> None:
    moved = torch.tensor([[1, 4, 1, 0], [0, 2, 3, 4]])
    found = next_tokens(batch(moved))
    assert found is not None
    assert found.tolist() == moved.tolist()
    more = [*PAIRS, (1, 0), (3, 4)]
    assert target_metrics(Bigram(), [batch(moved)])["perplexity"] == pytest.approx(
        by_definition(Bigram(), more)
    )


def test_what_is_masked_does_not_count() -> None:
    masked = IDS.clone()
    masked[:, :2] = -100
    scored = [(1, 4), (4, 1), (0, 2), (2, 3)]
    assert target_metrics(Bigram(), [batch(masked)])["perplexity"] == pytest.approx(
        by_definition(Bigram(), scored)
    )


@pytest.mark.parametrize(
    "target", [None, torch.ones(2), torch.ones(2, 4), torch.ones(2, 4).long(), IDS[:1]]
)
def test_other_targets_are_no_text(target: Tensor | None) -> None:
    """A tag for each token has the same shape."""
    assert next_tokens(batch(target)) is None
    assert "perplexity" not in target_metrics(Bigram(), [batch(target)])


def test_chunks_and_batches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = target_metrics(Bigram(), [batch(IDS)])
    monkeypatch.setattr(perplexity, "_CHUNK_LOGITS", 2 * VOCABULARY + 1)
    parts = [Batch((row[None],), {}, row[None], None) for row in IDS]
    assert target_metrics(Bigram(), parts)["perplexity"] == pytest.approx(
        whole["perplexity"], rel=1e-6
    )


def test_both_networks_in_one_pass() -> None:
    graph = trace(Bigram(), (), {"input_ids": IDS})
    other = Network(graph)
    for layer in other.layers.values():
        for parameter in layer.parameters():
            parameter.data = parameter.data * 0
    found = compare(Network(graph), other, [batch(IDS)]).pairs()["perplexity"]
    assert found["float"] == pytest.approx(target_metrics(Bigram(), [batch(IDS)])["perplexity"])
    assert found["quantized"] == pytest.approx(VOCABULARY), "all tokens are as likely"


def test_half_precision_is_summed_in_float32() -> None:
    loss, exact = TokenLoss(), TokenLoss()
    logits = torch.randn(1, 4, 1000, generator=torch.Generator().manual_seed(0)).half()
    loss.add(logits, torch.tensor([[1, 2, 3, -100]]))
    exact.add(logits.double(), torch.tensor([[1, 2, 3, -100]]))
    assert loss.tokens == 3
    assert loss.perplexity == pytest.approx(exact.perplexity, rel=1e-6)


def test_a_token_outside_the_vocabulary() -> None:
    with pytest.raises(
        DataError, match="token 9 is a target, and the model's output has 5 classes"
    ):
        TokenLoss().add(torch.zeros(1, 2, 5), torch.tensor([[9, -100]]))


def test_a_hopeless_model_is_infinitely_perplexed() -> None:
    assert TokenLoss(nll=1e6, tokens=10).perplexity == math.inf
