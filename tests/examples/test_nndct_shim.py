"""A script for vai_q_pytorch runs without a change."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
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
parser.add_argument("--inspect", action="store_true")
args, _ = parser.parse_known_args()
device = torch.device("cpu")
torch.manual_seed(0)
model = Net().to(device)
loader = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 5) for _ in range(3)]
loss_fn = torch.nn.CrossEntropyLoss()
input = 100 * torch.randn([1, 3, 8, 8])  # unlike the data
if args.quant_mode == "float":
    quant_model = model
    if args.inspect:
        from pytorch_nndct.apis import Inspector
        Inspector("DPUCAHX8L_ISA0_SP").inspect(model, (input,), device=device)
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
    quantizer.export_xmodel(deploy_check=False, output_dir="quantize_result")
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
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("onnxruntime", reason="needs quantizer-torch[onnx]")
    before = run(script, monkeypatch, "--quant_mode", "float")
    run(script, monkeypatch, "--quant_mode", "calib", "--fast_finetune")
    info = json.loads(Path("quantize_result/quant_info.json").read_text("utf-8"))
    assert info["header"]["fast_finetune"] == "adaround"
    assert info["header"]["batches"] == 3
    after = run(script, monkeypatch, "--quant_mode", "test", "--fast_finetune")
    assert after["loss"] != before["loss"]
    assert after["loss"] == pytest.approx(before["loss"], rel=0.02)
    with pytest.raises(SystemExit, match=r"^error: no \.xmodel .* call export_onnx_model\(\)"):
        run(script, monkeypatch, "--quant_mode", "test", "--deploy")
    assert Path("quantize_result/Net_int.onnx").is_file()
    assert Path("quantize_result/Net_int.pt2").is_file()
    assert "few networks are usable" not in caplog.text, "the data judge, not input_args"
    assert "is not known" not in capfd.readouterr().out


def test_a_script_reads_its_config_file(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = str(ROOT / "configs" / "cpu_int8.json")
    run(script, monkeypatch, "--quant_mode", "calib", "--config_file", config)
    resolved = json.loads(Path("quantize_result/config.resolved.json").read_text("utf-8"))
    assert resolved["target_device"] == "CPU"


def test_a_wrong_config_file_ends_a_script_before_the_model_runs(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"target_device": "XPU"}')
    monkeypatch.setattr("torch.nn.Module.__call__", None)
    with pytest.raises(SystemExit) as ended:
        run(script, monkeypatch, "--quant_mode", "calib", "--config_file", str(wrong))
    assert 'wrong.json:1:19: "XPU" is not a target device' in str(ended.value)


def test_inspector_writes_what_the_dpu_runs(
    script: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run(script, monkeypatch, "--quant_mode", "float", "--inspect")
    table = Path("quantize_result/inspect_DPUCAHX8L_ISA0_SP.txt").read_text("utf-8")
    assert "bx4x6x6  DPU     conv2d" in table
    assert "4 of 4 operators run on the DPU (DPUCZDX8G_ISA1_B4096)" in table
    printed = capfd.readouterr().out
    assert table in printed
    assert "those of DPUCAHX8L_ISA0_SP are not known" in printed


def test_the_three_steps_are_one_call_each(
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run(script, monkeypatch, "--quant_mode", "float")
    from pytorch_nndct.apis import torch_quantizer

    torch.manual_seed(0)
    data = torch.randn(8, 4)
    net = torch.nn.Linear(4, 2)
    made = torch_quantizer("calib", net, (100 * data,))
    seen: list[torch.Tensor] = []

    def forward(model: torch.nn.Module) -> None:
        seen.append(model(data))

    made.quantize(forward, (made.quant_model,))
    assert torch.equal(seen[-1], net(data))
    made.test(forward, (made.quant_model,))
    assert not torch.equal(seen[-1], net(data))
    made.deploy(forward, (made.quant_model,), fmt="torch_script")
    assert Path("quantize_result/Linear_int.pt2").is_file()
    assert "is not known" not in capfd.readouterr().out
    torch_quantizer("test", net, (100 * data,)).export_torch_script()
    assert "how accurate it is, is not known" in capfd.readouterr().out
    assert "few networks are usable" not in caplog.text


def test_stubs_mark_the_part_that_is_quantized(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, monkeypatch, "--quant_mode", "float")
    from pytorch_nndct.apis import torch_quantizer
    from pytorch_nndct.nn import DeQuantStub, QuantStub

    layers = [torch.nn.Linear(4, 4), QuantStub(), torch.nn.Linear(4, 4), DeQuantStub()]
    made = torch_quantizer("calib", torch.nn.Sequential(*layers), (torch.ones(1, 4),))
    made.quant_model(torch.ones(1, 4))
    made.export_quant_config()
    info = json.loads(Path("quantize_result/quant_info.json").read_text("utf-8"))
    names = str(list(info["tensors"]))
    assert "Linear[2]" in names and "Linear[0]" not in names, names


def test_what_a_script_cannot_have_ends_it_with_a_sentence(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script, monkeypatch, "--quant_mode", "float")
    from pytorch_nndct import apis

    net, example = torch.nn.Linear(4, 2), (torch.ones(1, 4),)
    made = apis.torch_quantizer("calib", net, example)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("call quant_model with data before export_quant_config", made.export_quant_config),
        ("needs quant_mode 'test'", made.export_onnx_model),
        (r"no \.xmodel .* export_onnx_model", made.export_xmodel),
        (r"no \.xmodel", lambda: made.deploy(print, ())),
        (r"no \.xmodel", lambda: apis.dump_xmodel(deploy_check=True)),
        ("training is not available", lambda: apis.QatProcessor(net, example)),
        ("training is not available", lambda: made.deploy_model),
        ("write bit_width into", lambda: apis.torch_quantizer("calib", net, bitwidth=4)),
        ("'calib' or 'test'", lambda: apis.torch_quantizer("deploy", net)),
        ("register_op", lambda: apis.torch_quantizer("calib", net, custom_quant_ops=["a"])),
        (
            "run the script in calib mode",
            lambda: apis.torch_quantizer("test", net, output_dir="nowhere"),
        ),
    ]
    for sentence, call in refused:
        with pytest.raises(SystemExit, match=f"^error: .*({sentence})"):
            call()
