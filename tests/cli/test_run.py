"""`--quant_mode`: what an engineer at a shell sees, types and finds on disk."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.extended import extended, extended_except
from support.runs import DIGITS, EXAMPLE, ROOT, calibrate, check, differing

from quantizer.cli.main import run_command

CONV1 = "ResNet::ResNet/Conv2d[conv1]/conv2d"
CONV1_OUTPUT = "ResNet::ResNet/ReLU[relu]/relu"
pytest.importorskip(
    "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
)

PRESETS = sorted((ROOT / "configs").glob("*.json"))
GGUF = tuple(f"gguf_{name}" for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0"))
LINEAR = (
    "fp8_blocks",
    "mxfp4",
    "nvfp4",
    "weight_int4_group",
    *GGUF,
    "gguf_iq4_nl",
)  # presets for networks of linear layers
# Their super-blocks are of 256 inputs
SUPER_BLOCKS = ("gguf_q4_k", "gguf_q4_k_m", "gguf_q5_k", "gguf_q5_k_m", "gguf_q6_k")
# Groups are of 128 inputs
ALGORITHMS = ("gptq_int4_group", "awq_int4_group", "smoothquant_int8")
# The README's two commands run the example
ELSEWHERE = ("w4a4_rotation", "example")
NOT_FOR_IMAGES = (*LINEAR, *SUPER_BLOCKS, *ALGORITHMS, *ELSEWHERE)
OTHERS = [path for path in PRESETS if path.stem not in NOT_FOR_IMAGES]
# Tests of joins, lengths, exports, profiles and phones calibrate with these; without a config the
# second runs
OFTEN_RUN = ("cpu_int8", "default", "tensorrt_int8", "npu_int8", "mobile_int8")
PERCEPTRON = """
import torch
from sklearn.datasets import load_digits

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

def calibration_data():
    return [torch.tensor(load_digits().data[:256] / 16, dtype=torch.float32)]
"""
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=2, use_cache=False, **sizes))

def calibration_data():
    return [torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
"""


def test_the_two_commands_of_the_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "quantize_result"
    common = ["--config_file", EXAMPLE, "--model", DIGITS, "--output_dir", str(folder)]
    assert run_command(["--quant_mode", "calib", *common]) == 0
    calibration = capsys.readouterr()
    assert re.search(r"layer_quantize_config\[0\]\s+torch\.nn\.Conv2d\s+9", calibration.out)
    assert re.search(r"layer_quantize_config\[1\]\s+\S+input\.2\s+1", calibration.out)
    assert "note QZ404" in calibration.err
    assert {path.name for path in folder.iterdir()} == {
        ".quantizer.json",
        "ResNet.py",
        "checksums.json",
        "config.resolved.json",
        "graph.json",
        "plan.json",
        "quant_info.json",
        "report.html",
        "report.json",
        "run.json",
        "run.log",
        "statistics.safetensors",
        "weights.safetensors",
    }

    assert run_command(["--quant_mode", "test", *common]) == 0
    result = capsys.readouterr().out
    float_top1, quantized_top1 = map(float, re.search(r"top1 +(\S+) +(\S+)", result).groups())  # type: ignore[union-attr]
    assert float_top1 >= 0.99
    assert abs(float_top1 - quantized_top1) <= 0.005
    assert float(re.search(r"sqnr_db (\S+)", result).group(1)) > 30  # type: ignore[union-attr]
    assert str(folder) in result.replace("\n", "")
    assert json.loads((folder / "report.json").read_text())["metrics"]["sqnr_db"] > 30
    assert (folder / "layers.csv").read_text().count("\n") == 36


def test_the_layer_entry_of_the_seed_takes_effect(calibrated: Path) -> None:
    tensors = json.loads((calibrated / "quant_info.json").read_text())["tensors"]
    activation, weights = tensors[CONV1_OUTPUT]["activation"], tensors[CONV1]["weights"]
    assert activation["spec"]["round_mode"] == "half_up"
    planned = {
        row["name"]: row for row in json.loads((calibrated / "plan.json").read_text())["layers"]
    }
    origins = planned[CONV1_OUTPUT]["tensors"]["activation"]["origins"]
    assert origins["round_mode"].startswith("example.json:")
    assert CONV1 in activation["shared_with"]
    assert weights["spec"]["qscheme"] == "per_tensor"
    assert isinstance(weights["scale"], float)
    other = tensors["ResNet::ResNet/Sequential[layer1]/BasicBlock[0]/Conv2d[conv1]/conv2d"][
        "weights"
    ]
    assert other["spec"]["qscheme"] == "per_channel"
    assert len(other["scale"]) == 16


def test_two_runs_are_byte_identical(calibrated: Path, tmp_path: Path) -> None:
    first, second = calibrated, tmp_path / "second"
    assert calibrate(second) == 0
    for folder in (first, second):
        assert check(folder) == 0
    assert not differing(first, second)


def test_no_result_holds_an_absolute_path(calibrated: Path) -> None:
    for path in calibrated.iterdir():
        if path.name not in ("run.json", "run.log", ".quantizer.json"):
            assert str(ROOT).encode() not in path.read_bytes()


def test_the_resolved_config_is_valid_and_gives_the_same_results(
    calibrated: Path, tmp_path: Path
) -> None:
    resolved = calibrated / "config.resolved.json"
    assert run_command(["validate", str(resolved)]) == 0
    assert calibrate(tmp_path / "again", config=str(resolved)) == 0
    before, after = (
        json.loads((f / "quant_info.json").read_text())
        for f in (calibrated, tmp_path / "again")
    )
    assert before["header"]["config"] == after["header"]["config"]
    for layer, roles in before["tensors"].items():
        for role, entry in roles.items():
            assert after["tensors"][layer][role]["scale"] == entry["scale"]


@pytest.mark.slow
@pytest.mark.parametrize("name", extended_except(LINEAR, *LINEAR[:3], "gguf_q4_1"))
def test_a_preset_for_linear_layers_calibrates_and_tests(name: str, tmp_path: Path) -> None:
    model = tmp_path / "perceptron.py"
    model.write_text(PERCEPTRON)
    assert (
        calibrate(
            tmp_path / "out", config=str(ROOT / "configs" / f"{name}.json"), model=str(model)
        )
        == 0
    )
    assert check(tmp_path / "out", "--gate", "sqnr_db>=14", model=str(model)) == 0


@pytest.mark.parametrize("name", [*ALGORITHMS, "gguf_q4_k", *extended(*SUPER_BLOCKS[1:])])
def test_a_preset_with_large_groups_calibrates_and_tests(name: str, tmp_path: Path) -> None:
    model = tmp_path / "perceptron.py"
    copies = 4 if name in SUPER_BLOCKS else 2
    wider = PERCEPTRON.replace("Linear(64", f"Linear({64 * copies}")
    model.write_text(wider.replace("float32)", f"float32).repeat(1, {copies})"))
    assert (
        calibrate(
            tmp_path / "out", config=str(ROOT / "configs" / f"{name}.json"), model=str(model)
        )
        == 0
    )
    assert check(tmp_path / "out", "--gate", "sqnr_db>=18", model=str(model)) == 0


@pytest.mark.slow
def test_the_preset_for_language_models_calibrates_and_tests(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "llama.py"
    model.write_text(LLAMA)
    config = str(ROOT / "configs" / "w4a4_rotation.json")
    assert calibrate(tmp_path / "out", config=config, model=str(model)) == 0
    assert check(tmp_path / "out", "--gate", "sqnr_db>=10", model=str(model)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    extended_except(OTHERS, *(path for path in OTHERS if path.stem not in OFTEN_RUN)),
    ids=lambda path: path.stem,
)
def test_every_other_preset_calibrates_and_tests(preset: Path, tmp_path: Path) -> None:
    assert calibrate(tmp_path / "out", config=str(preset)) == 0
    assert (
        check(tmp_path / "out", "--gate", "top1_agreement>=0.98", "--gate", "sqnr_db>=15") == 0
    )


def test_without_a_config_the_dpu_default_runs(tmp_path: Path) -> None:
    assert calibrate(tmp_path / "out", config=None) == 0
    assert check(tmp_path / "out", "--gate", "top1_agreement>=0.95") == 0
    tensors = json.loads((tmp_path / "out" / "quant_info.json").read_text())["tensors"]
    weights = tensors[CONV1]["weights"]
    assert weights["spec"]["round_mode"] == "std_round"
    assert weights["scale"] == 2.0 ** -weights["position"]
    assert tensors[CONV1_OUTPUT]["activation"]["spec"]["round_mode"] == "half_up"


def test_float_mode_prints_the_float_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--quant_mode", "float", "--model", DIGITS, "-q"]) == 0
    assert float(capsys.readouterr().out.split()[1]) >= 0.99


def test_json_goes_to_stdout_alone(
    calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert calibrate(tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 35
    assert check(calibrated, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    written = json.loads((calibrated / "report.json").read_text())
    rows = {(row["layer"], row["tensor"]): row for row in written["layers"]}
    assert (report["metrics"], report["pairs"]) == (written["metrics"], written["pairs"])
    assert all(
        row.items() <= rows[row["layer"], row["tensor"]].items() for row in report["layers"]
    )
    assert len(rows) == len(report["layers"])
    assert (
        report["metrics"]["top1_drop"]
        == report["metrics"]["top1_float"] - report["metrics"]["top1"]
    )
    local = [row["local_sqnr_db"] for row in report["layers"]]
    assert local == sorted(local)
    for row in report["layers"]:
        assert (row["accumulated_sqnr_db"] is None) == (row["tensor"] in ("weights", "bias")), (
            row
        )


@pytest.mark.parametrize(
    ("gate", "code", "said"),
    [
        ("sqnr_db>=20", 0, ""),
        ("sqnr_db >= 300", 1, "not met: sqnr_db >= 300"),
        ("top1_drop<=0.05", 0, ""),
        ("sqnr>=20", 2, "did you mean sqnr_db?"),
        ("sqnr_db=20", 2, "not a comparison"),
    ],
)
def test_gates_decide_the_exit_code(
    calibrated: Path, gate: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(calibrated, "--gate", gate) == code
    assert said in capsys.readouterr().err


def test_piped_output_has_no_control_characters(
    calibrated: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert check(calibrated, "--names", "exact", "--top", "all", quiet=False) == 0
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert "\r" not in out + err
    assert CONV1_OUTPUT in out, "layer names must survive a pipe in one piece"


def test_random_data_is_stamped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(tmp_path / "out", "--data", "random:8x1x8x8") == 0
    assert "note: calibrated on random data" in capsys.readouterr().out
    assert check(tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "The network was calibrated on random data." in printed
    assert "figures are of random data" not in printed
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["calibration_stamp"] == "random data"
    assert report["stamp"] is None, "the figures are of the file's own data"


def test_inspect_prints_the_layers_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path / "out", "--inspect", "--names", "exact", quiet=False) == 0
    assert CONV1 in capsys.readouterr().out


def test_results_of_another_model_are_not_overwritten_unasked(
    calibrated: Path, toy: object, capsys: pytest.CaptureFixture[str]
) -> None:
    model = toy()  # type: ignore[operator]
    assert calibrate(calibrated, model=model, config=None) == 5
    assert "holds results of ResNet, not of Linear" in capsys.readouterr().err
    assert calibrate(calibrated, "--overwrite", model=model, config=None) == 0


def test_plan_inspect_and_explain_tell_the_same_story(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    look = ["--config_file", EXAMPLE, "--model", DIGITS]
    assert run_command(["plan", *look, "--json", "-o", str(tmp_path / "plan.json")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan == json.loads((tmp_path / "plan.json").read_text())
    assert plan["weight_bytes"]["quantized"] < plan["weight_bytes"]["float"] / 3
    layer = next(row for row in plan["layers"] if row["name"] == CONV1_OUTPUT)
    assert layer["tensors"]["activation"]["spec"]["round_mode"] == "half_up"
    assert run_command(["plan", *look]) == 0
    assert "half_up" in capsys.readouterr().out

    assert run_command(["explain", *look, "conv1"]) == 0
    explained = capsys.readouterr().out
    assert re.search(r"per_channel +false +\S+example\.json:\d+:\d+", explained)
    assert run_command(["explain", *look, "conv9"]) == 2
    assert "closest: " in capsys.readouterr().err

    file = ["-o", str(tmp_path / "ResNet.py")]
    assert run_command(["inspect", *look, "--top", "all", *file]) == 0
    assert "keeps the quantization of its input" in capsys.readouterr().out
    assert CONV1 in (tmp_path / "ResNet.py").read_text()


def test_results_can_be_moved(calibrated: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "results"
    moved.parent.mkdir()
    shutil.move(calibrated, moved)
    assert check(moved) == 0


def test_calibrating_again_removes_what_the_old_test_found(calibrated: Path) -> None:
    assert check(calibrated) == 0
    assert (calibrated / "layers.csv").exists()
    assert calibrate(calibrated) == 0
    assert not (calibrated / "layers.csv").exists()
    assert json.loads((calibrated / "report.json").read_text())["metrics"] == {}


@pytest.mark.parametrize("size", ["8", "lots", "-1GB", "GB"])
def test_a_size_of_memory_has_a_unit(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path, "--memory", size) == 2
    assert f"'{size}' is not a size of memory; write 8GB or 512MB" in " ".join(
        capsys.readouterr().err.split()
    )


def test_values_out_of_memory_change_no_byte(tmp_path: Path) -> None:
    """Those of fast finetuning and of bias correction, which this preset has."""
    folders = [tmp_path / "all", tmp_path / "none"]
    preset = ROOT / "configs" / "cpu_int8.json"
    assert json.loads(preset.read_text("utf-8"))["include_bias_corr"]
    for folder, size in zip(folders, ("1GB", "0B"), strict=True):
        more = ("--memory", size, "--fast_finetune")
        assert calibrate(folder, *more, config=str(preset)) == 0
    assert not differing(*folders)


def test_the_peak_of_memory_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--quant_mode",
        "calib",
        "--model",
        DIGITS,
        "--output_dir",
        str(tmp_path),
        "--subset_len",
        "8",
    ]
    assert run_command(arguments) == 0
    assert re.fullmatch(
        r"peak memory (\d+ MB|\d+\.\d\d GB)", capsys.readouterr().out.splitlines()[-1]
    )
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["peak_memory_bytes"] > run["peak_memory_over_imports_bytes"] >= 0


def test_a_run_that_does_not_fit_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.storage.process_memory.available_bytes", lambda: 1000)
    assert calibrate(tmp_path) == 0
    said = capsys.readouterr().err
    assert re.search(
        r"calibration needs about \d+ MB more memory, and 1 kB are free: use a smaller "
        r"--batch_size",
        said,
    )
    monkeypatch.setattr("quantizer.storage.process_memory.total_bytes", lambda: 2000)
    assert calibrate(tmp_path, "--overwrite") == 6
    assert re.search(
        r"error: calibration would need about .* of memory, and the machine has 2 kB",
        capsys.readouterr().err,
    )
    assert check(tmp_path) == 6


def test_the_plan_knows_what_calibration_may_keep(
    toy: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else that of the tests before, which nothing here reaches
    monkeypatch.setattr("quantizer.storage.process_memory.peak_bytes", lambda: 0)
    model, peaks = toy("return [torch.randn(1 << 15, 3) for _ in range(64)]"), []
    for memory in ("0B", "1GB"):
        arguments = [
            "plan",
            "--model",
            model,
            "--fast_finetune",
            "--memory",
            memory,
            "-o",
            str(tmp_path / "plan.json"),
            "--overwrite",
        ]
        assert run_command(arguments) == 0
        peaks.append(
            json.loads((tmp_path / "plan.json").read_text())["peak_memory_bytes"]["calib"]
        )
    assert peaks[1] - peaks[0] > 20_000_000


def test_the_plan_knows_the_batches_of_test_mode(
    toy: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.storage.process_memory.peak_bytes", lambda: 0)
    model, peaks = Path(toy()), []
    for evaluation in ("", "\ndef evaluation_data():\n    return [torch.ones(1 << 20, 3)]\n"):
        model.write_text(model.read_text() + evaluation)
        arguments = ["plan", "--model", str(model), "-o", str(tmp_path / "plan.json")]
        assert run_command([*arguments, "--overwrite"]) == 0
        peaks.append(json.loads((tmp_path / "plan.json").read_text())["peak_memory_bytes"])
    assert peaks[1]["test"] - peaks[0]["test"] > 4 * (5 << 20)
    assert abs(peaks[1]["calib"] - peaks[0]["calib"]) < 20_000_000
