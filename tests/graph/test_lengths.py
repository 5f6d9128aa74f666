"""Which sizes beside the batch a trace leaves open; the network computes what the model does at
any of them.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from support.encoders import POSITIONS, Encoder, sentences
from support.llamas import VOCABULARY, llama
from torch import Tensor, nn

from quantizer.errors import DataError
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network


class Words(nn.Module):
    """Something done to embeddings [b, s, 8], and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.linear = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.places, self.flat = nn.Parameter(torch.randn(1, 12, 8)), nn.Linear(64, 8)
        self.register_buffer("past", torch.ones(12, 12).tril().bool())

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.linear(self.done(self.table(ids)))
        return out

    def done(self, x: Tensor) -> Tensor:
        return x


class Placed(Words):
    def done(self, x: Tensor) -> Tensor:
        return x + self.places[:, : x.shape[1]]


class Causal(Words):
    def done(self, x: Tensor) -> Tensor:
        hidden = ~self.past[: x.shape[1], : x.shape[1]]
        return (x @ x.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ x


class Prefixed(Words):
    def done(self, x: Tensor) -> Tensor:
        return torch.cat([self.places[:, :1].expand(x.shape[0], -1, -1), x], 1)


class Branching(Words):
    def done(self, x: Tensor) -> Tensor:
        return x.relu() if x.shape[1] > 10 else x.tanh()


class Flattened(Words):
    def done(self, x: Tensor) -> Tensor:
        out: Tensor = self.flat(x.flatten(1))
        return out


class Columns(Words):
    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.linear(sum(self.table(ids[:, column]) for column in range(8)))
        return out


class Halved(Words):
    def done(self, x: Tensor) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([x[:, half:], x[:, :half]], 1)


class Chunked(Words):
    """A state that is handed from chunk to chunk of a padded text."""

    def done(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        padded = nn.functional.pad(x, (0, 0, 0, -count % 4))
        chunks = padded.reshape(x.shape[0], -1, 4, 8)
        state, parts = chunks[:, 0].mT @ chunks[:, 0], []
        for index in range(padded.shape[1] // 4):
            parts.append(chunks[:, index] @ state)
            state = state + chunks[:, index].mT @ chunks[:, index]
        return torch.cat(parts, 1)[:, :count]


class Grouped(Words):
    """A mean of each four tokens; other lengths cannot be cut in groups."""

    def done(self, x: Tensor) -> Tensor:
        groups = x.reshape(x.shape[0], x.shape[1] // 4, 4, 8)
        return (groups + groups.mean(2, keepdim=True)).flatten(1, 2)


class Sequential(Words):
    """A state that is handed from token to token."""

    def done(self, x: Tensor) -> Tensor:
        state, states = x[:, 0], []
        for index in range(x.shape[1]):
            state = state * 0.5 + x[:, index]
            states.append(state)
        return torch.stack(states, 1)


def ids(length: int, count: int = 2) -> Tensor:
    return torch.randint(
        0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(length)
    )


OPEN = [  # a model, the length of the example, then least and most, and lengths to try
    (Words, 8, (1, None), (1, 2, 30)),
    (Placed, 8, (1, 12), (1, 12)),
    (Placed, 12, (1, 12), (3, 12)),
    (Causal, 8, (1, 12), (1, 7, 12)),
    (Causal, 12, (1, 12), (2, 12)),  # read whole, the mask looks like a fixed length
    (Prefixed, 8, (1, None), (1, 20)),
    (Halved, 8, (1, None), (2, 7, 20)),
    (Branching, 8, (1, 10), (1, 10)),
    (Branching, 16, (11, None), (11, 30)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "example", "ends", "lengths"), OPEN)
def test_a_length_is_open(
    kind: type[Words], example: int, ends: tuple[int, int | None], lengths: tuple[int, ...]
) -> None:
    model = kind().eval()
    graph = trace(model, (ids(example),))
    (length,) = graph.lengths
    assert (length.name, length.axes, (length.least, length.most)) == (
        "sequence",
        ((0, 1),),
        ends,
    )
    made = graph.by_name[f"{kind.__name__}::{kind.__name__}/Linear[linear]/linear"]
    assert made.shape == (None, example + (kind is Prefixed), 8), (
        "plans have figures of the example"
    )
    assert made.open_axes == (1,)
    for size in (example, *lengths):
        assert torch.equal(Network(graph)(ids(size)), model(ids(size)))


@pytest.mark.parametrize(("kind", "size"), [(Placed, 13), (Branching, 11)])
def test_a_length_beyond_the_models_own_is_one_sentence(kind: type[Words], size: int) -> None:
    network = Network(trace(kind().eval(), (ids(8),)))
    with pytest.raises(
        DataError,
        match=rf"input_0: the model takes sequences of 1 to {size - 1}, got one of {size}",
    ):
        network(ids(size))


@pytest.mark.parametrize(("kind", "length"), [(Chunked, 3), (Chunked, 8), (Grouped, 8)])
def test_a_length_that_is_divided_is_fixed_and_a_remark_names_the_line(
    kind: type[Words], length: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = kind().eval()
    with caplog.at_level(logging.INFO):
        graph = trace(model, (ids(length),))
    assert graph.lengths == ()
    torch.testing.assert_close(Network(graph)(ids(length, 3)), model(ids(length, 3)))
    (remark,) = caplog.messages
    expected = (
        rf"{kind.__name__} fixes its length at {length}: forward\(\) computes with parts of a "
        r"text at line \d+ of test_lengths.py: .*reshape.*; give batches of this length"
    )
    assert re.fullmatch(expected, remark)


def test_a_loop_over_tokens_has_the_length_of_the_example() -> None:
    """A length that is also the size of a weight is tried once more, and one shorter."""
    model = Sequential().eval()
    graph = trace(model, (ids(8),))
    assert graph.lengths == ()
    assert torch.equal(Network(graph)(ids(8, 3)), model(ids(8, 3)))


@pytest.mark.parametrize("kind", [Flattened, Columns])
def test_columns_of_a_table_are_no_length(kind: type[Words]) -> None:
    model = kind().eval()
    graph = trace(model, (ids(8),))
    assert graph.lengths == ()
    assert torch.equal(Network(graph)(ids(8)), model(ids(8)))
    with pytest.raises(DataError, match=r"expected \[b, 8\] torch.int64, got \[2, 9\]"):
        Network(graph)(ids(9))


class Biased(nn.Module):
    """Attention with a bias of its own [b, s, s], beside an image whose sizes equal the
    length.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.convolution = (
            nn.Embedding(VOCABULARY, 8),
            nn.Conv2d(1, 8, 3, padding=1),
        )

    def forward(self, ids: Tensor, bias: Tensor, image: Tensor) -> Tensor:
        x = self.table(ids)
        attended: Tensor = torch.softmax(x @ x.mT + bias, -1) @ x
        return attended + self.convolution(image).mean((2, 3))[:, None]


def test_masks_follow_the_tokens_and_images_keep_their_sizes() -> None:
    model = Biased().eval()
    graph = trace(model, (ids(8), torch.randn(2, 8, 8), torch.randn(2, 1, 8, 8)))
    assert [length.axes for length in graph.lengths] == [((0, 1), (1, 1), (1, 2))]
    call = ids(5), torch.randn(2, 5, 5), torch.randn(2, 1, 8, 8)
    assert torch.equal(Network(graph)(*call), model(*call))
    with pytest.raises(DataError, match="input_2: expected"):
        Network(graph)(*call[:2], torch.randn(2, 1, 5, 5))
    with pytest.raises(DataError, match="the inputs have sequences of different lengths"):
        Network(graph)(ids(6), *call[1:])


class Translating(nn.Module):
    """Two texts of a length each."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        x, y = self.table(ids), self.table(other)
        return nn.functional.scaled_dot_product_attention(y, x, x)


def test_two_texts_have_a_length_each() -> None:
    model = Translating().eval()
    graph = trace(model, (ids(8), ids(5)))
    assert [(length.name, length.axes) for length in graph.lengths] == [
        ("sequence", ((0, 1),)),
        ("sequence_1", ((1, 1),)),
    ]
    assert torch.equal(Network(graph)(ids(3), ids(9)), model(ids(3), ids(9)))


class Counting(nn.Module):
    """Of what torch cannot trace with a length that is open."""

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(ids.shape[1], torch.SymInt):
            raise TypeError("a number is needed")
        return ids * ids.shape[1]


def test_what_cannot_be_traced_with_an_open_length_has_a_fixed_one() -> None:
    graph = trace(Counting().eval(), (ids(8),))
    assert graph.lengths == ()
    assert torch.equal(Network(graph)(ids(8, 3)), ids(8, 3) * 8)


def float_layers(graph: Graph) -> dict[str, Any]:
    """What configs and results hold on to."""
    return {
        node.name: (node.op, node.shape, node.params) for node in graph.nodes if node.is_float
    }


@pytest.mark.slow
def test_layers_have_the_names_that_a_fixed_length_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama(use_cache=False)
    call: dict[str, Any] = {"input_ids": ids(8)}
    graph = trace(model, (), call)
    monkeypatch.setattr(
        "quantizer.graph.tracing.trace._export_with_lengths", lambda *given: None
    )
    fixed = trace(model, (), call)
    assert (fixed.lengths, len(graph.lengths)) == ((), 1)
    assert float_layers(graph) == float_layers(fixed)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_a_llama_counts_positions_and_hides_the_future_at_any_length(masked: bool) -> None:
    model = llama(use_cache=False)

    def call(length: int) -> dict[str, Tensor]:
        mask = torch.ones(2, length, dtype=torch.int64)
        mask[0, : length // 2] = 0
        return {"input_ids": ids(length)} | ({"attention_mask": mask} if masked else {})

    network = Network(trace(model, (), call(8)))
    for length in (1, 5, 20):
        with torch.no_grad():
            assert torch.equal(network(**call(length)).logits, model(**call(length)).logits)


def test_an_encoder_takes_as_many_tokens_as_it_has_positions() -> None:
    model = Encoder().eval()
    graph = trace(model, (), sentences(2, POSITIONS))
    (length,) = graph.lengths
    assert (length.least, length.most, length.axes) == (1, POSITIONS, ((0, 1), (1, 1)))
    with torch.no_grad():
        for size in (2, 9, POSITIONS):
            found = Network(graph)(**sentences(3, size))
            assert torch.allclose(found, model(**sentences(3, size)), atol=1e-6), (
                "eager attention has a kernel of its own"
            )
