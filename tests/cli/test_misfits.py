"""Batches, models and files that do not fit: the message names the key, the layer or the file,
and the way out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantizer.cli.main import run_command

Capture = pytest.CaptureFixture[str]
FILE = """
from dataclasses import dataclass
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 4)
    def features(self, x):
        return torch.relu(self.conv(x)).mean((2, 3))
    def forward(self, x):
        return self.fc(self.features(x))

@dataclass
class Out:
    logits: torch.Tensor
    hidden: torch.Tensor
    unused: torch.Tensor | None = None

class Structured(Net):
    def forward(self, x):
        hidden = self.features(x)
        return Out(self.fc(hidden), hidden)

def model():
    torch.manual_seed(0)
    return Net().eval()

def structured():
    return Structured().eval()

def registered():
    torch.export.register_dataclass(Out)
    return Structured().eval()

def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()

IMAGES = torch.ones(4, 3, 8, 8)
def images(): return [IMAGES] * 2
def gray(): return [torch.ones(4, 1, 8, 8)]
def last(): return [torch.ones(4, 8, 8, 3)]
def bytes_(): return [IMAGES.byte()]
def nested(): return [((IMAGES,), torch.arange(4))]
def later(): return [IMAGES, torch.ones(4, 1, 8, 8)]
def nan():
    spoiled = IMAGES.clone()
    spoiled[0, 0, 0, 0] = float("nan")
    return [IMAGES, spoiled]
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "net.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return "net.py"


CONV = "the layer conv, a Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1)), got"


@pytest.mark.parametrize(
    ("data", "remedies"),
    [
        ("gray", [f"{CONV} [4, 1, 8, 8] float32", "it takes 3 channels in axis 1"]),
        (
            "last",
            [
                f"{CONV} [4, 8, 8, 3] float32",
                "it takes 3 channels in axis 1; they seem to be in the last axis: "
                "permute(0, 3, 1, 2) moves them",
            ],
        ),
        ("bytes_", [f"{CONV} [4, 3, 8, 8] uint8", "it computes in float32: convert the batch"]),
        (
            "nested",
            [
                "argument 0 is a tuple of 1: for inputs and a target write (left, right, "
                "target), not ((left, right), target)",
                "it failed in the layer conv, a Conv2d(3, 8, kernel_size=(3, 3), "
                "stride=(1, 1))",
            ],
        ),
    ],
)
def test_a_first_batch_that_does_not_fit_names_the_layer(
    data: str, remedies: list[str], net: str, capsys: Capture
) -> None:
    assert run_command(["inspect", "--model", net, "--data", f"{net}:{data}"]) == 4
    error, *lines = capsys.readouterr().err.splitlines()[-len(remedies) - 3 :]
    text = "\n".join([error, *lines])
    assert "running the model on the first batch (" in text
    assert "help: " + "\n".join(remedies) + "\n" in text
    assert "net.py:" in lines[-1], "the line of the user's code comes last"


def test_a_layer_of_torch_is_named_without_a_line_of_the_users(
    net: str, capsys: Capture
) -> None:
    command = ["inspect", "--model", f"{net}:flat", "--data", f"{net}:images"]
    assert run_command(command) == 4
    error = capsys.readouterr().err
    assert "a Linear(in_features=12, out_features=2, bias=True), got [4, 192] float32" in error
    assert "\nit takes 12 values in the last axis\n" in error
    assert "no frame of your code" not in error


@pytest.mark.parametrize(
    ("data", "help_text"),
    [
        ("nan", "leave these samples out, or replace the values: no scale fits them"),
        ("later", "all batches need the shape and dtype of the first one; b is their size"),
    ],
)
def test_a_later_batch_that_does_not_fit_is_nothing_to_resume_from(
    data: str, help_text: str, net: str, capsys: Capture
) -> None:
    command = ["--quant_mode", "calib", "--model", net, "--data", f"{net}:{data}"]
    assert run_command(command) == 4
    error = capsys.readouterr().err
    assert "error: batch 1" in error
    assert error.endswith(f"{help_text}\n")
    assert "--resume" not in error
    assert not list(Path("quantize_result").glob("checkpoint*"))


def test_a_dataclass_has_to_be_known_to_torch(net: str, capsys: Capture) -> None:
    data = ["--data", f"{net}:images"]
    assert run_command(["inspect", "--model", f"{net}:structured", *data]) == 3
    error = capsys.readouterr().err
    assert "Structured cannot be traced: it returns an Out, of which torch does not" in error
    assert "call torch.export.register_dataclass(Out) in the model's file" in error
    calib = ["--quant_mode", "calib", "--model", f"{net}:registered", *data]
    assert run_command(calib) == 0
    test = ["--quant_mode", "test", "--model", f"{net}:registered", *data]
    assert run_command([*test, "--gate", "sqnr_db[hidden]>=10"]) == 0


@pytest.mark.parametrize(
    ("model", "message", "help_text"),
    [
        (
            "org/Net-3.2",
            "there is no folder org/Net-3.2; quantizer downloads nothing",
            "`hf download org/Net-3.2 --local-dir Net-3.2`, then --model Net-3.2",
        ),
        ("net.json", "net.json is not a model", "a config is given as --config_file net.json"),
        (
            "adapter",
            "adapter holds an adapter of PEFT, not a whole model",
            "AutoPeftModelForCausalLM.from_pretrained('adapter').merge_and_unload()",
        ),
    ],
)
def test_what_is_no_model_says_what_it_is(
    model: str, message: str, help_text: str, net: str, capsys: Capture
) -> None:
    Path("net.json").write_text("{}")
    Path("adapter").mkdir()
    (Path("adapter") / "adapter_config.json").write_text("{}")
    assert run_command(["inspect", "--model", model]) == 3
    error = capsys.readouterr().err
    assert f"error: {message}\n" in error
    assert help_text in error


def test_a_folder_of_an_unknown_quantization_is_refused(net: str, capsys: Capture) -> None:
    pytest.importorskip("transformers", reason="it reads the folder (extra: llm)")
    Path("model").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {}}
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (Path("model") / "config.json").write_text(json.dumps(config))
    assert run_command(["inspect", "--model", "model"]) == 3
    error = capsys.readouterr().err
    message = "error: model is quantized by bitsandbytes, which quantizer cannot dequantize\n"
    assert f"{message}help: give the folder of the float model" in error


def test_a_model_in_place_of_a_config_is_recognized(net: str, capsys: Capture) -> None:
    assert run_command(["inspect", "--config_file", net, "--model", "net.json"]) == 2
    error = capsys.readouterr().err
    assert "net.py:1:1: error QZ004: this is Python, not a config" in error
    assert "a model is given as --model net.py" in error
