"""A script for vai_q_pytorch runs without a change."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from support.runs import ROOT

SCRIPT = """
import argparse, torch
from pytorch_nndct.apis import torch_quantizer

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU()
        self.drop, self.fc = torch.nn.Dropout(), torch.nn.Linear(144, 5)

    def forward(self, x):
        return self.fc(self.drop(self.relu(self.conv(x)).flatten(1)))

def evaluate(model, loader, loss_fn):
    model.eval()
    top1, loss = 0, 0.0
    with torch.no_grad():
        for images, labels in loader:
            outputs = model(images)
            loss += float(loss_fn(outputs, labels))
            top1 += int((outputs.argmax(1) == labels).sum())
    return top1, loss

parser = argparse.ArgumentParser()
parser.add_argument("--quant_mode", default="calib", choices=["float", "calib", "test"])
parser.add_argument("--config_file", default=None)
parser.add_argument("--fast_finetune", action="store_true")
parser.add_argument("--deploy", action="store_true")
args, _ = parser.parse_known_args()
device = torch.device("cpu")
torch.manual_seed(0)
model = Net().to(device)
loader = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 5) for _ in range(3)]
loss_fn = torch.nn.CrossEntropyLoss()
input = torch.randn([1, 3, 8, 8])
if args.quant_mode == "float":
    quant_model = model
else:
    quantizer = torch_quantizer(
        args.quant_mode, model, (input,), device=device, quant_config_file=args.config_file
    )
    quant_model = quantizer.quant_model
if args.fast_finetune:
    if args.quant_mode == "calib":
        quantizer.fast_finetune(evaluate, (quant_model, loader, loss_fn))
    elif args.quant_mode == "test":
        quantizer.load_ft_param()
top1, loss = evaluate(quant_model, loader, loss_fn)
if args.quant_mode == "calib":
    quantizer.export_quant_config()
if args.deploy:
    quantizer.export_torch_script()
    quantizer.export_onnx_model()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    Path("script.py").write_text(SCRIPT)
    return "script.py"


def run(script: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", [script, *options])
    return runpy.run_path(script, run_name="__main__")


def test_a_script_calibrates_tests_and_deploys(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    before = run(script, monkeypatch, "--quant_mode", "float")
    run(script, monkeypatch, "--quant_mode", "calib", "--fast_finetune")
    info = json.loads(Path("quantize_result/quant_info.json").read_text("utf-8"))
    assert info["header"]["fast_finetune"] == "adaround"
    assert info["header"]["batches"] == 3
    after = run(script, monkeypatch, "--quant_mode", "test", "--fast_finetune", "--deploy")
    assert after["loss"] != before["loss"]
    assert after["loss"] == pytest.approx(before["loss"], rel=0.02)
    assert Path("quantize_result/Net_int.onnx").is_file()
    assert Path("quantize_result/Net_int.pt2").is_file()


def test_a_script_reads_its_config_file(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(ROOT / "configs" / "cpu_int8.json")
    run(script, monkeypatch, "--quant_mode", "calib", "--config_file", config)
    resolved = json.loads(Path("quantize_result/config.resolved.json").read_text("utf-8"))
    assert resolved["target_device"] == "CPU"


def test_what_a_script_cannot_have_is_said(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, monkeypatch, "--quant_mode", "float")
    from pytorch_nndct.apis import torch_quantizer
    from torch import nn, ones

    made = torch_quantizer("calib", nn.Linear(4, 2), (ones(1, 4),))
    with pytest.raises(RuntimeError, match="call quant_model before export_quant_config"):
        made.export_quant_config()
    with pytest.raises(RuntimeError, match="needs quant_mode 'test'"):
        made.export_onnx_model()
    with pytest.raises(NotImplementedError, match=r"no \.xmodel"):
        made.export_xmodel()
    with pytest.raises(ValueError, match="write bit_width into the file"):
        torch_quantizer("calib", nn.Linear(4, 2), (ones(1, 4),), bitwidth=4)
