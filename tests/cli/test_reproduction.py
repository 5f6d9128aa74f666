"""The report's commands, run in a copy of their folder, write the same bytes."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.configs import document
from support.runs import ROOT, page_without_place

import quantizer
from quantizer.cli.arguments.options import RUN, TARGET_OPTIONS, Options, word_of
from quantizer.cli.main import run_command
from quantizer.cli.run_folder import ONLY_CHECKED, WITHOUT_EFFECT, words_of
from quantizer.results.folder import open_results

MODEL = """
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def small():
    return model()[:2]


def calibration_data():
    return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def others():
    return [batch + 1 for batch in calibration_data()]


def evaluate(network, data):
    return {"loss": float(sum(network(batch).mean() for batch in data))}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, weights, data and a config, in which commands run."""
    folder = filled(tmp_path / "here")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of `GIVEN`."""
    folder = filled(tmp_path_factory.mktemp("calibrated") / "here")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert run_command(GIVEN) == 0
    return folder / "out"


@pytest.fixture
def calibrated(calibrated_once: Path, place: Path) -> Path:
    """A copy of them that the test may change."""
    return Path(shutil.copytree(calibrated_once, place / "out"))


def filled(folder: Path) -> Path:
    """Write a model, weights, data and configs into a new folder."""
    (folder / "configs").mkdir(parents=True)
    (folder / "net.py").write_text(MODEL)
    for name in ("cpu_int8", "dpu"):
        shutil.copy(ROOT / "configs" / f"{name}.json", folder / "configs")
    plain = json.loads((folder / "configs" / "cpu_int8.json").read_text())
    (folder / "configs" / "plain.json").write_text(
        json.dumps(plain | {"include_bias_corr": False})
    )
    torch.manual_seed(7)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5)
    )
    save_file(layers.state_dict(), folder / "other.safetensors")
    generator = np.random.default_rng(3)
    np.save(
        folder / "some data.npy", generator.standard_normal((24, 3, 8, 8)).astype("float32")
    )
    return folder


def written(folder: Path) -> dict[str, bytes]:
    """The files of a result folder that are the same in equal runs. The speed of an exported
    file is measured, so it differs. So does the folder in the commands of the page.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    for name in ("run.json", "run.log", ".quantizer.json"):
        names.pop(name, None)
    names["report.html"] = page_without_place(folder / "report.html")
    report = json.loads(names["report.json"])
    speeds = [export.pop("speed", None) for export in report["exports"]]
    if any(speeds):
        del report["checksum"], names["report.html"]
        names["report.json"] = json.dumps(report).encode()
    return names


CONFIG = ["--config_file", "configs/plain.json"]
GIVEN = ["--quant_mode", "calib", "--model", "net.py", *CONFIG, "--output_dir", "out"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "plain": (CONFIG, []),
    "the built-in config": ([], ["--exact"]),
    "data in a file": (
        [
            *CONFIG,
            "--data",
            "some data.npy",
            "--batch_size",
            "5",
            "--subset_len",
            "17",
            "--seed",
            "3",
        ],
        ["--data", "some data.npy", "--eval_data", "net.py:others", "--subset_len", "7"],
    ),
    "random data": (
        [*CONFIG, "--data", "random:9x3x8x8", "--seed", "5"],
        ["--data", "random:6x3x8x8"],
    ),
    "another factory": (
        [*CONFIG, "--model", "net.py:small"],
        ["--model", "net.py:small", "--seed", "2"],
    ),
    "other weights": (
        [*CONFIG, "--weights", "other.safetensors"],
        [
            "--weights",
            "other.safetensors",
            "--evaluate",
            "net.py",
            "--gate",
            "sqnr_db >= 1",
            "--gate",
            "loss_drop<=9",
        ],
    ),
    "finetuned": ([*CONFIG, "--fast_finetune", "adaquant"], ["--fast_finetune", "adaquant"]),
    "deployed": (
        [*CONFIG, "--quiet", "--memory", "1GB", "--inspect"],
        ["--deploy", "safetensors", "--deploy", "onnx", "--onnx_profile", "fast", "--top", "3"],
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "deployed" else ())
        for name in CASES
    ],
)
def test_the_commands_of_the_report_write_the_same_bytes(place: Path, case: str) -> None:
    for mode, options in zip(("calib", "test"), CASES[case], strict=True):
        model = [] if "--model" in options else ["--model", "net.py"]
        assert (
            run_command(["--quant_mode", mode, *model, *options, "--output_dir", "first"]) == 0
        )
    report = json.loads((place / "first" / "report.json").read_text())
    assert len(report["commands"]) == 2
    page = (place / "first" / "report.html").read_text()
    for line in report["commands"]:
        assert line.partition(" ")[0] == "quantizer"
        assert (
            line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split()[2]
            in page
        )
        assert run_command([*shlex.split(line)[1:], "--output_dir", "second"]) == 0
    assert written(place / "first") == written(place / "second")


def test_a_merge_is_made_again_by_its_command(place: Path) -> None:
    for name, data in (("one", "net.py:calibration_data"), ("two", "net.py:others")):
        given = ["--quant_mode", "calib", "--model", "net.py", *CONFIG, "--data", data]
        assert run_command([*given, "--output_dir", name]) == 0
    assert run_command(["merge", "one", "two", "--model", "net.py", "-o", "both"]) == 0
    assert (
        run_command(["--quant_mode", "test", "--model", "net.py", "--output_dir", "both"]) == 0
    )
    merge, test = json.loads((place / "both" / "report.json").read_text())["commands"]
    assert run_command([*shlex.split(merge)[1:], "-o", "again"]) == 0
    assert run_command([*shlex.split(test)[1:], "--output_dir", "again"]) == 0
    assert written(place / "both") == written(place / "again")


def test_absolute_paths_lose_their_folders(place: Path, tmp_path: Path) -> None:
    far = tmp_path / "far.py"
    far.write_text(MODEL)
    config = str(place / "configs" / "plain.json")
    given = ["--quant_mode", "calib", "--model", f"{far}:model", "--config_file", config]
    assert run_command([*given, "--output_dir", str(tmp_path / "out")]) == 0
    [command] = json.loads((tmp_path / "out" / "report.json").read_text())["commands"]
    assert (
        command
        == "quantizer --quant_mode calib --config_file configs/plain.json --model far.py:model"
    )


@pytest.mark.usefixtures("calibrated")
def test_commands_of_another_calibration_are_not_shown(place: Path) -> None:
    given = ["--model", "net.py", "--output_dir", "out"]
    assert run_command(["--quant_mode", "test", *given]) == 0
    assert run_command(["--quant_mode", "calib", *given, *CONFIG, "--seed", "9"]) == 0
    report = place / "out" / "report.json"
    assert json.loads(report.read_text())["commands"] == [
        "quantizer --quant_mode calib --config_file configs/plain.json --model net.py --seed 9"
    ]
    # A calibration that fails, and a test that does, leave what has made the results.
    assert (
        run_command(
            [
                "--quant_mode",
                "calib",
                "--model",
                "net.py:nothing",
                *CONFIG,
                "--output_dir",
                "out",
            ]
        )
        == 3
    )
    assert run_command(["report", "out"]) == 0
    assert len(json.loads(report.read_text())["commands"]) == 1


def test_retuned_results_are_calibrated_again_with_the_config_of_their_report(
    place: Path,
) -> None:
    given = ["--model", "net.py", "--output_dir", "out", "--seed", "4"]
    (place / "configs" / "plain.json").write_text(json.dumps(document()))
    assert run_command(["--quant_mode", "calib", *given, *CONFIG]) == 0
    changed = ["-o", "changed.json"]
    assert run_command(["retune", "out", "--statistic", "mean", *changed]) == 0
    report = json.loads((place / "out" / "report.json").read_text())
    [command] = report["commands"]
    assert "--config_file changed.json" in command
    assert (place / "changed.json").read_text() == report["config"]["text"]
    assert run_command([*shlex.split(command)[1:], "--output_dir", "again"]) == 0
    first, again = written(place / "out"), written(place / "again")
    assert {name for name in first if first[name] != again.get(name)} == {
        "plan.json",
        "checksums.json",
    }, "rules"


def test_results_retuned_without_a_new_config_are_retuned_again(place: Path) -> None:
    given = ["--model", "net.py", "--output_dir", "out", "-q"]
    (place / "configs" / "plain.json").write_text(json.dumps(document()))
    assert run_command(["--quant_mode", "calib", *given, *CONFIG]) == 0
    assert run_command(["retune", "out", "--statistic", "mean"]) == 0
    before = written(place / "out")
    commands = json.loads((place / "out" / "run.json").read_text())["commands"]
    for name in ("calib", "retune"):
        assert run_command(commands[name][1:]) == 0
    assert written(place / "out") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "commands",
    [
        None,
        [],
        "quantizer",
        {"calibration": "x"},
        {"calib": ["quantizer"]},
        {"calib": 3},
        {"calib": [1, 2]},
    ],
)
def test_a_damaged_run_json_is_no_error(calibrated: Path, commands: Any) -> None:
    run = calibrated / "run.json"
    facts = json.loads(run.read_text())
    run.write_text(json.dumps(facts | {"commands": commands}))
    assert run_command(["report", "out"]) == 0
    assert json.loads((calibrated / "report.json").read_text())["commands"] == []
    if isinstance(commands, dict):
        sealed = open_results(calibrated).with_checksum(commands)
        run.write_text(json.dumps(facts | {"commands": sealed}))
        assert run_command(["report", "out"]) == 0
        expected = ["quantizer"] if commands == {"calib": ["quantizer"]} else []
        assert json.loads((calibrated / "report.json").read_text())["commands"] == expected
    run.write_text("[")
    assert run_command(["report", "out"]) == 0
    assert json.loads((calibrated / "report.json").read_text())["commands"] == []


def test_a_word_of_run_json_cannot_be_a_command(calibrated: Path) -> None:
    run = calibrated / "run.json"
    facts = json.loads(run.read_text())
    facts["commands"]["calib"] = ["quantizer", "; rm -rf .", "$(reboot)", "<script>"]
    run.write_text(json.dumps(facts))
    assert run_command(["report", "out"]) == 0
    assert json.loads((calibrated / "report.json").read_text())["commands"] == [], (
        "no checksum of its own"
    )
    facts["commands"] = open_results(calibrated).with_checksum(
        {"calib": facts["commands"]["calib"]}
    )
    run.write_text(json.dumps(facts))
    assert run_command(["report", "out"]) == 0
    [line] = json.loads((calibrated / "report.json").read_text())["commands"]
    assert shlex.split(line) == facts["commands"]["calib"]
    assert "<script>'" not in (calibrated / "report.html").read_text()


def test_results_from_python_show_no_command(place: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).eval()
    calibrated = quantizer.calibrate(model, "configs/cpu_int8.json", [torch.ones(4, 3)])
    calibrated.save("out")
    assert json.loads((place / "out" / "report.json").read_text())["commands"] == []


@pytest.mark.parametrize("mode", ["calib", "test"])
def test_an_option_is_shown_unless_it_is_known_to_change_nothing(mode: str) -> None:
    """A new option of a run is shown without being listed anywhere."""
    for option in fields(Options):
        if option.name not in RUN or option.name == "quant_mode":
            continue
        value: Any = "value"
        name = option.name
        if option.default is False:
            value = True
        elif option.default == ():
            value = ("value",)
        elif name == TARGET_OPTIONS:
            name = "onnx_profile"
            value = {name: "value"}
        given = Options(**{"quant_mode": mode, option.name: value})
        word = "to" if name == "deploy" else word_of(name)
        shown = f"--{word}" in words_of(given)
        assert shown == (option.name not in WITHOUT_EFFECT | ONLY_CHECKED[mode]), option.name


@pytest.mark.parametrize("profile", ["fast", "mixed"])
def test_a_clone_without_the_results_repeats_a_run(
    place: Path, tmp_path: Path, profile: str
) -> None:
    # What `Next:` says to check in
    checked_in = ["mine/quantize_config.json"]
    if profile == "mixed":
        checked_in.append("mine/export/deploy.json")
    run = ["run", "net.py", "--to", "onnx", "-o", "mine", "--onnx_profile", profile]
    assert run_command([*run, "-q"]) == 0
    commands = json.loads((place / "mine" / "report.json").read_text())["commands"]
    clone = filled(tmp_path / "clone")
    (clone / "mine").mkdir()
    (clone / "mine" / ".gitignore").write_text("*\n!quantize_config.json\n")
    for name in checked_in:
        (clone / name).parent.mkdir(exist_ok=True)
        shutil.copy(place / name, clone / name)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(clone)
        for command in commands:
            words = [*shlex.split(command)[1:], "--output_dir", "mine", "-q"]
            assert run_command(words) == 0, words
    for path in (place / "mine" / "export").glob("[!v]*"):
        assert (clone / "mine" / "export" / path.name).read_bytes() == path.read_bytes()


def test_a_new_calibration_names_the_files_of_the_one_before(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--model", "net.py", "-q"]
    assert run_command(["calib", "--config_file", "configs/cpu_int8.json", *model]) == 0
    assert run_command(["test", "--to", "pt2", *model]) == 0
    assert run_command(["calib", "--config_file", "configs/cpu_int8.json", *model]) == 0
    assert "calibration before" not in capsys.readouterr().err
    assert run_command(["calib", "--config_file", "configs/dpu.json", *model]) == 0
    printed = capsys.readouterr().err
    assert "the calibration before has made Sequential.pt2 in quantize_result" in printed
