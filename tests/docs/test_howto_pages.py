"""The how-to pages run as they are written, and print what they show."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.llamas import text_llama, text_llava, text_mixture
from support.pages import blocks, commands_of, is_shown, run_page
from support.runs import ROOT

ON_DIGITS = [
    "bad_layer.md",
    "dpu_network.md",
    "judging.md",
    "keep_float.md",
    "microcontroller.md",
    "mixed_precision.md",
    "npu.md",
    "openvino.md",
    "pt2.md",
    "qualcomm.md",
    "safetensors.md",
    "slow_file.md",
    "tensorrt.md",
    "torchmetrics.md",
    "tune.md",
    "yolo.md",
]
NEEDS = {
    "microcontroller.md": "litert_torch",
    "openvino.md": "openvino",
    "qualcomm.md": "onnxscript",
    "torchmetrics.md": "torchmetrics",
}
ENGINES = {
    "executorch.md": "executorch",
    "litert.md": "litert_torch",
    "coreml.md": "coremltools",
}
"""The pages for phones, with the package of each."""
pytestmark = pytest.mark.real


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with examples and presets, as the current one."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's (extra: examples)")
    for name in ("examples", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


@pytest.mark.parametrize("page", ON_DIGITS)
def test_a_page_on_digits_runs(
    page: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason="the page exports a file for it")
    run_page(page, capsys)


def nothing(folder: Path) -> None:
    """Write nothing: the page begins with `quantizer demo --llm`."""
    pytest.importorskip("compressed_tensors", reason="needs quantizer-torch[llm]")


ON_LANGUAGE = {
    "compressed_tensors.md": text_llama,
    "fp8.md": text_llama,
    "gguf.md": text_llama,
    "gptq.md": text_llama,
    "language_model_4bit.md": nothing,
    "kv_cache.md": text_llama,
    "nvfp4.md": text_llama,
    "mixture_of_experts.md": text_mixture,
    "vision_language.md": text_llava,
}
"""The pages on language models, with what writes the model and the text of each."""


@pytest.mark.parametrize("page", ON_LANGUAGE)
def test_a_page_on_a_language_model_runs(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ON_LANGUAGE[page](tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    run_page(page, capsys)


@pytest.mark.parametrize("page", ENGINES)
@pytest.mark.filterwarnings("ignore:.*")
def test_a_page_for_phones_runs(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip(ENGINES[page], reason=f"docs/{page} needs it")
    readme = (ROOT / "README.md").read_text("utf-8")
    [model] = re.findall(r"```python\n(# my_model\.py.*?)```", readme, re.DOTALL)
    (tmp_path / "my_model.py").write_text(model, "utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    run_page(page, capsys)


def test_a_range_method_is_added_as_the_page_says(checkout: Path) -> None:
    for name in ("quantizer", "schemas", "docs", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, checkout / name)
    for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    printed = ""
    for kind, block in blocks("own_observer.md"):
        if kind == "file":
            place, _, code = block.partition("\n")
            with (checkout / place.removeprefix("# ")).open("a") as module:
                module.write(f"\n\n{code}")
        elif kind == "diff":
            subprocess.run(["git", "apply"], input=block, text=True, check=True)
        elif kind == "commands":
            printed = shell("\n".join(commands_of(block)), checkout)
        elif kind == "printed":
            for line in block.splitlines():
                assert is_shown(line, printed), printed


def test_word_errors_are_counted_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchmetrics", reason="needs quantizer-torch[metrics]")
    [code] = [text for kind, text in blocks("torchmetrics.md") if "WordErrorRate" in text]
    (tmp_path / "wer.py").write_text(code)
    (tmp_path / "my_speech.py").write_text("def texts_of(outputs):\n    return outputs\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = runpy.run_path(str(tmp_path / "wer.py"))["evaluate"](
        lambda sounds: sounds, [(["a b c d"], ["a b c e"]), (["a b c d"], ["a b c d"])]
    )
    assert found == {"wer": 0.125}


def test_a_loop_runs_several_models_and_names_those_that_fail(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name, scale in (("good", 1), ("bad", "float('nan')")):
        (tmp_path / "models" / f"{name}.py").write_text(
            "import torch\n\ndef model():\n    layer = torch.nn.Linear(8, 4)\n"
            f"    layer.weight.data *= {scale}\n    return layer\n\n"
            "def calibration_data():\n    return [torch.randn(4, 8)]\n"
        )
    [loop] = [text for _, text in blocks("one_command.md") if text.startswith("for model")]
    assert "failed: models/bad.py\n" in shell(loop, tmp_path)
    assert (tmp_path / "results" / "good" / "report.json").is_file()


def shell(script: str, folder: Path) -> str:
    """Return what bash prints, which ends with the first command that fails."""
    program = (
        f'python() {{ {sys.executable} "$@"; }}\nquantizer() {{ python -m quantizer "$@"; }}'
    )
    done = subprocess.run(
        ["bash", "-e", "-c", f"{program}\n{script}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
