"""The user's own files survive every command and every call, byte for byte, whatever they are
called. Inputs are never written, and nothing that took time is thrown away.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import calibrate

import quantizer
from quantizer import Config, ModelQuantizer
from quantizer.cli.main import run_command
from quantizer.errors import QuantizerError

MODEL = """
import os
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def calibration_data():
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(4)]
"""
WEIGHTS_ONLY = {"global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_tensor"}}}
STEMS = (
    *("weights", "model", "bias_corr", "statistics", "graph", "rescaled", "qparams"),
    *("weights-00001-of-00002", "checkpoint.calibration", "checkpoint", "checkpoint.best"),
    *("report", "plan", "layers", "run", "quant_info", "checksums", "config.resolved"),
    *("algorithms", "analysis", "tune", "exact", "quantizer", "moves", "Sequential"),
)
SUFFIXES = (".safetensors", ".json", ".pth")
HIDDEN = (
    ".lock",
    ".anything.20241231.tmp",
    ".quant_info.json.abcd1234.tmp",
    ".quantizer-new/moves.json",
    ".quantizer-0123456789abcdef0123456789abcdef/new/report.json",
    ".net.xml.quantizer.json.bak",
)
OTHERS = (
    *("Sequential.py", "report.html", "layers.csv", "run.log", "checkpoint.best.tar"),
    *("export/Sequential.onnx", "export/Sequential.xml", "export/verify.json"),
    *("export/Sequential/config.json", "thesis.tex", "quantize_config.json", "notes/a.txt"),
)


def hundred_files(folder: Path) -> dict[str, bytes]:
    """Write files that are called like those of quantizer, and are not. Each has other bytes."""
    names = [f"{stem}{suffix}" for stem in STEMS for suffix in SUFFIXES]
    names += [*HIDDEN, *OTHERS]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a config, and a calibration of both."""
    place = tmp_path_factory.mktemp("work")
    (place / "net.py").write_text(MODEL)
    Config.from_dict(WEIGHTS_ONLY).save(place / "config.json")
    config = str(place / "config.json")
    assert calibrate(place / "out", model=str(place / "net.py"), config=config) == 0
    return place


MODES = ["--config_file", "{work}/config.json", "--model", "{work}/net.py", "-q"]
LOOK = ["--config_file", "{work}/config.json", "--model", "{work}/net.py"]
COMMANDS: dict[str, list[str]] = {
    "calib": ["--quant_mode", "calib", "--output_dir", "{mine}", *MODES],
    "calib --overwrite": ["--quant_mode", "calib", "-o", "{mine}", "--overwrite", *MODES],
    "test": ["--quant_mode", "test", "--output_dir", "{mine}", *MODES],
    "test elsewhere": [
        *("--quant_mode", "test", "-o", "{out}", "--report_dir", "{mine}"),
        *("--deploy", "onnx", *MODES),
    ],
    "run": ["run", "{work}/net.py", "-o", "{mine}", "--overwrite"],
    "tune": ["tune", *LOOK, "--gate", "sqnr_db>=1", "-o", "{mine}", "--overwrite"],
    "retune": ["retune", "{out}", "--method", "mse", "--output_dir", "{mine}", "--overwrite"],
    "merge": ["merge", "{out}", "{out}", "--model", "{work}/net.py", "-o", "{mine}"],
    "report": ["report", "{mine}"],
    "plots": ["report", "{out}", "--plots", "{mine}"],
    "analyze": ["analyze", *LOOK, "--report", "{mine}"],
    "analyze -o": ["analyze", "--budget", "8", *LOOK, "-o", "{mine}/report.json"],
    "plan": ["plan", *LOOK, "-o", "{mine}/plan.json"],
    "inspect": ["inspect", *LOOK, "-o", "{mine}/Sequential.py"],
    "convert": ["convert", "{work}/config.json", "-o", "{mine}/quantize_config.json"],
    "init": ["init", "-o", "{mine}/quantize_config.json"],
    "demo": ["demo", "{mine}"],
}


def quantized() -> torch.nn.Module:
    return ModelQuantizer(Config.from_dict(WEIGHTS_ONLY)).quantize_model(
        torch.nn.Sequential(torch.nn.Linear(3, 2))
    )


def calibrated() -> quantizer.Result:
    return quantizer.calibrate(
        torch.nn.Sequential(torch.nn.Linear(3, 2)), WEIGHTS_ONLY, [torch.ones(2, 3)]
    )


CALLS: dict[str, Callable[[Path], Any]] = {
    "ModelQuantizer.save": lambda mine: ModelQuantizer.save(quantized(), mine, overwrite=True),
    "Result.save": lambda mine: calibrated().save(mine, overwrite=True),
    "Result.export": lambda mine: calibrated().export("pt2", mine / "model.pth"),
    "Result.export openvino": lambda mine: calibrated().export(
        "openvino", mine / "export" / "Sequential.xml"
    ),
    "Result.report": lambda mine: calibrated().report(mine / "report.html"),
    "Report.save_plots": lambda mine: calibrated().report().save_plots(mine),
    "Config.save": lambda mine: Config.from_dict(WEIGHTS_ONLY).save(mine / "model.json"),
    "calibrate": lambda mine: quantizer.calibrate(
        torch.nn.Sequential(torch.nn.Linear(3, 2)), None, [torch.ones(2, 3)], folder=mine
    ),
    "quantize": lambda mine: quantizer.quantize(
        torch.nn.Linear(3, 2), [torch.ones(2, 3)], "pt2", folder=mine, overwrite=True
    ),
}


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mine"
    folder.mkdir()
    before = hundred_files(folder)
    assert len(before) >= 80
    yield folder
    after = contents(folder)
    # Plots and a demo have other names than what is there
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_of_the_user_survives_every_command(
    name: str, work: Path, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(work=work, out=work / "out", mine=mine) for word in COMMANDS[name]]
    before = contents(mine)
    code = run_command(words)
    assert name in ("demo", "plots") or code in (2, 5)
    if code:
        assert contents(mine) == before
        assert "help: " in capsys.readouterr().err


@pytest.mark.parametrize("name", CALLS)
def test_a_folder_of_the_user_survives_every_call(name: str, mine: Path) -> None:
    if name == "Report.save_plots":
        CALLS[name](mine)
        return
    before = contents(mine)
    with pytest.raises(QuantizerError) as raised:
        CALLS[name](mine)
    assert raised.value.exit_code == 2
    assert contents(mine) == before


@pytest.mark.parametrize("name", ["calib", "test", "retune", "report", "merge"])
def test_files_that_others_have_put_into_results_survive(
    name: str, work: Path, tmp_path: Path
) -> None:
    """No command has any of these names among those that it writes."""
    out = Path(shutil.copytree(work / "out", tmp_path / "out"))
    theirs = (
        "checkpoint.pth",
        "weights.safetensors.bak",
        ".lock",
        "export/notes.json",
        "a.tmp",
    )
    for file in theirs:
        (out / file).parent.mkdir(exist_ok=True)
        (out / file).write_text(f"mine: {file}")
    words = [word.format(work=work, out=out, mine=out) for word in COMMANDS[name]]
    run_command(words)
    for file in theirs:
        assert (out / file).read_text() == f"mine: {file}"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("layers.csv", COMMANDS["calib"]),
        ("export/Sequential.pt2", [*COMMANDS["test"], "--deploy", "pt2"]),
    ],
)
def test_a_result_that_was_edited_is_refused_before_any_work(
    file: str, words: list[str], work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a table that was opened in another program and saved there."""
    out = Path(shutil.copytree(work / "out", tmp_path / "out"))
    test = [word.format(work=work, mine=out) for word in COMMANDS["test"]]
    assert run_command([*test, "--deploy", "pt2"]) == 0
    (out / file).write_text("edited")
    capsys.readouterr()
    assert run_command([word.format(work=work, mine=out) for word in words]) == 2
    shown = capsys.readouterr()
    assert f"holds files that were changed: {file}" in shown.err
    assert not shown.out
    assert (out / file).read_text() == "edited"


INPUTS = {
    "model": (["plan", "--model", "{net}", "-o", "{net}", "--overwrite"], "net.py"),
    "a link to it": (["inspect", "--model", "{net}", "-o", "{link}", "--overwrite"], "net.py"),
    "factory": (["plan", "--model", "{net}:model", "-o", "{net}", "--overwrite"], "net.py"),
    "config": (["convert", "{config}", "-o", "{config}", "--overwrite"], "config.json"),
    "weights": (
        [
            *("inspect", "--model", "{net}", "--weights", "{place}/w.safetensors"),
            *("-o", "{place}/w.safetensors", "--overwrite"),
        ],
        "w.safetensors",
    ),
    "data": (
        [
            "plan",
            "--model",
            "{net}",
            "--data",
            "{place}/*.npy",
            "-o",
            "{place}/a.npy",
            "--overwrite",
        ],
        "a.npy",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_never_written(
    name: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, file = INPUTS[name]
    for source in ("net.py", "config.json"):
        shutil.copy(work / source, tmp_path / source)
    for source in ("w.safetensors", "a.npy"):
        (tmp_path / source).write_text("mine")
    (tmp_path / "link.py").symlink_to(tmp_path / "net.py")
    places = {
        "net": tmp_path / "net.py",
        "config": tmp_path / "config.json",
        "link": tmp_path / "link.py",
        "place": tmp_path,
    }
    before = contents(tmp_path)
    assert run_command([word.format(**places) for word in words]) == 2
    assert "of this run, so it is not written" in capsys.readouterr().err
    assert contents(tmp_path) == before
    assert file in before


def test_an_edited_config_in_the_results_is_read_and_kept(work: Path, tmp_path: Path) -> None:
    model, out = str(work / "net.py"), tmp_path / "out"
    words = ["run", model, "--to", "w8", "-o", str(out)]
    assert run_command(words) == 0
    config = out / "quantize_config.json"
    edited = config.read_text().replace('"dtype": "int8"', '"dtype": "int4"')
    config.write_text(edited)
    assert run_command(words) == 0
    assert config.read_text() == edited
    assert '"int4"' in (out / "config.resolved.json").read_text()


@pytest.mark.parametrize(
    ("option", "data", "model"),
    [
        ([], "mnist_data.safetensors", "mnist.py"),
        (["--llm"], "tales/tokenizer.json", "tales.txt"),
    ],
)
def test_a_demo_that_was_stopped_is_completed(
    option: list[str], data: str, model: str, tmp_path: Path
) -> None:
    place = tmp_path / "demo"
    assert run_command(["demo", *option, str(place)]) == 0
    complete = contents(place)
    (place / data).unlink()
    assert run_command(["demo", *option, str(place)]) == 0
    assert contents(place) == complete
    (place / model).write_text("mine")
    assert run_command(["demo", *option, str(place)]) == 2
    assert (place / model).read_text() == "mine"


STOPPED = """
def evaluate(model, data):
    for batch in data:
        model(batch)
    if not os.path.exists({flag!r}):
        open({flag!r}, "w").close()
        raise KeyboardInterrupt
    return {{"top1": 1.0}}
"""


def test_a_run_that_was_stopped_in_its_test_does_not_calibrate_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.results.checkpoint.SAVE_INTERVAL_S", 0.0)
    model = tmp_path / "net.py"
    model.write_text(MODEL + STOPPED.format(flag=str(tmp_path / "stopped")))
    gptq = dict(WEIGHTS_ONLY, algo_config={"name": "gptq"})
    Config.from_dict(gptq).save(tmp_path / "config.json")
    words = ["run", str(model), "--to", "pt2", "--config", str(tmp_path / "config.json")]
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    assert run_command([*words, "-o", one]) == 130
    capsys.readouterr()
    assert run_command([*words, "-o", one, "-v"]) == 0
    assert "the algorithms resume after" in capsys.readouterr().err
    assert run_command([*words, "-o", other]) == 0
    for file in ("quant_info.json", "weights.safetensors", "export/Sequential.pt2"):
        assert Path(one, file).read_bytes() == Path(other, file).read_bytes()
    assert not list(Path(one).glob("checkpoint*"))


BROKEN = """
import torch

def model():
    torch.manual_seed({seed})
    return torch.nn.Linear(1, 2)

def calibration_data():
    for n in range(4):
        yield torch.full((4, 1), float(n))
    {end}
"""


def test_a_checkpoint_of_another_run_is_no_obstacle_without_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the same run is used, and one of other weights is replaced."""
    monkeypatch.setattr("quantizer.results.checkpoint.SAVE_INTERVAL_S", 0.0)
    net, out = tmp_path / "net.py", tmp_path / "out"
    for seed in (0, 1):
        net.write_text(BROKEN.format(seed=seed, end="raise OSError"))
        assert calibrate(out, model=str(net), config=None) == 4
        assert list(out.glob("checkpoint.calibration*"))
    net.write_text(BROKEN.format(seed=2, end="pass"))
    assert calibrate(out, model=str(net), config=None) == 0
    assert calibrate(tmp_path / "fresh", model=str(net), config=None) == 0
    for file in ("weights.safetensors", "statistics.safetensors"):
        assert (out / file).read_bytes() == (tmp_path / "fresh" / file).read_bytes()
    assert not list(out.glob("checkpoint*"))


def test_a_loader_that_changes_the_working_directory_moves_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    chdir = f"def calibration_data():\n    os.chdir({str(elsewhere)!r})"
    (tmp_path / "net.py").write_text(MODEL.replace("def calibration_data():", chdir))
    monkeypatch.chdir(tmp_path)
    assert run_command(["run", "net.py", "--to", "pt2"]) == 0
    assert not list(elsewhere.iterdir())
    assert (tmp_path / "quantize_result" / "export" / "Sequential.pt2").is_file()
    assert "Wrote quantize_result/export/Sequential.pt2" in capsys.readouterr().out
