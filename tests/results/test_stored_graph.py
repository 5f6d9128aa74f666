"""A calibration holds its graph: whoever reads it traces the model again if the code of the model
is another than calibration has traced, and gets the same either way.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.edits import sealed
from fuzz.results import agree_with_graph
from support.llamas import llama, tokens
from support.llamas import saved as saved_llama
from support.toys import TOYS, built
from torch import Tensor, nn

import quantizer
from quantizer.errors import ModelError, ResultError
from quantizer.graph.ir import Graph
from quantizer.graph.stored import graph_from_json
from quantizer.graph.tracing import trace as tracing
from quantizer.results import graph_file
from quantizer.results.graph_file import GraphFile, bound_graph, trace_module, write_graph
from quantizer.sources.batches import Batch
from quantizer.sources.hugging_face.loader import load_hugging_face
from quantizer.storage.permission import replacing

BATCHES = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))]


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be traced."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise ModelError("the model was traced")

    monkeypatch.setattr(tracing, "_export", refuse)


def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    """The graph of a module, as calibration makes it."""
    return trace_module(module, Batch(args, kwargs, None, None))


@pytest.fixture
def reused(tmp_path: Path) -> Callable[..., Graph | None]:
    """A function that returns a graph as its file gives it back, if it is used for a module and
    a call.
    """

    def graph_from_file(
        graph: Graph, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Graph | None:
        with replacing(overwrite=True):
            write_graph(tmp_path, graph)
        content = json.loads((tmp_path / "graph.json").read_text())
        seal = content.pop("traced_code")
        constants = {path: graph.tensors[path] for path in graph.constants}
        digest = graph_file._content_digest(content, constants)
        file = GraphFile(graph_from_json(content), constants, seal, digest)
        return bound_graph(file, module, Batch(args, kwargs, None, None))

    return graph_from_file


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_the_stored_graph_of_every_toy_is_that_of_a_trace(
    name: str, reused: Callable[..., Graph | None]
) -> None:
    toy = built(name)
    toy.module.eval()
    graph = traced(toy.module, *toy.args, **(toy.kwargs or {}))
    again = reused(graph, toy.module, *toy.args, **(toy.kwargs or {}))
    assert again is not None
    empty: dict[str, Any] = {"tensors": {}, "rebuild": None}
    assert repr(again.replaced(**empty)) == repr(graph.replaced(**empty))
    assert again.nodes == graph.nodes
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
    """A model of any length, of whose positions `seen` count."""

    def __init__(self, seen: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.seen = nn.Embedding(7, 4), seen

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return torch.where((places < self.seen)[:, None], self.embed(tokens), 0.0)


TOKENS = torch.randint(7, (2, 40), generator=torch.Generator().manual_seed(2))


def test_a_change_that_the_data_do_not_show_is_seen(
    reused: Callable[..., Graph | None],
) -> None:
    graph = traced(Tokens(), TOKENS)
    assert graph.lengths
    assert reused(graph, Tokens(), TOKENS) is not None
    assert reused(graph, Tokens(), TOKENS[:1]) is not None
    # Two thousand positions more than any sample has
    assert reused(graph, Tokens(seen=3000), TOKENS) is None


class Counting(nn.Module):
    """A model that counts its calls."""

    def __init__(self, step: float = 0.0) -> None:
        super().__init__()
        self.fc, self.step, self.calls = nn.Linear(3, 2), step, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.fc(x) + self.step * torch.rand(2)


def test_looking_at_the_code_leaves_the_model_as_it_was(
    reused: Callable[..., Graph | None],
) -> None:
    x, module, other = torch.ones(2, 3), Counting(1.0), Counting(2.0)
    graph = traced(module, x)
    state = torch.get_rng_state()
    assert reused(graph, module, x) is not None
    assert reused(graph, other, x) is None
    assert module.calls == [0]
    assert torch.equal(torch.get_rng_state(), state)


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


def test_outputs_and_arguments_are_those_of_the_model(
    reused: Callable[..., Graph | None],
) -> None:
    module, batch = Pair().eval(), {"x": torch.randn(2, 3), "y": torch.randn(2, 3)}
    graph = traced(module, **batch)
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
def test_the_graph_is_not_used_for_a_hugging_face_folder_with_another_config(
    change: dict[str, Any], llama_folder: Path, tmp_path: Path, no_trace: None
) -> None:
    shutil.copytree(llama_folder, tmp_path / "llama")
    file = tmp_path / "llama" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    module = load_hugging_face(tmp_path / "llama")
    # What is in a buffer is compared with the weights
    with pytest.raises((ModelError, ResultError), match=r"was traced|inv_freq of .* differs"):
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


def forget_the_code(folder: Path) -> None:
    """Make results those of an earlier version, which wrote another digest and took operators
    that are not stored any more.
    """
    path = folder / "graph.json"
    content = json.loads(path.read_text())
    content["code"] = content.pop("traced_code")
    content["nodes"][0]["target"] = "aten.one_hot.default"
    path.write_text(json.dumps(content))
    sealed(folder)


def edit_the_graph(folder: Path) -> None:
    """Change the graph and what quant_info.json says of it, as someone without the model."""
    path = folder / "graph.json"
    content = json.loads(path.read_text())
    for node in content["nodes"]:
        if node["op"] == "mul":
            node["attrs"]["other"] = 5.0
    path.write_text(json.dumps(content))
    agree_with_graph(folder)
    sealed(folder)


def test_results_of_earlier_versions_are_traced_again(
    saved: Path, request: pytest.FixtureRequest
) -> None:
    forget_the_code(saved)
    assert quantizer.load(saved, Net().eval(), BATCHES).test().metrics["sqnr_db"] > 10
    request.getfixturevalue("no_trace")
    with pytest.raises(ModelError, match="was traced"):
        quantizer.load(saved, Net().eval(), BATCHES)


def test_an_edited_graph_is_not_used_whatever_else_was_edited(saved: Path) -> None:
    edit_the_graph(saved)
    with pytest.raises(ResultError, match="layer Net::Net/mul differs"):
        quantizer.load(saved, Net().eval(), BATCHES)


def test_a_class_without_a_file_is_traced_again(tmp_path: Path) -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("class Typed(nn.Linear):\n    pass", space)
    module, data = space["Typed"](3, 2).eval(), [torch.ones(2, 3)]
    quantizer.calibrate(module, None, data).save(tmp_path)
    assert "traced_code" not in json.loads((tmp_path / "graph.json").read_text())
    assert quantizer.load(tmp_path, module, data).test().metrics["sqnr_db"] > 10


class Vandermonde(nn.Module):
    """A model with an operator that no stored graph may have."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.size = nn.Linear(3, 2), size

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.vander(self.fc(x), N=self.size).sum(1)


def test_a_model_with_an_operator_that_is_not_stored_is_traced_again(tmp_path: Path) -> None:
    data = [torch.ones(2, 3)]
    quantizer.calibrate(Vandermonde().eval(), None, data).save(tmp_path)
    assert not (tmp_path / "graph.json").exists()
    assert quantizer.load(tmp_path, Vandermonde().eval(), data).test().metrics["sqnr_db"] > 10
    with pytest.raises(ResultError, match="layer Vandermonde::Vandermonde/linalg_vander"):
        quantizer.load(tmp_path, Vandermonde(4).eval(), data)
