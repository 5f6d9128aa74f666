"""A run that ends at any operation on files loses no result and no progress, and leaves nothing
behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.crashes import copies_at_each
from support.extended import extended, extended_except
from support.runs import page_without_place

from quantizer.cli.main import run_command

pytestmark = pytest.mark.slow

MODEL = (
    "return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))"
)
DATA = (
    "return [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]"
)
STATIC = {"dtype": "int8", "qscheme": "per_tensor"}
WEIGHT = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}
CONFIGS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "static": ({"global_quant_config": {"weight": WEIGHT, "input_tensors": STATIC}}, [], 7),
    "gptq": (
        {"global_quant_config": {"weight": WEIGHT}, "algo_config": {"name": "gptq"}},
        [],
        11,
    ),
    "awq": (
        {"global_quant_config": {"weight": WEIGHT}, "algo_config": {"name": "awq"}},
        [],
        13,
    ),
    "finetuned": (
        {"global_quant_config": {"weight": WEIGHT, "input_tensors": STATIC}},
        ["--fast_finetune"],
        13,
    ),
}
RUN_FILES = ("run.json", "run.log", ".quantizer.json")


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files, hidden ones too; what differs between equal runs aside."""
    found = {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name not in RUN_FILES
    }
    return found | {"report.html": page_without_place(folder / "report.html")}


def without_checkpoints(folder: Path) -> dict[str, bytes]:
    """All files that test mode reads or removes, hidden folders too, by path."""
    results: dict[str, bytes] = {}
    for path, content in files(folder).items():
        # Temporary files have names of their own in each run
        if not path.name.startswith("checkpoint") and path.suffix != ".tmp":
            results[str(path)] = content
    return results


@pytest.fixture
def toy_model(toy: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # A snapshot after each batch and layer
    monkeypatch.setattr("quantizer.results.checkpoint.SAVE_INTERVAL_S", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as forks have; results say how many there were
    yield toy(DATA, MODEL)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", extended_except(CONFIGS, "static", "gptq"))
def test_at_every_moment_there_are_old_or_new_results_and_a_run_goes_on(
    name: str, toy_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content, more, step = CONFIGS[name]
    config, old_config = tmp_path / "config.json", tmp_path / "old.json"
    config.write_text(json.dumps(content))
    old_config.write_text(
        json.dumps({"global_quant_config": {"weight": {**WEIGHT, "dtype": "int8"}}})
    )
    old, new, folder = tmp_path / "old", tmp_path / "new", tmp_path / "out"

    def calib(place: Path, file: Path, *options: str) -> list[str]:
        command = [
            "--quant_mode",
            "calib",
            "--model",
            toy_model,
            "--config_file",
            str(file),
            "-q",
        ]
        return [*command, "--output_dir", str(place), *options]

    assert run_command(calib(old, old_config)) == 0
    assert run_command(calib(new, config, *more)) == 0
    before, after = contents(old), contents(new)
    shutil.copytree(old, folder)
    stopped = copies_at_each(calib(folder, config, *more), folder, tmp_path / "stopped", step)
    assert contents(folder) == after
    assert not [name for name in after if name.startswith("checkpoint")]
    tested: list[dict[str, bytes]] = []
    for place in stopped:
        shutil.rmtree(folder)
        results = without_checkpoints(place)
        if results not in tested:
            tested.append(results)
            shutil.copytree(place, folder)
            test = ["--quant_mode", "test", "--model", toy_model]
            assert run_command([*test, "--output_dir", str(folder), "-q"]) == 0
            found = contents(folder)
            for result in ("quant_info.json", "weights.safetensors", "statistics.safetensors"):
                assert found[result] in (before[result], after[result])
            assert not [each for each in found if each.startswith(".")]
            shutil.rmtree(folder)
        shutil.copytree(place, folder)
        assert run_command(calib(folder, config, *more, "--resume")) == 0, (
            capfd.readouterr().err
        )
        assert contents(folder) == after
    assert len(stopped) > 5 and len(tested) > 2


OPTIONS = ["--config_file", "{config}", "--model", "{model}", "-q"]
COMMANDS: dict[str, tuple[list[str], int]] = {
    "merge": (
        [
            "merge",
            "{first}",
            "{second}",
            "--model",
            "{model}",
            "--output",
            "{out}",
            "--overwrite",
            "-q",
        ],
        5,
    ),
    "report": (["report", "{out}", "--plots", "{out}/plots"], 3),
    "onnx": (
        ["--quant_mode", "test", "--deploy", "onnx", "--output_dir", "{out}", *OPTIONS],
        11,
    ),
    "pt2": (["--quant_mode", "test", "--deploy", "pt2", "--output_dir", "{out}", *OPTIONS], 7),
}
"""Each with the step of the operations that it is stopped at."""


@pytest.mark.parametrize(
    "name",
    [
        "merge",
        "report",
        # These take ten seconds each
        pytest.param("onnx", marks=pytest.mark.real),
        *extended("pt2"),
    ],
)
def test_what_writes_beside_or_over_results_leaves_each_file_old_or_new(
    name: str, toy_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if name == "onnx":
        pytest.importorskip(
            "onnxruntime", reason="the file is checked by the runtime (extra: onnx)"
        )
    words, step = COMMANDS[name]
    places = {each: str(tmp_path / each) for each in ("first", "second", "out", "config")}
    command = [word.format(model=toy_model, **places) for word in words]
    wide = {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
    Path(places["config"]).write_text(
        json.dumps({"global_quant_config": {"weight": wide, "input_tensors": STATIC}})
    )
    calib = [
        "--quant_mode",
        "calib",
        "--model",
        toy_model,
        "--config_file",
        places["config"],
        "-q",
    ]
    for place, batches in (("first", "4"), ("second", "8"), ("old", "12")):
        assert (
            run_command(
                [*calib, "--subset_len", batches, "--output_dir", str(tmp_path / place)]
            )
            == 0
        )
    # With an export, the report is written twice, the second time with the measured speed
    left_out = {*RUN_FILES}
    if name in ("onnx", "pt2"):
        left_out |= {"report.json", "report.html"}
    out = Path(places["out"])
    shutil.copytree(tmp_path / "old", out)
    before = files(out, left_out)
    stopped = copies_at_each(command, out, tmp_path / "stopped", step)
    after = files(out, left_out)
    assert before != after
    for place in stopped:
        for path, content in files(place, left_out).items():
            assert content in (before.get(path), after.get(path)) or any(
                part.startswith(".") for part in path.parts
            )
        shutil.rmtree(out)
        shutil.copytree(place, out)
        assert run_command(command) == 0, capfd.readouterr().err
        assert files(out, left_out) == after
    assert len(stopped) > 2


def files(folder: Path, left_out: Collection[str] = RUN_FILES) -> dict[Path, bytes]:
    """All of them by their paths in the folder, with those in folders."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in left_out)
    return {path.relative_to(folder): path.read_bytes() for path in found}
