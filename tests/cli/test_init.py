"""`quantizer init`: what it writes is valid, and nothing is overwritten unasked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantizer.cli.main import run_command
from quantizer.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("device", ["DPU", "CPU", "GPU"])
def test_written_config_is_valid_for_the_device(device: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--device", device, "-o", str(path)]) == 0
    result = load_config(path)
    assert result.diagnostics == ()
    assert result.require().settings.target_device == device


@pytest.mark.parametrize("strategy", ["weight_only", "static", "dynamic"])
@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_strategies_have_the_hierarchical_form(
    strategy: str, device: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.json"
    assert (
        run_command(["init", "--strategy", strategy, "--device", device, "-o", str(path)]) == 0
    )
    result = load_config(path)
    assert result.diagnostics == ()
    config = result.require()
    assert (config.form, config.settings.target_device) == ("hierarchical", device)
    everywhere = config.rules[1]
    assert everywhere.adds == (
        {"weights"} if strategy == "weight_only" else {"weights", "input"}
    )
    dynamic = {
        role: fields["is_dynamic"].value
        for role, fields in everywhere.fields.items()
        if role == "input"
    }
    assert (
        dynamic
        == {"weight_only": {}, "static": {"input": False}, "dynamic": {"input": True}}[strategy]
    )


@pytest.mark.parametrize("algorithm", ["smoothquant", "awq", "gptq"])
def test_a_strategy_may_be_an_algorithm(algorithm: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--strategy", algorithm, "-o", str(path)]) == 0
    result = load_config(path)
    assert result.diagnostics == ()
    assert [found.name for found in result.require().algorithms] == [algorithm]


def test_every_preset_is_listed_with_a_line_on_when_to_use_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["init", "--list"]) == 0
    *lines, how = capsys.readouterr().out.splitlines()
    listed = {name: " ".join(words) for name, *words in map(str.split, lines)}
    assert sorted(listed) == sorted(path.stem for path in CONFIGS.glob("*.json"))
    assert all(20 < len(line) <= 120 for line in listed.values())
    assert len({*listed.values()}) == len(listed)
    assert "--preset NAME" in how
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run_command(["init", "--list"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("preset", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_preset_can_be_written(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--preset", preset, "-o", str(path)]) == 0
    own = load_config(CONFIGS / f"{preset}.json").require()
    result = load_config(path)
    assert (result.diagnostics, result.require().settings) == ((), own.settings)
    assert len(result.require().rules) == len(own.rules)


@pytest.mark.parametrize("algorithm", ["awq", "gptq"])
def test_what_is_for_language_models_leaves_their_embeddings_and_head_in_float(
    algorithm: str, tmp_path: Path, toy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--strategy", algorithm, "-o", str(path)]) == 0
    names = {
        "words": "torch.nn.Embedding(9, 128)",
        "up": "torch.nn.Linear(128, 128)",
        "out": "torch.nn.Linear(128, 9)",
    }
    built = ", ".join(f"({name!r}, {module})" for name, module in names.items())
    ordered = f"return torch.nn.Sequential(__import__('collections').OrderedDict([{built}]))"
    model = toy(data="return [torch.ones(4, 3, dtype=torch.long)]", model=ordered)
    assert run_command(["plan", "--config_file", str(path), "--model", model, "--json"]) == 0
    quantized = [
        row["name"] for row in json.loads(capsys.readouterr().out)["layers"] if "tensors" in row
    ]
    assert quantized == ["Sequential::Sequential/Linear[up]/linear"]


def test_a_device_goes_with_presets_of_the_form_that_has_no_device_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    assert run_command(["init", "--preset", "mxfp4", "--device", "GPU", "-o", str(path)]) == 0
    assert load_config(path).require().settings.target_device == "GPU"
    for more in (["--preset", "mxfp4", "--device", "DPU"], ["--preset", "cpu_int8", "--device", "GPU"],
                 ["--preset", "mxfp4", "--strategy", "awq"]):  # fmt: skip
        assert run_command(["init", *more, "-o", "-"]) == 2
    assert "the preset cpu_int8 already sets its device" in capsys.readouterr().err


def test_the_dpu_has_no_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["init", "--strategy", "static", "--device", "DPU", "-o", "-"]) == 2
    assert "layered form" in capsys.readouterr().err


def test_nothing_is_overwritten_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    path.write_text("mine")
    assert run_command(["init", "-o", str(path)]) == 2
    assert path.read_text() == "mine"
    assert "--overwrite" in capsys.readouterr().err
    assert run_command(["init", "-o", str(path), "--overwrite"]) == 0
    assert load_config(path).config is not None


def test_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "-o", "-"]) == 0
    Path("out.json").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config("out.json").config is not None


@pytest.mark.parametrize("target", ["", "missing/folder/net.json"])
def test_places_that_cannot_be_written(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["init", "-o", str(tmp_path / target)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_config_names_the_address_of_its_schema(tmp_path: Path) -> None:
    for words, form in (
        (["--device", "DPU"], "layered"),
        (["--strategy", "gptq"], "hierarchical"),
    ):
        assert (
            run_command(["init", *words, "-o", str(tmp_path / "net.json"), "--overwrite"]) == 0
        )
        schema = json.loads(
            (CONFIGS.parent / "schemas" / f"{form}.schema.json").read_text("utf-8")
        )
        assert (
            json.loads((tmp_path / "net.json").read_text("utf-8"))["$schema"] == schema["$id"]
        )


WIDE = "return torch.nn.Sequential(torch.nn.Linear(576, 8), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))"
WIDE_DATA = "return [torch.ones(4, 576)]"


def test_a_preset_is_fitted_to_the_model(
    tmp_path: Path, toy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "net.json")
    model = toy(WIDE_DATA, WIDE)
    assert run_command(["init", "--strategy", "gptq", "--model", model, "-o", path]) == 0
    changes = capsys.readouterr().err.splitlines()[:2]
    assert changes == [
        "group_size 64 instead of 128: the inputs of 0 number 576, the inputs of 1 number 8",
        "per_channel instead of groups for 1, with 8 inputs",
    ]
    for command in (["validate", path], ["plan", "--config_file", path, "--model", model]):
        assert run_command(command) == 0
    written = Path(path).read_text("utf-8")
    assert '"group_size": 64' in written
    preset = (CONFIGS / "gptq_int4_group.json").read_text("utf-8")
    kept = [line for line in preset.splitlines() if "128" not in line and "$schema" not in line]
    lines = iter(written.splitlines())
    assert all(line in lines for line in kept)
    capsys.readouterr()
    assert run_command(["--quant_mode", "calib", "--config_file", path, "--model", model,
                        "--output_dir", str(tmp_path / "result"), "-q"]) == 0  # fmt: skip


def test_a_preset_that_fits_is_written_as_it_is(
    tmp_path: Path, toy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with_model, without = tmp_path / "with.json", tmp_path / "without.json"
    options = ["init", "--preset", "weight_int8", "-o"]
    assert run_command([*options, str(with_model), "--model", toy()]) == 0
    assert capsys.readouterr().err.startswith(
        "the preset weight_int8 fits the model as it is\n"
    )
    assert run_command([*options, str(without)]) == 0
    assert with_model.read_bytes() == without.read_bytes()


def test_a_preset_that_cannot_fit_writes_nothing(
    tmp_path: Path, toy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    options = ["init", "--strategy", "gguf_q4_0", "--model", toy()]
    assert run_command([*options, "-o", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: gguf_q4_0 does not fit Linear, of which nothing would be")
    assert "help: choose another preset" in error
    assert not path.exists()


def test_changes_are_no_part_of_what_is_written_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "encoder.py"
    model.write_text(
        "from support.encoders import Encoder, sentences\n\nmodel = Encoder\n\n\n"
        "def calibration_data():\n    return [sentences(2, 8)]\n"
    )
    options = ["init", "--strategy", "static", "--model", str(model)]
    assert run_command([*options, "-o", "-"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["pre_quant_opt_config"]["name"] == "smoothquant"
    assert printed.err.startswith("smoothquant added to pre_quant_opt_config: 1 linear layer")


def test_a_file_that_is_there_is_refused_before_the_model_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.json"
    path.write_text("mine")
    assert run_command(["init", "--model", "no_such_model.py", "-o", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_command(["init", "--model", "no_such_model.py", "-o", "-"]) == 3
    assert path.read_text() == "mine"


def test_options_of_a_model_need_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["init", "--batch_size", "2", "-o", str(tmp_path / "net.json")]) == 2
    assert "--batch_size has no effect here" in capsys.readouterr().err
