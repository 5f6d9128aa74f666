"""A traced network is called like the model and computes what the model computes, at any batch
size.
"""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from support.extended import extended
from support.toys import TOYS, Residual, built, leaves_equal, traced
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal
from torch.utils import _pytree as pytree

from quantizer.errors import DataError, ModelError
from quantizer.graph.tracing.trace import quiet, trace
from quantizer.nn.network import Network

# The float attention and recurrent kernels of eager mode differ from the traced ones in the
# last bit.
TOLERANCE = {"attention": 1e-6, "gated": 1e-6}
IMAGES = 4e-6
"""Convolutions add in another order, as their channels are last in memory."""


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", TOYS)
def test_network_equals_the_eager_model(name: str, batch: int) -> None:
    toy = built(name)
    args, kwargs = toy.call(batch)
    with torch.no_grad():
        expected = toy.module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        output = Network(traced(name))(*args, **kwargs)
    convolves = any(isinstance(module, torch.nn.Conv2d) for module in toy.module.modules())
    assert leaves_equal(output, expected, TOLERANCE.get(name, IMAGES if convolves else 0.0))
    assert type(output) is type(expected)


class Translator(nn.Module):
    """An encoder and a decoder with a causal mask, and masks of padding where it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor | None = None) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        output: Tensor = self.layers(
            source,
            target,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return output


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_transformer_with_a_causal_mask_is_traced(is_padded: bool) -> None:
    torch.manual_seed(0)
    module = Translator().eval()
    padding = torch.arange(6) >= torch.tensor([[6], [4], [3]])
    masks = [padding] if is_padded else []
    call = (torch.randn(3, 6, 16), torch.randn(3, 5, 16), *masks)
    with torch.no_grad():
        expected = module(*call)
        output = Network(trace(module, call))(*call)
    torch.testing.assert_close(output, expected)


class Policy(nn.Module):
    """Returns what distributions compute, which check their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        choices = Categorical(logits=y)
        steps = Normal(y, y.exp())
        return choices.probs, choices.entropy(), steps.log_prob(x[:, :3])


def test_distributions_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch.compile switches the checks off, too
    monkeypatch.setattr(Distribution, "_validate_args", True)
    torch.manual_seed(0)
    module = Policy().eval()
    call = (torch.randn(3, 4),)
    with torch.no_grad():
        output = Network(trace(module, call))(*call)
        torch.testing.assert_close(output, module(*call))
    with pytest.raises(ValueError, match="parameter scale"):
        Normal(0.0, -1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurrent", "gated"])
def test_the_model_still_computes_what_it_did(name: str, traced_anew: None) -> None:
    toy = built(name)
    args, kwargs = toy.call(2)
    module = copy.deepcopy(toy.module)
    with torch.no_grad():
        before = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        trace(module, args, kwargs)
        after = module(*args, **kwargs)
    assert leaves_equal(after, before)
    assert {type(leaf) for leaf in pytree.tree_leaves(after)} == {Tensor}


@pytest.mark.parametrize("name", TOYS)
def test_network_leaves_arguments_and_weights_alone(name: str) -> None:
    args, kwargs = built(name).call(2)
    state = copy.deepcopy(built(name).module.state_dict())
    before = copy.deepcopy((args, kwargs))
    with torch.no_grad():
        Network(traced(name))(*args, **kwargs)
    assert leaves_equal((args, kwargs), before)
    assert leaves_equal(dict(built(name).module.state_dict()), dict(state))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_example_may_have_any_batch_size(batch: int) -> None:
    model = Residual().eval()
    graph = trace(model, (torch.randn(batch, 3, 8, 8),))
    x = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        assert leaves_equal(Network(graph)(x), model(x), IMAGES)


def test_a_batch_size_in_the_code_stays_fixed() -> None:
    network = Network(traced("static_batch"))
    assert network(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(
        DataError, match=r"StaticBatch::input_0: expected \[2, 4\] torch.float32, got \[3, 4\]"
    ):
        network(torch.ones(3, 4))


class Undeclared(nn.Module):
    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return x + more["shift"]


def test_undeclared_keywords_fix_the_batch_size_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graph = trace(Undeclared(), (), {"x": torch.ones(3, 2), "shift": torch.ones(3, 2)})
    assert "fixes its batch size at 3" in caplog.text
    assert "name the arguments in forward() instead of taking **more" in caplog.text
    assert torch.equal(
        Network(graph)(x=torch.ones(3, 2), shift=torch.ones(3, 2)), torch.full((3, 2), 2.0)
    )


class Declared(nn.Module):
    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return torch.cat([row[None] for row in x])


def test_a_batch_size_is_not_blamed_on_keywords_that_nobody_gave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace(Declared(), (torch.ones(3, 2),))
    assert caplog.messages == ["Declared fixes its batch size at 3: only such batches can run"]


class Detector(nn.Module):
    """Boxes at two scales, as YOLO decodes them: it keeps the grids of the last shape it was
    called with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(channels, 8, 3, 2, 1) for channels in (3, 8))
        self.heads = nn.ModuleList(nn.Conv2d(8, 7, 1) for _ in range(2))
        self.register_buffer("stride", torch.tensor([2.0, 4.0]))
        self.shape: torch.Size | None = None

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for down, head in zip(self.down, self.heads, strict=True):
            x = torch.relu(down(x))
            maps.append(head(x))
        if self.shape != maps[0].shape:
            grids = [
                torch.meshgrid(
                    *(torch.arange(size) + 0.5 for size in each.shape[2:]), indexing="ij"
                )
                for each in maps
            ]
            self.cells = torch.cat([torch.stack(each).flatten(1) for each in grids], 1)
            sizes = [each.shape[2] * each.shape[3] for each in maps]
            self.strides = torch.cat(
                [self.stride[at].expand(size) for at, size in enumerate(sizes)]
            )
            self.shape = maps[0].shape
        found = torch.cat([each.reshape(maps[0].shape[0], 7, -1) for each in maps], 2)
        y = found.clone()
        y[:, :2] = (found[:, :2].sigmoid() + self.cells) * self.strides
        y[:, 2:4] = found[:, 2:4].exp() * self.strides
        return y


@pytest.mark.slow
@pytest.mark.parametrize("seen", [None, 1, 2, *extended(3)])
def test_a_detector_that_notes_the_shape_of_its_last_batch_takes_any(
    seen: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Detector().eval()
    if seen is not None:
        model(torch.randn(seen, 3, 16, 16))
    network = Network(trace(model, (torch.randn(3, 3, 16, 16),)))
    assert not caplog.messages
    with torch.no_grad():
        for batch in (1, 2, 3, 5):
            x = torch.randn(batch, 3, 16, 16)
            assert leaves_equal(network(x), model(x), IMAGES)


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] % 2 == 0 else -x


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_a_model_that_asks_more_of_its_batch_keeps_its_size(
    batch: int, caplog: pytest.LogCaptureFixture
) -> None:
    graph = trace(Pairs(), (torch.ones(batch, 2),))
    assert f"Pairs fixes its batch size at {batch}" in caplog.text
    assert torch.equal(Network(graph)(torch.ones(batch, 2)), Pairs()(torch.ones(batch, 2)))


class Switching(nn.Module):
    """A part without gradients: torch.export keeps it as a program of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            return x * 2


class Vmapped(nn.Module):
    """A vmap, likewise."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: row.cumsum(0))(x)


def exports_vmap() -> bool:
    """Whether this torch can; 2.8 cannot."""
    try:
        torch.export.export(Vmapped(), (torch.ones(3, 2),))
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("kind", [Switching, Vmapped])
def test_subprograms_that_only_switch_something_become_operators(kind: type[nn.Module]) -> None:
    if kind is Vmapped and not exports_vmap():
        pytest.skip("torch.export of this version fails on a vmap")
    graph, x = trace(kind(), (torch.ones(3, 2),)), torch.randn(4, 2)
    assert torch.equal(Network(graph)(x), kind()(x))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Looping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum())):
            x = x + 1
        return x


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no good")


class Mismatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[:, 1:])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class CountingInAView(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls.view(1)[0] = x.sum()
        return x * self.calls


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


UNTRACEABLE = [
    (
        Branching,
        r"control flow depends on the values of a tensor at line \d+ of test_tracing.py: if "
        r"x.sum\(\) > 0",
    ),
    (Looping, r"control flow depends on the values .* of test_tracing.py: for _ in range"),
    (Raising, r"ValueError: no good at line \d+ of test_tracing.py: raise ValueError"),
    (Mismatched, r"at line \d+ of test_tracing.py: return self.fc"),
    (Counting, "changes its own 'calls'"),
    (CountingInAView, "changes its own 'calls'"),
    (Conditional, r"Conditional cannot be quantized: it runs other programs \(torch.cond"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sentence"), UNTRACEABLE)
def test_a_model_that_cannot_be_traced_gives_one_sentence(
    model: type[nn.Module], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match=sentence) as caught:
        trace(model(), (torch.randn(2, 3),))
    assert "\n" not in caught.value.message
    assert capfd.readouterr() == ("", "")


class Packing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        output: Tensor = nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0])[0]
        return output


@pytest.mark.slow
def test_packed_sequences_are_refused_with_their_line() -> None:
    with pytest.raises(ModelError, match=r"at line \d+ of test_tracing.py"):
        trace(Packing(), (torch.randn(2, 3, 4), torch.tensor([3, 2])))


X = torch.ones(3, 3)
WRONG_CALLS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (([X, X],), {"opts": {"k": [X, X]}, "flag": False}, r"no kwargs\['scale'\] in this call"),
    (
        ([X],),
        {"opts": {"k": [X, X]}, "scale": X, "flag": False},
        r"no args\[0\]\[1\] in this call",
    ),
    (
        ([X, X],),
        {"opts": {"k": [X, X]}, "scale": X, "flag": True},
        "traced with False here, got True",
    ),
    (
        ([X, X],),
        {"opts": {"k": [X, X]}, "scale": X[:2], "flag": False},
        "batches of different sizes",
    ),
    (
        ([X, X],),
        {"opts": {"k": [X, [X]]}, "scale": X, "flag": False},
        "expected a tensor, got list",
    ),
    (
        ([X, X],),
        {"opts": {"k": [X, X]}, "scale": X.double(), "flag": False},
        "got .* torch.float64",
    ),
    (
        ([X, X],),
        {"opts": {"k": [X, X[:, :2]]}, "scale": X, "flag": False},
        r"expected \[b, 3\] .* got \[3, 2\]",
    ),
    (
        ([X, X, X],),
        {"opts": {"k": [X, X]}, "scale": X, "flag": False},
        "6 inputs, but this call has 7",
    ),
]


@pytest.mark.parametrize(("args", "kwargs", "sentence"), WRONG_CALLS)
def test_a_call_unlike_the_example_gives_one_sentence(
    args: tuple[Any, ...], kwargs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        Network(traced("nested_inputs"))(*args, **kwargs)


class Alike(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * 2).type_as(x)


def test_a_value_that_takes_the_dtype_of_another_keeps_its_scale() -> None:
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    graph = trace(Alike().eval(), (x,))
    last = graph.nodes[-1]
    assert (last.op, last.row.kind) == ("to", "passthrough")
    assert torch.equal(Network(graph)(x), Alike()(x))


def test_loggers_that_torch_makes_while_it_works_are_silent_too() -> None:
    """torch.onnx makes some when it is imported, and warns that torchvision is missing."""
    name, shown = "torch.onnx.made_meanwhile", io.StringIO()
    assert name not in logging.Logger.manager.loggerDict
    handler = logging.StreamHandler(shown)
    logging.getLogger("torch.onnx").addHandler(handler)
    try:
        with quiet():
            logging.getLogger(name).warning("hidden")
        logging.getLogger(name).warning("shown")
    finally:
        logging.getLogger("torch.onnx").removeHandler(handler)
    assert shown.getvalue() == "shown\n"


@pytest.mark.parametrize(
    ("shape", "dtype", "is_told"),
    [
        ((2, 3, 9, 9), torch.float32, True),
        ((2, 5, 8, 8), torch.float32, False),
        ((2, 3, 8, 8), torch.float64, False),
    ],
    ids=["size", "channels", "dtype"],
)
def test_open_sizes_are_the_remedy_for_other_sizes_only(
    shape: tuple[int, ...], dtype: torch.dtype, is_told: bool
) -> None:
    network = Network(trace(nn.Conv2d(3, 2, 3).eval(), (torch.zeros(2, 3, 8, 8),)))
    with pytest.raises(DataError) as caught:
        network(torch.zeros(shape, dtype=dtype))
    assert ("dynamic" in str(caught.value.help)) == is_told
