"""`quantizer run` makes a config, results and a file in one call, and says what came out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.llamas import llama, saved

from quantizer.cli.main import run_command
from quantizer.commands.searching.commands import analyze
from quantizer.report.next_step import DATA_OPTIONS, try_next
from quantizer.report.verdict import MAX_LINES

MODEL = """import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    )

def calibration_data():
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 3, 4, 4, generator=generator) for _ in range(2)]
    return [(batch, torch.arange(8) % 3) for batch in inputs]
"""
INVERSE = MODEL.replace(
    """def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(""",
    """class Inverse(torch.nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return torch.linalg.inv(y.unsqueeze(1) * y.unsqueeze(2) + 4 * torch.eye(3))

def model():
    torch.manual_seed(0)
    return Inverse(""",
)
WITHOUT_DATA = MODEL[: MODEL.index("def calibration_data")]
WITH_EXAMPLE = f"{WITHOUT_DATA}def example_input():\n    return torch.ones(1, 3, 4, 4)\n"


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_one_call_leaves_a_config_results_a_report_and_a_verified_file(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    gates = ["--gate", "sqnr_db>=10", "--gate", "onnx_int8_share>=0.5"]
    gates += ["--gate", "latency_ms<=1e6"]
    assert run_command(["run", write(MODEL), "-q", *gates]) == 0
    lines = lines_of(capsys)
    assert len(lines) <= MAX_LINES
    assert lines[0].startswith("PASS: gate sqnr_db>=10: met (")
    assert lines[1].startswith(
        "Wrote quantize_result/export/Sequential.onnx: uint8 weights, uint8 activations; "
    )
    assert any(line.startswith("top1 is ") for line in lines)
    assert any("multiplications in int8" in line for line in lines)
    # What would be faster limits nothing
    assert not any(line.startswith("Note: ") for line in lines)
    assert lines[-1].startswith("Next: check in quantize_result/quantize_config.json")
    assert Path("quantize_result/export/Sequential.onnx").is_file()
    report = json.loads(Path("quantize_result/report.json").read_text())
    assert f"Next: {try_next(report).line}" == lines[-1]
    held = {"sqnr_db>=10": True, "onnx_int8_share>=0.5": True, "latency_ms<=1e6": True}
    assert report["gates"] == held
    (file,) = report["exports"]
    assert (file["file"], file["kernels"]["share"]) == ("Sequential.onnx", 1.0)
    engines = [check["engine"] for check in file["checks"]]
    assert engines[:2] == [
        "ONNX Runtime, default settings",
        "ONNX Runtime, without optimizations",
    ]
    page = Path("quantize_result/report.html").read_bytes()
    assert b'<section id="exports">' in page
    assert run_command(["report", "quantize_result"]) == 0
    assert Path("quantize_result/report.html").read_bytes() == page


def test_the_verdict_names_the_integers_that_the_file_has(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(MODEL)
    assert run_command(["run", model, "--to", "pt2", "-q", "--pt2_activations", "int8"]) == 0
    assert ".pt2: int8 weights, int8 activations; " in lines_of(capsys)[1]


def test_the_verdict_has_what_limits_the_file(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(MODEL), "--to", "npu", "-q"]) == 0
    assert lines_of(capsys)[2].startswith("Note: the file is for an NPU, which did not run it.")
    verified = json.loads(Path("quantize_result/export/verify.json").read_text())
    assert verified["Sequential.onnx"]["remarks"]


def test_the_next_command_reads_the_data_of_the_run(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--to", "w8", "--gate", "sqnr_db>=200", "--subset_len", "9", "--seed", "4"]
    assert run_command(["run", write(MODEL), "-q", *asked, "--minutes", "0"]) == 1
    told = lines_of(capsys)[-1]
    assert " --subset_len 9 --seed 4 --apply` finds" in told
    report = json.loads(Path("quantize_result/report.json").read_text())
    assert f"Next: {try_next(report).line}" == told
    assert report["exports"] == []


def test_analyze_takes_every_option_of_the_next_command() -> None:
    named = {option.name for option in analyze.params}
    assert set(DATA_OPTIONS) <= named


def test_the_modes_repeat_a_run_byte_for_byte(write: Callable[[str], str]) -> None:
    model = write(MODEL)
    assert run_command(["run", model, "-q", "--to", "w8", "-o", "one"]) == 0
    again = ["--config_file", "one/quantize_config.json", "--model", model, "-q"]
    assert run_command(["--quant_mode", "calib", "--output_dir", "two", *again]) == 0
    test = ["--quant_mode", "test", "--output_dir", "two", *again, "--deploy", "safetensors"]
    assert run_command(test) == 0
    for path in sorted(Path("two").rglob("*")):
        if path.is_file() and path.name not in (
            "run.json",
            "run.log",
            ".quantizer.json",
            "report.html",
        ):
            twin = Path("one", path.relative_to("two"))
            assert path.read_bytes() == twin.read_bytes(), path


def test_a_gate_that_does_not_hold_is_exit_1_with_what_to_try(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--to", "w8", "--gate", "sqnr_db>=200", "--minutes", "0"]
    code = run_command(["run", write(MODEL), "-q", *asked])
    printed = capsys.readouterr()
    assert code == 1
    assert printed.out.startswith("FAIL: gate sqnr_db>=200: not met (")
    assert "Next: `quantizer analyze --metric 'sqnr_db>=200' --config_file" in printed.out
    assert "error: not met: sqnr_db>=200; nothing is deployed" in printed.err
    assert not Path("quantize_result/export").exists()


def test_an_existing_config_is_taken_as_it_is(write: Callable[[str], str]) -> None:
    model = write(MODEL)
    assert run_command(["run", model, "-q", "--to", "w8"]) == 0
    config = Path("quantize_result/quantize_config.json")
    edited = config.read_text().replace('"int8"', '"int4"')
    config.write_text(edited)
    assert run_command(["run", model, "-q", "--to", "w8"]) == 0
    assert config.read_text() == edited
    resolved = json.loads(Path("quantize_result/config.resolved.json").read_text())
    assert resolved["global_quant_config"]["weight"]["dtype"] == "int4"


def test_a_layer_is_kept_in_float_in_a_new_config_and_in_that_of_an_earlier_run(
    write: Callable[[str], str],
) -> None:
    model = write(MODEL)
    keep = ["--keep_float", "kind:head", "--keep_float", "0"]
    config = Path("quantize_result/quantize_config.json")
    assert run_command(["run", model, "-q", "--to", "w8", *keep[:2]]) == 0
    assert run_command(["run", model, "-q", "--to", "pt2", "--overwrite", *keep[:2]]) == 0
    assert json.loads(config.read_text())["exclude"] == ["kind:head"]
    assert run_command(["run", model, "-q", "--to", "pt2", *keep[2:]]) == 0
    both = config.read_text()
    assert json.loads(both)["exclude"] == ["kind:head", "0"]
    # They stay, and are not added twice
    assert run_command(["run", model, "-q", "--to", "pt2", *keep]) == 0
    assert run_command(["run", model, "-q", "--to", "pt2"]) == 0
    assert config.read_text() == both
    plan = json.loads(Path("quantize_result/plan.json").read_text())
    assert not [node for node in plan["layers"] if "weights" in node.get("tensors", {})]


def test_layers_of_both_forms_are_kept_in_float(write: Callable[[str], str]) -> None:
    model = write(MODEL)
    for destination in ("w8", "pt2"):
        asked = ["--to", destination, "-o", destination, "--keep_float", "3"]
        assert run_command(["run", model, "-q", *asked]) == 0
        config = json.loads(Path(destination, "quantize_config.json").read_text())
        assert "3" in config["exclude"]
        plan = json.loads(Path(destination, "plan.json").read_text())
        roles = {node["name"]: node.get("tensors", {}) for node in plan["layers"]}
        assert "weights" in roles["Sequential::Sequential/Conv2d[0]/conv2d"]
        assert roles["Sequential::Sequential/Linear[3]/linear"] == {}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kind:heads", "did you mean 'kind:head'"),
        ("Sequential::Sequential/Linear[4]/linear", "Linear[3]/linear'"),
        ("*x", "`"),
    ],
)
def test_a_layer_that_is_not_there_is_refused_before_anything_is_written(
    name: str, meant: str, write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(MODEL), "-q", "--keep_float", name]) == 2
    error = capsys.readouterr().err
    assert f"--keep_float: '{name}' matches no layer of Sequential" in error
    assert meant in error
    assert not Path("quantize_result/quantize_config.json").exists()


def test_a_config_of_the_user_is_not_changed(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(MODEL)
    assert run_command(["run", model, "-q", "--to", "w8"]) == 0
    config = Path("quantize_result/quantize_config.json")
    config.write_text(config.read_text().replace('"int8"', '"int4"'))
    edited = config.read_bytes()
    line = 'leave --keep_float out, and add "exclude": ["3"] to it'
    for options in ([], ["--config_file", str(config)]):
        capsys.readouterr()
        asked = ["run", model, "-q", "--to", "w8", "--keep_float", "3", *options]
        assert run_command(asked) == 2
        assert line in capsys.readouterr().err
        assert config.read_bytes() == edited


def test_a_config_for_another_destination_is_refused_with_the_difference(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(MODEL)
    assert run_command(["run", model, "-q", "--to", "w8"]) == 0
    config = Path("quantize_result/quantize_config.json").read_bytes()
    capsys.readouterr()
    assert run_command(["run", model, "-q", "--to", "w4"]) == 2
    error = capsys.readouterr().err
    assert "was made for --to w8, not for --to w4: " in error
    assert '/global_quant_config/weight/dtype is "int8" instead of "int4"' in error
    assert Path("quantize_result/quantize_config.json").read_bytes() == config
    assert run_command(["run", model, "-q", "--to", "w4", "--overwrite"]) == 0


def test_a_refused_destination_is_not_in_the_way_of_another(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The refusal names the option that the user has, and leaves no config."""
    model = write(INVERSE)
    assert run_command(["run", model, "-q", "--to", "onnx"]) == 2
    error = capsys.readouterr().err
    assert "error: --to onnx: " in error
    assert "or use --to pt2" in error
    config = Path("quantize_result/quantize_config.json")
    assert not config.exists()
    assert run_command(["run", model, "-q", "--to", "pt2"]) == 0
    written = config.read_bytes()
    assert run_command(["run", model, "-q", "--to", "onnx", "--overwrite"]) == 2
    assert config.read_bytes() == written


def test_data_that_asks_for_another_preset_is_not_ignored(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(WITH_EXAMPLE), "-q", "--to", "w4"]) == 0
    capsys.readouterr()
    assert run_command(["run", write(MODEL), "-q", "--to", "w4"]) == 2
    error = capsys.readouterr().err
    assert "was made from the preset weight_int4_group, and this run starts from" in error
    assert "keep this one with --config_file quantize_result/quantize_config.json" in error


def test_a_preset_has_an_effect_or_is_refused(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(MODEL)
    assert run_command(["run", model, "-q", "--to", "w8", "--preset", "weight_int8"]) == 0
    assert run_command(["run", model, "-q", "--to", "w8", "--preset", "dynamic_int8"]) == 2
    assert "from the preset weight_int8, and this run starts from dynamic_int8" in (
        capsys.readouterr().err
    )
    config = ["--config_file", "quantize_result/quantize_config.json"]
    assert run_command(["run", model, "--preset", "dynamic_int8", *config]) == 2
    assert "--preset and --config_file exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("gate", ["sqnr_bd>=10", "sqnr_db[boxes]>=10"])
def test_a_gate_without_a_metric_is_refused_before_anything_is_written(
    gate: str, write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(MODEL), "-q", "--to", "w8", "--gate", gate]) == 2
    assert "there is no metric" in capsys.readouterr().err
    assert not Path("quantize_result").exists()


def test_a_gate_about_a_metric_of_evaluate_is_checked_before_calibration(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = """
def evaluate(model, data):
    with open("calls", "a") as file:
        file.write("called ")
    return {"accuracy": 0.5}
"""
    run = ["run", write(MODEL + evaluate), "-q", "--to", "w8", "--gate"]
    assert run_command([*run, "acuracy>=0.4"]) == 2
    assert "did you mean accuracy?" in capsys.readouterr().err
    assert not Path("quantize_result").exists()
    Path("calls").unlink()
    assert run_command([*run, "accuracy>=0.4"]) == 0
    # Once for each network
    assert Path("calls").read_text().split() == ["called"] * 2


def test_a_run_in_actions_writes_the_job_summary(
    write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    gate = ["--gate", "sqnr_db>=10"]
    assert run_command(["run", write(MODEL), "-q", "--to", "w8", *gate]) == 0
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("### quantizer: Sequential\n")
    assert "- gate sqnr_db>=10: met (" in summary


def test_a_config_for_another_model_is_refused(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(MODEL), "-q", "--to", "w8"]) == 0
    other = write("import torch\n\ndef model():\n    return torch.nn.Linear(3, 2)\n")
    assert run_command(["run", other, "-q", "--to", "w8", "--data", "random:4x3"]) == 2
    assert "was made for Sequential, and this model is Linear" in capsys.readouterr().err


def test_without_data_what_needs_none_is_made_and_stamped(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(WITH_EXAMPLE), "-q", "--to", "w4"]) == 0
    lines = lines_of(capsys)
    assert "These figures are of an example input, not of real data." in lines
    assert lines[-1].startswith("Next: give calibration data: GPTQ")
    report = json.loads(Path("quantize_result/report.json").read_text())
    assert report["stamp"] == "an example input, not of real data"


@pytest.mark.parametrize(
    ("text", "words"), [(WITH_EXAMPLE, "--to w8"), (WITHOUT_DATA, "--data")]
)
def test_without_data_what_needs_it_is_refused(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    assert run_command(["run", write(text), "-q", "--to", "onnx"]) == 2
    error = capsys.readouterr().err
    assert "data" in error
    assert words in error
    assert not Path("quantize_result").exists()


def test_a_target_that_cannot_hold_the_model_is_refused_before_calibration(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(MODEL), "-q", "--to", "gguf"]) == 2
    assert "gguf" in capsys.readouterr().err
    assert not Path("quantize_result/quant_info.json").exists()


def test_json_has_the_verdict_and_the_figures(
    write: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", write(MODEL), "--to", "w8", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["verdict"][0].startswith("NOT JUDGED: ")
    assert content["verdict"][1].startswith("Wrote ")
    assert content["test"]["metrics"]["sqnr_db"] > 20
    assert content["calibration"]["results"] == "quantize_result"


def test_a_language_model_becomes_a_checkpoint_in_4_bits_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = saved(tmp_path / "tiny", llama())
    assert run_command(["run", str(folder), "-q"]) == 0
    assert ": int4 weights, float activations; " in lines_of(capsys)[1]
    assert Path(
        "quantize_result/export/LlamaForCausalLM-compressed-tensors/config.json"
    ).is_file()
