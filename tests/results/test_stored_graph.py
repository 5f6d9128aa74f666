"""A calibration holds its graph: whoever reads it traces the model again only if the model is
another than the graph says, and gets the same either way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import llama, tokens
from support.llamas import saved as saved_llama
from support.toys import TOYS, built
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import quantizer
from quantizer.errors import ModelError, ResultError
from quantizer.graph import trace as tracing
from quantizer.graph.ir import Graph
from quantizer.graph.stored import graph_from_json, graph_to_json
from quantizer.graph.trace import trace
from quantizer.results.reused_graph import reused_graph
from quantizer.sources.batches import Batch
from quantizer.sources.hugging_face import load_hugging_face

BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))]


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be traced."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise ModelError("the model was traced")

    monkeypatch.setattr(tracing, "_export", refuse)


def reused(graph: Graph, module: nn.Module, *args: Any, **kwargs: Any) -> Graph | None:
    """The graph as a file gives it back, if it is used for this module and call."""
    stored = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    constants = {path: graph.tensors[path] for path in graph.constants}
    return reused_graph(stored, constants, module, Batch(args, kwargs, None, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_the_stored_graph_of_every_toy_is_that_of_a_trace(name: str) -> None:
    toy = built(name)
    toy.module.eval()
    graph = trace(toy.module, toy.args, toy.kwargs)
    again = reused(graph, toy.module, *toy.args, **(toy.kwargs or {}))
    assert again is not None
    empty: dict[str, Any] = {"tensors": {}, "rebuild": None}
    assert repr(again.replaced(**empty)) == repr(graph.replaced(**empty))
    assert list(again.tensors) == list(graph.tensors)
    for path, tensor in again.tensors.items():
        assert torch.equal(tensor, graph.tensors[path])


class Net(nn.Module):
    """A model whose parts can be changed one by one."""

    def __init__(self, width: int = 4, act: nn.Module | None = None, by: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(3, width, 3), nn.Linear(width, 5)
        self.act, self.by, self.table = act or nn.ReLU(), by, torch.ones(5)
        self.register_buffer("shift", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.act(self.conv(x)).mean((2, 3))
        return self.fc(pooled) * self.by + self.shift + self.table


def with_tensor(name: str, value: Tensor) -> Net:
    net = Net()
    setattr(net, name, value)
    return net


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    quantizer.calibrate(Net().eval(), None, BATCHES).save(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("saved", "no_trace")
def test_a_calibration_is_loaded_and_tested_without_a_trace(saved: Path) -> None:
    for data in (BATCHES, None, [torch.cat(BATCHES * 2)]):
        result = quantizer.load(saved, Net().eval(), data)
        assert result.test(BATCHES).metrics["sqnr_db"] > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda: Net(width=6), r"layer Net::Net/Conv2d\[conv\]/conv2d differs"),
        (lambda: Net(act=nn.ReLU6()), r"layer Net::Net/\w+\[act\]/\w+ differs"),
        (lambda: Net(act=nn.GELU()), r"layer Net::Net/\w+\[act\]/\w+ differs"),
        (lambda: Net(by=2.001), r"layer Net::Net/mul differs"),
        (lambda: with_tensor("shift", torch.ones(5)), "shift of layer Net::Net/shift differs"),
        (lambda: with_tensor("table", torch.zeros(5)), "table of layer Net::Net/table differs"),
        (lambda: with_tensor("table", torch.ones(1)), "table of layer Net::Net/table differs"),
        (
            lambda: with_tensor("fc", nn.Linear(4, 5)),
            r"fc\.\w+ of layer Net::Net/Linear\[fc\]/linear differs",
        ),
    ],
)
def test_a_changed_model_is_refused_by_name(
    change: Callable[[], Net], what: str, saved: Path
) -> None:
    with pytest.raises(ResultError, match=what):
        quantizer.load(saved, change().eval(), BATCHES)


def test_other_sizes_are_traced(saved: Path, no_trace: None) -> None:
    with pytest.raises(ModelError, match="was traced"):
        quantizer.load(saved, Net().eval(), [torch.randn(2, 3, 10, 10)])


class Tokens(nn.Module):
    """A model of any length; `seen` positions count, and samples mix by `mixed`."""

    def __init__(self, seen: int = 1000, mixed: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.seen, self.mixed = nn.Embedding(7, 4), seen, mixed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        places = torch.arange(tokens.shape[1])
        x = torch.where((places < self.seen)[:, None], x, 0.0)
        return x + self.mixed * (x.mean(0, keepdim=True) - x)


TOKENS = torch.randint(7, (2, 40), generator=torch.Generator().manual_seed(2))


def test_a_change_that_only_the_whole_length_or_several_samples_show_is_seen() -> None:
    graph = trace(Tokens(), (TOKENS,))
    assert graph.lengths
    assert reused(graph, Tokens(), TOKENS) is not None
    assert reused(graph, Tokens(), TOKENS[:1]) is not None
    # Ten positions fewer than the batch has, and more than the shorter call has
    assert reused(graph, Tokens(seen=30), TOKENS) is None
    assert reused(graph, Tokens(mixed=0.5), TOKENS) is None


def test_sizes_that_a_graph_states_wrongly_are_seen() -> None:
    graph = trace(Tokens(), (TOKENS,))
    node = graph.nodes[-1]
    for changes in ({"open_axes": ()}, {"shape": (2, 40, 4)}, {"shape": (None, None, 4)}):
        edited: dict[str, Any] = {"shape": node.shape, "open_axes": node.open_axes, **changes}
        wrong = graph.replaced(nodes=(*graph.nodes[:-1], replace(node, **edited)))
        assert reused(wrong, Tokens(), TOKENS) is None, changes


class Chain(nn.Module):
    """Products whose values are changed in place, whose inputs are drawn, and whose weight is
    used twice.
    """

    def __init__(self, inside: float = 1.0, order: str = "ab", noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Linear(4, 4)
        self.inside, self.order, self.noise = inside, order, noise

    def forward(self, x: Tensor) -> Tensor:
        parts = {name: getattr(self, name)(x) for name in self.order}
        y = (parts["a"] - parts["b"] * self.inside).relu_()
        y = self.c(y + self.noise * torch.rand_like(y)).add_(1)
        return self.c(y + self.noise * torch.rand_like(y))


class Products(TorchDispatchMode):
    """Counts the products inside the `with` block."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func.__name__.startswith(("convolution", "addmm"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_products_of_the_module_are_those_of_the_graph(noise: float) -> None:
    x = torch.randn(2, 3, 4, 4)
    graph = trace(Chain(noise=noise), (x,))
    with Products() as products:
        assert reused(graph, Chain(noise=noise), x) is not None
    # Of the module, and of the graph on one sample
    assert products.count == 2 * 4
    # A change between two products, one of which has the same weight
    assert reused(graph, Chain(inside=1.001, noise=noise), x) is None
    with Products() as products:
        assert reused(graph, Chain(order="ba", noise=noise), x) is not None
    assert products.count == 2 * 4 + 1


class Shifting(nn.Module):
    """A model that changes a buffer in place before it adds it."""

    def __init__(self, step: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.step = nn.Linear(3, 2), step
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if self.step:
            self.shift.add_(self.step)
        return y + self.shift


def test_the_graph_does_not_read_what_the_module_has_changed() -> None:
    x = torch.ones(2, 3)
    graph = trace(Shifting(), (x,))
    assert reused(graph, Shifting(), x) is not None
    assert reused(graph, Shifting(step=1.0), x) is None


class Literal(nn.Module):
    """A tensor that only the code holds, and numbers that are drawn."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.fc, self.noise = nn.Linear(3, 2), noise

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) + torch.tensor([1.0, 2.0])
        return y + self.noise * torch.rand_like(y)


def test_constants_of_the_code_are_in_a_file_of_their_own(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    module, data = Literal().eval(), [torch.ones(2, 3)]
    quantizer.calibrate(module, None, data).save(tmp_path)
    assert (tmp_path / "graph.safetensors").exists()
    request.getfixturevalue("no_trace")
    quantizer.load(tmp_path, module, data)


def test_random_numbers_are_no_reason_to_refuse(tmp_path: Path) -> None:
    module, data = Literal(noise=0.1).eval(), [torch.ones(2, 3)]
    quantizer.calibrate(module, None, data).save(tmp_path)
    quantizer.load(tmp_path, module, data)


class Pair(nn.Module):
    """An output of two tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sum": self.fc(x + y), "difference": self.fc(x - y)}


def test_outputs_and_arguments_are_those_of_the_model(tmp_path: Path) -> None:
    module, batch = Pair().eval(), {"x": torch.randn(2, 3), "y": torch.randn(2, 3)}
    graph = trace(module, (), batch)
    again = reused(graph, module, **batch)
    assert again is not None
    assert again.output == graph.output
    assert again.output_names == ("sum", "difference")
    assert reused(graph, module, batch["x"], batch["y"]) is None


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder and, beside it, a calibration of its model."""
    folder = saved_llama(tmp_path_factory.mktemp("folder") / "llama", llama())
    module = load_hugging_face(folder)
    quantizer.calibrate(module, None, tokens()).save(folder.parent / "results")
    return folder


@pytest.mark.usefixtures("llama_folder", "no_trace")
def test_a_hugging_face_folder_is_tested_without_a_trace(llama_folder: Path) -> None:
    results = llama_folder.parent / "results"
    longer = [{"input_ids": torch.arange(30).reshape(3, 10)}]
    for data in (tokens(), longer):
        module = load_hugging_face(llama_folder)
        result = quantizer.load(results, module, data)
        assert result.test(data).metrics["sqnr_db"] > 10
        output = result.network(**data[0])
        assert type(output) is type(module(**data[0]))


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}},
        {"hidden_act": "gelu"},
    ],
)
def test_a_hugging_face_folder_with_another_config_is_traced(
    change: dict[str, Any], llama_folder: Path, tmp_path: Path, no_trace: None
) -> None:
    shutil.copytree(llama_folder, tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    module = load_hugging_face(tmp_path / "llama")
    with pytest.raises(ModelError, match="was traced"):
        quantizer.load(llama_folder.parent / "results", module, tokens())


def test_another_call_of_a_hugging_face_folder_is_traced(
    llama_folder: Path, no_trace: None
) -> None:
    ids = tokens()[0]["input_ids"]
    module = load_hugging_face(llama_folder)
    for call in (
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        {"input_ids": ids.int()},
    ):
        with pytest.raises(ModelError, match="was traced"):
            quantizer.load(llama_folder.parent / "results", module, [call])
