"""`--for`: what a target of --to cannot hold is told, and refused, before anything is
calibrated.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.llamas import llama, saved
from support.runs import ROOT

from quantizer.cli.main import run_command
from quantizer.export.targets import EXPORTERS

NET = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

def calibration_data():
    return [torch.ones(2, 8)]
"""
DYNAMIC, STATIC, MX = (
    str(ROOT / "configs" / f"{name}.json") for name in ("dynamic_int8", "cpu_int8", "mxfp4")
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for target in ("onnx", "compressed-tensors"):
        for package in EXPORTERS[target].needs:
            pytest.importorskip(
                package, reason=f"--for {target} needs it (extra: {EXPORTERS[target].extra})"
            )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def plan(config: str, *more: str) -> int:
    return run_command(["plan", "--config_file", config, "--model", "net.py", *more])


def test_the_plan_tells_it_layer_by_layer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(MX, "--for", "safetensors", "--for", "onnx", "--for", "pt2") == 2
    said = capsys.readouterr()
    held, refused = said.out.split("--to onnx can express all tensors but these:")
    assert "--to safetensors can express all tensors" in held
    rows, pt2 = refused.split("--to pt2 can express all tensors")
    said_of_rows = [" ".join(line.split()[1:]) for line in rows.splitlines()[2:4]]
    assert said_of_rows == ["input has dynamic ranges of groups"] * 2
    assert not pt2.strip()
    assert "--to onnx cannot express 2 tensors" in said.err
    assert "set its qscheme to per_token" in said.err


def test_the_plan_lists_it_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(STATIC, "--for", "compressed-tensors", "--json") == 2
    found = json.loads(capsys.readouterr().out)["refused"]["compressed-tensors"]
    assert [row["role"] for row in found] == ["activation"], (
        "the others are inputs of linear layers"
    )
    assert found[0]["layer"] == "Sequential::Sequential/Linear[2]/linear"
    assert found[0]["why"].startswith("is quantized between operators")
    assert found[0]["help"].startswith("quantize only inputs of linear layers")
    assert plan(DYNAMIC, "--for", "compressed-tensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["refused"] == {"compressed-tensors": []}


def test_only_some_targets_hold_negative_scales(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = {"dtype": "int4", "symmetric_scale": "quant_min"}
    config = {"global_quant_config": {"weight": weight}}
    (folder / "negative.json").write_text(json.dumps(config))
    targets = ("safetensors", "pt2_float", "onnx", "pt2")
    options = [option for target in targets for option in ("--for", target)]
    assert plan("negative.json", *options, "--json") == 2
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert not refused["safetensors"] and not refused["pt2_float"]
    for target in ("onnx", "pt2"):
        assert [row["role"] for row in refused[target]] == ["weights", "weights"]
        assert refused[target][0]["why"].startswith("may have negative scales")
        assert refused[target][0]["help"] == 'set its symmetric_scale to "half_range"'


def test_calibration_does_not_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--quant_mode", "calib", "--model", "net.py", "-q"]
    assert run_command([*command, "--config_file", MX, "--for", "onnx"]) == 2
    assert "each has dynamic ranges of groups" in capsys.readouterr().err
    assert not (folder / "quantize_result" / "quant_info.json").exists()
    assert run_command([*command, "--config_file", DYNAMIC, "--for", "compressed-tensors"]) == 0
    run = json.loads((folder / "quantize_result" / "run.json").read_text())
    assert run["options"]["for"] == ["compressed-tensors"]
    assert run_command(["--quant_mode", "test", "--model", "net.py", "--for", "onnx"]) == 2
    assert "--for needs calib mode" in capsys.readouterr().err


def test_checkpoints_are_for_models_of_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other targets are written all the same, and what was measured is shown."""
    command = ["--model", "net.py", "-q"]
    assert run_command(["--quant_mode", "calib", "--config_file", DYNAMIC, *command]) == 0
    capsys.readouterr()
    targets = ["--deploy", "compressed-tensors", "--deploy", "safetensors"]
    assert run_command(["--quant_mode", "test", *command, *targets]) == 2
    said = capsys.readouterr()
    assert "the model is a Sequential without a config of transformers" in said.err
    assert "sqnr_db" in said.out
    written = sorted(path.name for path in (folder / "quantize_result" / "export").iterdir())
    assert written == ["Sequential.safetensors", "verify.json"]


def test_a_profile_is_checked_as_a_target_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitting = str(ROOT / "configs" / "tensorrt_int8.json")
    assert plan(fitting, "--for", "tensorrt", "--for", "npu") == 0
    held = capsys.readouterr().out
    for profile in ("tensorrt", "npu"):
        assert f"--to onnx --onnx_profile {profile} can express all tensors" in held
    assert plan(STATIC, "--for", "tuned") == 0
    held = capsys.readouterr().out
    assert "--to onnx --onnx_profile tuned can express all tensors" in held
    assert plan(STATIC, "--for", "tensorrt") == 2
    refused = capsys.readouterr()
    assert "is not int8 with the zero point 0, as TensorRT needs it" in refused.out
    assert "--onnx_profile tensorrt cannot express 3 tensors" in refused.err
    assert "start from the preset tensorrt_int8" in refused.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--quant_mode", "calib", "--model", "net.py", "--for", "tensorrt"],
            "--to onnx --onnx_profile tensorrt",
        ),
        (["run", "net.py", "--to", "tensorrt"], "--to tensorrt"),
        (
            ["run", "net.py", "--to", "onnx", "--onnx_profile", "tensorrt"],
            "--to onnx --onnx_profile tensorrt",
        ),
    ],
)
def test_a_profile_that_does_not_fit_is_refused_before_calibration(
    options: list[str], words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([*options, "--config_file", STATIC]) == 2
    error = capsys.readouterr().err
    assert f"error: {words}: " in error
    assert not (folder / "quantize_result" / "quant_info.json").exists()


def test_a_rounded_embedding_that_a_file_has_as_floats_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder / "llama", llama())
    command = ["--config_file", str(ROOT / "configs" / "weight_int8.json"), "--model", "llama"]
    targets = ["--for", "compressed-tensors", "--for", "safetensors"]
    assert run_command(["plan", *command, *targets, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["stored_as_floats"]
    assert found.pop("safetensors") == []
    [[name]] = found.values()
    assert name.endswith("[embed_tokens]/embedding")
    remark = f"compressed-tensors stores the rounded weights of {name} as floats"
    assert run_command(["plan", *command, *targets]) == 0
    assert capsys.readouterr().out.count(remark) == 1
    run = ["run", "llama", "--to", "w8", *command[:2], "--seq_len", "8"]
    assert run_command(run) == 0
    said = capsys.readouterr()
    assert f"note: {remark}" in said.err, "a config of the user's is honoured"
    assert "In float: lm_head (excluded)." in said.out


@pytest.mark.parametrize(
    ("drawn", "layer"),
    [
        ("y, torch.multinomial(y.softmax(-1), 1)", "multinomial"),
        ("torch.bernoulli(y.sigmoid())", "bernoulli"),
        ("y + torch.randint(0, 3, (4,))", "randint"),
        ("torch.nn.functional.gumbel_softmax(y)", "exponential"),
        ("torch.nn.functional.scaled_dot_product_attention(y, y, y, None, 0.5)", "scaled_dot"),
    ],
)
def test_random_numbers_are_refused_before_calibration(
    folder: Path, capsys: pytest.CaptureFixture[str], drawn: str, layer: str
) -> None:
    network = f"""
class Net(torch.nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return {drawn}
"""
    text = NET.replace("\ndef model", f"{network}\ndef model", 1)
    text = text.replace("return torch.nn.Sequential(", "return Net(")
    (folder / "net.py").write_text(text)
    config = str(ROOT / "configs" / "cpu_int8.json")
    assert plan(config, "--for", "pt2") == 2
    shown = capsys.readouterr()
    assert layer in shown.out.rpartition("but these:")[2]
    assert "draws random numbers" in shown.out
    assert plan(config, "--for", "safetensors") == 0


def test_outputs_of_random_numbers_have_a_warning_instead_of_advice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = NET.replace("return torch.nn.Sequential(", "return torch.nn.Sequential(Noise(), ")
    noise = "class Noise(torch.nn.Module):\n    def forward(self, x):\n"
    noise += "        return x + torch.rand_like(x)\n\n"
    (folder / "net.py").write_text(text.replace("def model", f"{noise}def model", 1))
    assert run_command(["run", "net.py", "--to", "w8"]) == 0
    shown = capsys.readouterr()
    assert "Warning: output 0 depends on random numbers, which " in shown.out
    assert "few networks are usable" not in shown.err


def test_a_run_refuses_an_operator_before_it_reads_a_second_batch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = NET.replace("torch.nn.ReLU()", "Inverse()", 1)
    inverse = "class Inverse(torch.nn.Module):\n    def forward(self, x):\n"
    inverse += "        return torch.linalg.inv(x)\n\n"
    text = text.replace("def model", f"{inverse}def model", 1)
    data = (
        "def calibration_data():\n    yield torch.randn(2, 8, 8)\n    raise OSError('second')\n"
    )
    text = text.partition("def calibration_data")[0] + data
    (folder / "net.py").write_text(text)
    assert run_command(["run", "net.py", "--to", "onnx"]) == 2
    error = capsys.readouterr().err
    assert "computes linalg_inv, for which torch.onnx has no form" in error
