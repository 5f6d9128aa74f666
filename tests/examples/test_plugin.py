"""The plug-in in examples/plugin is installed, and does what docs/plugin.md says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import fresh_processes
from support.fresh_processes import PACKAGES, QUANTIZER, TORCH
from support.runs import ROOT

EXAMPLE = ROOT / "examples" / "plugin"
MODEL = str(EXAMPLE / "bent.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed into."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, folder / "source")
    words = ["install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    target = ["--target", str(folder / "site"), str(folder / "source")]
    subprocess.run([sys.executable, "-m", "pip", *words, *target], check=True)
    return folder / "site"


def run(
    site: Path, folder: Path, code: str, *words: str, begins_with: str = TORCH
) -> subprocess.CompletedProcess[str]:
    """Run code where the package is installed."""
    installed = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    return fresh_processes.run(installed + code, *words, cwd=folder, begins_with=begins_with)


def run_words(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that needs no torch."""
    return run(site, folder, QUANTIZER, *words, begins_with=PACKAGES)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def config(folder: Path) -> str:
    text = (ROOT / "configs" / "cpu_int8.json").read_text("utf-8")
    path = folder / "net.json"
    path.write_text(text.replace('"method": "auto"', '"method": "meanstd"'))
    return str(path)


def test_its_method_operator_and_engine_are_used(site: Path, tmp_path: Path) -> None:
    options = ("--config_file", config(tmp_path), "--model", MODEL)
    done = run(site, tmp_path, QUANTIZER, "--quant_mode", "calib", *options)
    assert done.returncode == 0, done.stderr
    done = run(
        site,
        tmp_path,
        QUANTIZER,
        "--quant_mode",
        "test",
        "--model",
        MODEL,
        "--deploy",
        "archive",
    )
    assert done.returncode == 0, done.stderr
    [bent] = [line for line in done.stdout.splitlines() if line.startswith("bend ")]
    assert " uint8 " in bent
    assert "per_tensor meanstd" in done.stdout
    assert (tmp_path / "quantize_result" / "export" / "Bent.zip").is_file()
    verified = done.stdout.partition("Bent.zip")[2].splitlines()[0]
    assert "parameters" in verified and "equal" in verified


def test_its_observer_is_a_word_of_the_hierarchical_form(site: Path, tmp_path: Path) -> None:
    spec = {"dtype": "int8", "observer_cls": "PerTensorMeanStdObserver"}
    file = tmp_path / "hierarchical.json"
    file.write_text(json.dumps({"global_quant_config": {"output_tensors": spec}}))
    options = ("--config_file", str(file), "--model", MODEL)
    done = run(site, tmp_path, QUANTIZER, "--quant_mode", "calib", *options)
    assert done.returncode == 0, done.stderr
    code = (
        "from quantizer import Config, PerTensorMeanStdObserver as Observer\n"
        f"config = Config.load({str(file)!r})\n"
        "assert config.global_quant_config.output_tensors.observer_cls is Observer"
    )
    done = run(site, tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_its_words_are_explained_and_validate_does_not_load_it(
    site: Path, tmp_path: Path
) -> None:
    done = run_words(site, tmp_path, "explain", "meanstd")
    assert "the mean plus and minus four standard deviations" in done.stdout
    done = run_words(site, tmp_path, "validate", config(tmp_path))
    assert done.returncode == 1
    assert "unless the plug-in example adds it" in done.stdout + done.stderr


def test_a_broken_copy_is_one_warning(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "quantizer_example" / "plugin.py").write_text("raise RuntimeError('worn out')\n")
    done = run_words(broken, tmp_path, "explain", "mse")
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert "RuntimeError: worn out" in line
    done = run_words(broken, tmp_path, "explain", "meanstd")
    assert done.returncode == 2


def test_a_function_that_is_missing_is_told(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "quantizer_example" / "ranges.py").write_text("")
    options = ("--config_file", config(tmp_path), "--model", MODEL)
    done = run(broken, tmp_path, QUANTIZER, "--quant_mode", "calib", *options)
    assert done.returncode == 2
    assert "quantizer_example.ranges:mean_and_deviations" in done.stderr
