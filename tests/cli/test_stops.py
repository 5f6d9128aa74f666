"""A run that ends at any operation on files loses no result and no progress, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import killed_at_each

from quantizer.cli.main import run_command

pytestmark = pytest.mark.slow

MODEL = "return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))"
DATA = "return [torch.randn(4, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]"
STATIC = {"dtype": "int8", "qscheme": "per_tensor"}
WEIGHT = {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0}
CONFIGS: dict[str, tuple[dict[str, Any], list[str], int]] = {
    "static": ({"global_quant_config": {"weight": WEIGHT, "input_tensors": STATIC}}, [], 3),
    "gptq": ({"global_quant_config": {"weight": WEIGHT}, "algo_config": {"name": "gptq"}}, [], 5),
    "awq": ({"global_quant_config": {"weight": WEIGHT}, "algo_config": {"name": "awq"}}, [], 7),
    "finetuned": ({"global_quant_config": {"weight": WEIGHT, "input_tensors": STATIC}}, ["--fast_finetune"], 7),
}
RUN_FILES = ("run.json", "run.log")


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files, hidden ones too; what differs between equal runs aside."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in RUN_FILES}


@pytest.fixture
def toy_model(toy: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("quantizer.engine.checkpoint.EVERY_S", 0.0)  # a snapshot after each batch and layer
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as forks have; results say how many there were
    yield toy(DATA, MODEL)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CONFIGS)
def test_at_every_moment_there_are_old_or_new_results_and_a_run_goes_on(
    name: str, toy_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content, more, step = CONFIGS[name]
    config, old_config = tmp_path / "config.json", tmp_path / "old.json"
    config.write_text(json.dumps(content))
    old_config.write_text(json.dumps({"global_quant_config": {"weight": {**WEIGHT, "dtype": "int8"}}}))
    old, new, folder = tmp_path / "old", tmp_path / "new", tmp_path / "out"

    def calib(place: Path, file: Path, *options: str) -> list[str]:
        command = ["--quant_mode", "calib", "--model", toy_model, "--config_file", str(file), "-q"]
        return [*command, "--output_dir", str(place), *options]

    assert run_command(calib(old, old_config)) == 0
    assert run_command(calib(new, config, *more)) == 0
    before, after = contents(old), contents(new)

    def prepare() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, folder)

    stops = 0
    for _ in killed_at_each(calib(folder, config, *more), prepare, step):
        stops += 1
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        assert run_command(["--quant_mode", "test", "--model", toy_model, "--output_dir", str(copy), "-q"]) == 0
        found = contents(copy)
        for result in ("quant_info.json", "weights.safetensors", "statistics.safetensors"):
            assert found[result] in (before[result], after[result])
        assert not [each for each in found if each.startswith(".")]
        shutil.rmtree(copy)
        assert run_command(calib(folder, config, *more, "--resume")) == 0, capfd.readouterr().err
        assert contents(folder) == after
    assert stops > 5
