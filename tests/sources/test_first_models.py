"""Mistakes in the file of a model and in its data: each error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from quantizer.errors import DataError, ModelError, QuantizerError
from quantizer.results.graph_file import trace_module
from quantizer.sources.batches import Batch
from quantizer.sources.data import load_batches
from quantizer.sources.models import LoadedModel, load_model

NET = """
import torch
from torch import nn

def model():
    return nn.Linear(3, 2)
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], LoadedModel]:
    """Loads a model's file with this text."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str) -> LoadedModel:
        (tmp_path / "net.py").write_text(dedent(text))
        return load_model("net.py")

    return load_text


def error_of(call: Callable[[], Any], kind: type[QuantizerError]) -> tuple[str, str]:
    """The message and the help of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value.message, str(caught.value.help)


def test_a_line_that_python_cannot_read_has_its_place(
    load: Callable[[str], LoadedModel], tmp_path: Path
) -> None:
    message, remedy = error_of(lambda: load("def model()\n    return 3\n"), ModelError)
    assert message == "net.py raised SyntaxError: expected ':'"
    assert remedy == f"{tmp_path / 'net.py'}:1:12: def model()"


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            "import no_such_package.parts",
            "install no_such_package where quantizer is installed",
        ),
        ("from .blocks import Block", "give package.module:NAME from the folder"),
    ],
)
def test_an_import_that_fails_says_what_to_do(
    line: str, remedy: str, load: Callable[[str], LoadedModel]
) -> None:
    _, remedies = error_of(lambda: load(line), ModelError)
    assert remedy in remedies
    assert f"net.py:1 in <module>: {line}" in remedies


@pytest.mark.parametrize(
    ("body", "message", "remedy"),
    [
        ("return None", "returned None", "end the function with `return`"),
        ("return nn.Linear(2, 2).state_dict()", "an OrderedDict", "this is a state_dict"),
        ("return nn.Linear(2, 2), 3", "returned a tuple", "return the module alone"),
    ],
)
def test_what_is_no_module_is_named_with_a_remedy(
    body: str, message: str, remedy: str, load: Callable[[str], LoadedModel]
) -> None:
    text = f"from torch import nn\n\ndef model():\n    {body}\n"
    told, remedies = error_of(lambda: load(text), ModelError)
    assert message in told
    assert remedy in remedies


def test_functions_that_need_arguments_are_not_called(
    load: Callable[[str], LoadedModel],
) -> None:
    loaded = load(
        NET + "def calibration_data(root, split='val'):\n    yield torch.ones(2, 3)\n"
    )
    assert loaded.calibration_data is not None
    message, remedy = error_of(loaded.calibration_data, DataError)
    assert message == "calibration_data of net.py needs arguments: root"
    assert "a function without parameters that calls calibration_data" in remedy
    text = NET + "def evaluate(model): return {}\n"
    message, _ = error_of(lambda: load(text), DataError)
    assert message == "evaluate of net.py takes (model), and it is called with 2 arguments"


def test_a_generator_object_is_no_data(load: Callable[[str], LoadedModel]) -> None:
    loaded = load(NET + "calibration_data = (torch.ones(2, 3) for _ in range(2))\n")
    assert loaded.calibration_data is not None
    message, remedy = error_of(loaded.calibration_data, DataError)
    assert message.endswith("is an iterator, which can be read only once")
    assert "make it a function" in remedy


def test_a_name_that_is_nearly_right_is_noted(
    load: Callable[[str], LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    load(NET + "def calib_data(): return []\ndef helper(): return 1\n")
    assert "net.py has no calibration_data(), but calib_data()" in caplog.text
    assert "helper" not in caplog.text
    caplog.clear()
    load(NET + "def calibration_data(): return []\ndef calib_data(): return []\n")
    assert "calib_data()" not in caplog.text


@pytest.mark.parametrize(
    ("item", "remedy"),
    [
        (torch.ones(2, 3).numpy(), "torch.from_numpy(array)"),
        ("images/a.png", "a tensor of what is in the file"),
        (1.0, "dimension 0 counts the samples"),
        ((torch.ones(2, 3).numpy(), torch.ones(2)), "torch.from_numpy(array)"),
        ((torch.ones(3), 1), "DataLoader(dataset, batch_size=32)"),
        ((torch.ones(2, 3), torch.ones(2), "a.png"), "forward() of the model takes input"),
    ],
)
def test_items_that_are_no_batches_have_a_remedy(item: Any, remedy: str) -> None:
    batches = load_batches([item], module=nn.Linear(3, 2))
    message, remedies = error_of(batches.first, DataError)
    assert message.startswith("batch 0 of the data of the model's file")
    assert remedy in remedies


def test_data_that_give_nothing_say_why() -> None:
    none: Any = lambda: None  # noqa: E731
    message, remedy = error_of(load_batches(none).first, DataError)
    assert message == "the data of the model's file is None, not an iterable of batches"
    assert "end the function with `return`" in remedy
    _, remedy = error_of(load_batches(list).first, DataError)
    assert "give at least one batch" in remedy
    used = iter([torch.ones(2, 3)])
    batches = load_batches(lambda: used)
    batches.first()
    _, remedy = error_of(lambda: list(batches), DataError)
    assert remedy == "return a new iterator in each call: the first one is used up"


class Silent(nn.Module):
    """Its author forgot to return something."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> None:
        self.fc(x)


def test_a_model_that_returns_nothing_is_refused() -> None:
    batch = Batch.of(torch.ones(2, 3))
    message, remedy = error_of(lambda: trace_module(Silent(), batch), ModelError)
    assert message == "Silent returns None"
    assert "end forward() with `return`" in remedy


class Pair(nn.Module):
    """Both inputs are optional, as in models of transformers, and both are needed."""

    def forward(self, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        assert left is not None
        return left * right.shape[0]  # type: ignore[union-attr]


def test_arguments_that_a_batch_leaves_at_none_are_named() -> None:
    batch = Batch.of(torch.ones(2, 3))
    _, remedy = error_of(lambda: trace_module(Pair(), batch), DataError)
    assert "the batch leaves these arguments of forward() at None: right" in remedy


def test_one_image_without_samples_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    trace_module(nn.Conv2d(3, 2, 1), Batch.of(torch.ones(3, 4, 4)))
    assert "fixes its batch size at 3" in caplog.text
    assert "[3, 4, 4] has no axis of samples: add it with unsqueeze(0)" in caplog.text


def test_images_without_their_one_channel_are_noted() -> None:
    batch = Batch.of(torch.ones(3, 4, 4))
    model = nn.Sequential(nn.Conv2d(1, 2, 1))
    _, remedy = error_of(lambda: trace_module(model, batch), DataError)
    assert "has no axis of channels: add it with unsqueeze(1)" in remedy


def test_arrays_that_forward_does_not_take_are_named_before_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    numpy.savez(path, foo=numpy.ones((2, 3)), bar=numpy.ones(2))
    batches = load_batches(str(path), module=nn.Linear(3, 2))
    message, remedy = error_of(batches.first, DataError)
    assert message == f"{path} has the key 'foo', which the model does not take"
    assert remedy == "forward() of the model takes input"


def test_batches_with_gradients_are_detached() -> None:
    images = nn.Parameter(torch.ones(2, 3))
    batch = load_batches([(images, torch.ones(2, requires_grad=True))], module=nn.Linear(3, 2))
    first = batch.first()
    assert not first.args[0].requires_grad
    assert first.target is not None and not first.target.requires_grad
