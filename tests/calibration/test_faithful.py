"""A trace is compared with its model once: what it has frozen is told, and the model is left as
it was.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from torch import Tensor, nn
from torch.nn import functional as F

import quantizer
from quantizer.calibration import faithful
from quantizer.cli.main import run_command
from quantizer.errors import ModelError
from quantizer.results.graph_file import trace_module
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import preserve_module_state
from quantizer.storage.deferred_tensor import DeferredTensor

BATCH = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two layers, and a state that forward() may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop, self.calls = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Dropout(),
            0,
        )
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    def between(self, y: Tensor) -> Tensor:
        return y


class AlwaysDropping(Net):
    def between(self, y: Tensor) -> Tensor:
        return F.dropout(y, 0.5, training=True)


class Training(Net):
    def between(self, y: Tensor) -> Tensor:
        self.train()
        return self.drop(y)


class Noisy(Net):
    def between(self, y: Tensor) -> Tensor:
        return y + torch.rand_like(y)


class Shifted(Net):
    """Draws integers, which have no sums of floats."""

    def between(self, y: Tensor) -> Tensor:
        return y + torch.randint(0, 3, (4,))


class NoisyInPython(Net):
    def between(self, y: Tensor) -> Tensor:
        return y * random.random()


class Counting(Net):
    def between(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y * self.calls


class CountingAlone(Net):
    def between(self, y: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        return y


class Otherwise(Net):
    def between(self, y: Tensor) -> Tensor:
        return y * 2 if torch.compiler.is_exporting() else y


class Nearly(Net):
    def between(self, y: Tensor) -> Tensor:
        return y * 1.001 if torch.compiler.is_exporting() else y


class Unstable(Net):
    """Orders values by what rounding decides, and reads the result as torch's code may."""

    def between(self, y: Tensor) -> Tensor:
        rounded = y * (1 + 1e-6) if torch.compiler.is_exporting() else y
        order = torch.topk(torch.sin(rounded * 1e8), 4, dim=1).indices.view(-1)
        return y.gather(1, order.view(y.shape))


class Counted(Net):
    """Returns integers."""

    def between(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1) + self.calls


def calibrated(model: nn.Module, data: Any = None) -> quantizer.Result:
    return quantizer.calibrate(model, document(), [BATCH] if data is None else data)


def state(model: Net) -> Any:
    """All that a call may change."""
    modes = [part.training for part in model.modules()]
    buffers = [each.clone() for each in model.buffers()]
    return modes, buffers, model.calls, list(model.seen), torch.get_rng_state().tolist()


RANDOM = {
    AlwaysDropping: "first at AlwaysDropping::AlwaysDropping/dropout; comparisons with the float",
    Training: "first at Training::Training/Dropout[drop]/dropout",
    Noisy: "first at Noisy::Noisy/rand_like",
    Shifted: "first at Shifted::Shifted/randint; comparisons with the float model include",
    NoisyInPython: "which its trace has frozen",
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_outputs_are_a_warning_that_names_the_layer(
    kind: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(kind())
    [warning] = [
        each.getMessage() for each in caplog.records if "another output" in each.getMessage()
    ]
    assert "it draws random numbers in evaluation mode" in warning
    assert RANDOM[kind] in warning


ERRORS = {
    Counting: (
        "Counting gives another output when it is called again on the same batch: it changes "
        "calls in forward()"
    ),
    Counted: "it changes calls in forward()",
    Otherwise: "the trace of Otherwise computes something else than Otherwise: outputs differ "
    "by",
}


@pytest.mark.parametrize("kind", ERRORS)
def test_what_a_trace_has_frozen_is_an_error(kind: type[Net]) -> None:
    with pytest.raises(ModelError) as caught:
        calibrated(kind())
    assert ERRORS[kind] in caught.value.message
    if kind is Otherwise:
        assert caught.value.message.endswith("first at Otherwise::Otherwise/Linear[b]/linear")


@pytest.mark.parametrize("kind", ERRORS)
def test_what_a_trace_has_frozen_in_a_small_output_is_an_error(kind: type[Net]) -> None:
    """Beside an output that is right and a million times as large."""

    class Beside(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Any:
            return x * 1e6, super().forward(x)

    with pytest.raises(ModelError, match=r"gives another output|computes something else"):
        calibrated(Beside())


def test_a_small_difference_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    calibrated(Nearly())
    assert (
        "the trace of Nearly computes something else than Nearly: outputs differ by 0.00"
        in caplog.text
    )


def test_what_rounding_decides_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    calibrated(Unstable())
    assert "rounding errors decide a part of the output of Unstable" in caplog.text


@pytest.mark.parametrize("kind", [Net, CountingAlone])
def test_what_changes_no_output_is_not_told(
    kind: type[Net], caplog: pytest.LogCaptureFixture
) -> None:
    calibrated(kind())
    assert not caplog.messages


@pytest.mark.parametrize("kind", [Net, CountingAlone, Training, Noisy, Counting])
def test_the_model_and_the_generators_are_left_as_they_were(kind: type[Net]) -> None:
    model = kind()
    before, weights = state(model), copy.deepcopy(model.state_dict())
    try:
        trace_module(model, Batch.of(BATCH), compared=True)
    except ModelError:
        assert kind is Counting
    assert str(state(model)) == str(before)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in weights.items())


class Busy(nn.Module):
    """Changes everything that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.inner, self.table, self.numbers = nn.Linear(1, 1), {"a": 1}, [1]

    def forward(self, x: Tensor) -> Tensor:
        self.sum += x.sum()
        self.last = x.mean()[None]
        self.table["b"], self.more = 2, 3
        self.numbers += [2]
        self.inner.new = x
        del self.table["a"]
        return x


def test_all_that_a_call_changes_comes_back() -> None:
    model = Busy()
    hook = model.inner.register_forward_hook(lambda *_: None)
    buffers, table, numbers = dict(model.named_buffers()), model.table, model.numbers
    with preserve_module_state(model) as kept:
        model(torch.ones(1))
        assert kept.changed() == ["table", "numbers", "inner.new", "more"]
    assert {name: id(each) for name, each in model.named_buffers()} == {
        n: id(each) for n, each in buffers.items()
    }
    assert (float(model.sum), float(model.last)) == (0, 0)
    assert (model.table, model.numbers) == ({"a": 1}, [1])
    assert model.table is table and model.numbers is numbers
    assert not hasattr(model, "more") and not hasattr(model.inner, "new")
    hook.remove()
    assert not model.inner._forward_hooks


@pytest.mark.filterwarnings("ignore")
def test_programs_have_no_state_to_keep() -> None:
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.ReLU())
    with preserve_module_state(scripted) as kept:
        scripted(BATCH)
    assert kept.changed() == []
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4)), (BATCH,)).module()
    assert trace_module(program, Batch.of(BATCH), compared=True).nodes


def test_few_samples_are_run_and_the_loader_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, sizes = [], []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            asked.append(1)
            yield from [torch.randn(16, 4), torch.randn(16, 4)]

    class Sized(Net):
        def between(self, y: Tensor) -> Tensor:
            if isinstance(y.shape[0], int) and not torch.compiler.is_exporting():
                sizes.append(y.shape[0])
            return y

    calibrated(Sized(), Loader())
    compared, passes = list(sizes), len(asked)
    # The model is called again with the same samples, once. The last call shows which functions
    # the model calls
    assert compared == [faithful.COMPARED_SAMPLES[0], *faithful.COMPARED_SAMPLES, 2]
    asked.clear()
    monkeypatch.setattr("quantizer.results.graph_file.compare_with_model", lambda *_, twice: ())
    calibrated(Sized(), Loader())
    assert len(asked) == passes


def test_a_model_whose_weights_stay_in_files_is_not_run() -> None:
    model = Counting()
    weight = model.a.weight.detach()
    model.a._parameters["weight"] = nn.Parameter(
        DeferredTensor(weight.shape, weight.dtype, lambda: weight)
    )
    assert trace_module(model, Batch.of(BATCH), compared=True).is_deferred


def test_the_shell_says_so_with_the_models_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import torch\nclass Net(torch.nn.Module):\n    n = 0\n    def forward(self, x):\n "
        " "
        " "
        " "
        "    self.n += 1\n"
    )
    code += (
        "        return x * self.n\ndef model(): return Net()\ndef calibration_data(): "
        "return "
        "[torch.ones(2, 3)]\n"
    )
    (tmp_path / "net.py").write_text(code)
    (tmp_path / "config.json").write_text(json.dumps(document()))
    given = [
        "--config_file",
        str(tmp_path / "config.json"),
        "--model",
        str(tmp_path / "net.py"),
    ]
    assert (
        run_command(["--quant_mode", "calib", *given, "--output_dir", str(tmp_path / "out")])
        == 3
    )
    assert (
        "error: Net gives another output when it is called again on the same batch"
        in capsys.readouterr().err
    )


def test_hooks_that_the_first_call_adds_are_taken_away_with_its_attributes() -> None:
    """As transformers does to capture outputs: twice as many hooks would capture twice."""
    seen: list[int] = []

    class Capturing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            if not hasattr(self, "has_hooks"):
                self.has_hooks = True
                self.fc.register_forward_hook(lambda *_: seen.append(1))
                self.fc.register_forward_pre_hook(lambda *_: seen.append(2))
            return self.fc(x)

    model = Capturing()
    with preserve_module_state(model):
        model(torch.ones(1, 2))
    seen.clear()
    model(torch.ones(1, 2))
    assert seen == [2, 1]
