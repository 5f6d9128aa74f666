"""Code of the user's that would end the process: a sentence and an exit code that no gate has,
in every command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import document
from support.runs import calibrate, check
from torch import nn

import quantizer
from quantizer import Config, ModelQuantizer
from quantizer.cli.main import run_command
from quantizer.errors import DataError, ModelError, QuantizerError

FILE = """
import sys
import click
import torch
from torch import nn
from quantizer.errors import GateError

class Stop(BaseException):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        {init}

    def forward(self, x):
        {forward}
        return self.layer(x)

class Batches:
    def __iter__(self):
        for number in range(3):
            {batch}
            yield torch.ones(4, 3)

{top}

def model():
    {model}
    return Net().eval()

def calibration_data():
    {data}
    return Batches()

def evaluate(model, data):
    for batch in data:
        model(batch)
    {evaluate}
    return {{"top1": 1.0}}
"""
PLACES = ("init", "forward", "top", "model", "data", "batch", "evaluate")
DATA = ("data", "batch", "evaluate")
ENDS = {
    "exit": "sys.exit(0)",
    "exit 1": "sys.exit(1)",
    "generator": "raise GeneratorExit",
    "its own": "raise Stop('enough')",
    "a gate": "raise GateError('not met')",
    "click": "raise click.exceptions.Exit(0)",
    "input": "raise EOFError",
}
Capture = pytest.CaptureFixture[str]


def written(folder: Path, place: str, statement: str) -> str:
    """A model file with a statement at one place."""
    path = folder / "net.py"
    path.write_text(
        FILE.format(**{name: statement if name == place else "pass" for name in PLACES})
    )
    return str(path)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("place", PLACES)
def test_float_mode_says_what_ended(
    place: str, end: str, tmp_path: Path, capsys: Capture
) -> None:
    """Float mode runs code of every place."""
    file = written(tmp_path, place, ENDS[end])
    code = run_command(["--quant_mode", "float", "--model", file])
    assert code == (4 if place in DATA else 3)
    shown = capsys.readouterr()
    assert "raised" in shown.err
    assert ENDS[end] in shown.err, "the line of the user's code"
    assert "internal error" not in shown.err
    assert not shown.out


COMMANDS = {
    "calib": ["--quant_mode", "calib"],
    "plan": ["plan"],
    "inspect": ["inspect"],
    "analyze": ["analyze"],
}


@pytest.mark.parametrize("place", ["forward", "batch", "top"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_it(
    command: str, place: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, place, "sys.exit(0)")
    code = run_command([*COMMANDS[command], "--model", file])
    assert code == (4 if place == "batch" else 3)
    assert "SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["evaluate", "batch", "forward"])
def test_test_mode_says_it(place: str, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    file = written(tmp_path, "top", "")
    assert calibrate(out, model=file, config=None) == 0
    statement = "sys.exit(0)"
    if place == "forward":
        # evaluate() runs the float model, whose trace is as it was.
        statement = "torch.compiler.is_exporting() or sys.exit(0)"
    written(tmp_path, place, statement)
    assert check(out, model=file) == (3 if place == "forward" else 4)
    assert "SystemExit: 0" in capsys.readouterr().err


def test_a_call_after_the_first_says_it(tmp_path: Path, capsys: Capture) -> None:
    """The second call is that which is compared with the trace."""
    file = written(tmp_path, "forward", "torch.compiler.is_exporting() or sys.exit(0)")
    assert calibrate(tmp_path / "out", model=file, config=None) == 3
    assert (
        "running the model on the first batch again raised SystemExit: 0"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out" / "quant_info.json").exists()


def test_a_property_of_the_model_says_it(tmp_path: Path, capsys: Capture) -> None:
    """Which runs where nobody thinks of code of the user's."""
    file = written(tmp_path, "init", "pass")
    text = Path(file).read_text()
    method = "    def named_parameters(self, *_, **__): sys.exit(0)\n\n    def forward"
    Path(file).write_text(text.replace("    def forward", method))
    assert run_command(["inspect", "--model", file]) == 3
    assert "error: the model raised SystemExit: 0" in capsys.readouterr().err


class Ending(nn.Module):
    """Ends where it is told to."""

    def __init__(self, end: BaseException | None = None) -> None:
        super().__init__()
        self.layer, self.end = nn.Linear(3, 2), end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.end is not None:
            raise self.end
        return self.layer(x)  # type: ignore[no-any-return]


def ending(end: BaseException) -> Iterator[torch.Tensor]:
    yield torch.ones(4, 3)
    raise end


STATIC = Config.from_dict(
    {"global_quant_config": {"weight": {"dtype": "int8"}, "input_tensors": {"dtype": "int8"}}}
)
BATCHES = [torch.ones(4, 3)]
CALLS: dict[str, tuple[Callable[[BaseException], Any], type[QuantizerError]]] = {
    "in place": (
        lambda end: ModelQuantizer(STATIC).quantize_model(Ending(end), BATCHES),
        ModelError,
    ),
    "in place, data": (
        lambda end: ModelQuantizer(STATIC).quantize_model(Ending(), ending(end)),
        DataError,
    ),
    "traced": (lambda end: quantizer.calibrate(Ending(end), document(), BATCHES), ModelError),
    "traced, data": (
        lambda end: quantizer.calibrate(Ending(), document(), lambda: ending(end)),
        DataError,
    ),
    "evaluate": (
        lambda end: quantizer.calibrate(Ending(), document(), BATCHES).test(
            evaluate=lambda *_: [*ending(end)]
        ),  # type: ignore[arg-type]
        DataError,
    ),
}


@pytest.mark.parametrize(
    "end", [SystemExit(0), GeneratorExit(), BaseException("mine")], ids=repr
)
@pytest.mark.parametrize("call", CALLS)
def test_python_gets_the_errors_of_the_package(call: str, end: BaseException) -> None:
    run, error = CALLS[call]
    with pytest.raises(error, match=type(end).__name__):
        run(end)


class Unwilling(nn.Linear):
    """Takes nothing that a linear layer does not have."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "quantizers":
            raise SystemExit(0)
        super().__setattr__(name, value)


def test_a_model_in_place_stays_as_it_was() -> None:
    """Its first layer is quantized already when the second one ends the run."""
    model = nn.Sequential(nn.Linear(3, 3), Unwilling(3, 2))
    weight = model[0].weight.detach().clone()
    with pytest.raises(ModelError, match="SystemExit"):
        ModelQuantizer(STATIC).quantize_model(model, BATCHES)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_is_what_it_was(place: str, tmp_path: Path, capsys: Capture) -> None:
    file = written(tmp_path, place, "raise KeyboardInterrupt")
    assert run_command(["--quant_mode", "float", "--model", file]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_python_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        ModelQuantizer(STATIC).quantize_model(Ending(KeyboardInterrupt()), BATCHES)
