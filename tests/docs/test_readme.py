"""README.md is short, and each of its blocks runs as it stands from what the ones before leave."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkouts import copied_checkout

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M)
"""The language of each block, and its text."""
MOST_WORDS = 900


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS


def test_what_was_tested_begins_with_trained_models() -> None:
    table = README.partition("| model | is run by | test |\n|---|---|---|\n")[2]
    rows = table.partition("\n<!--")[0].splitlines()
    random = ["(random)" in row for row in rows]
    assert not random[0] and random[-1]
    assert random == sorted(random)


class Shell:
    """A shell in which a user pastes one block after the other."""

    def __init__(self, folder: Path, environment: Path) -> None:
        self.folder = folder
        path = f"{environment / 'bin'}:{os.environ['PATH']}"
        # Where the index of torch cannot be reached, pip takes those of its configuration
        self.variables = {**os.environ, "PATH": path, "PIP_RETRIES": "0"}
        self.variables.pop("PYTHONPATH", None)

    def run(self, script: str, code: int = 0) -> str:
        """Return what a script prints. The next one begins in the folder where it ends."""
        place = self.folder.parent / "place"
        done = subprocess.run(
            ["bash", "-e", "-c", f"trap 'pwd > {place}' EXIT\n{script}"],
            cwd=self.folder,
            env=self.variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        self.folder = Path(place.read_text("utf-8").strip())
        return done.stdout + done.stderr


@pytest.mark.real
@pytest.mark.shows("a ResNet on MNIST", "ONNX Runtime")
def test_the_blocks_of_the_readme_run_in_an_empty_environment(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files belong to the checkout")
    clone = (tmp_path / "clone").resolve()
    copied_checkout(clone)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    shell = Shell(clone, environment)
    printed = []
    for language, block in BLOCKS:
        if language == "python":
            name = block.splitlines()[0].removeprefix("# ")
            (shell.folder / name).write_text(block, "utf-8")
        else:
            if "[llm]" in block:
                check_environment(Shell(clone, environment))
            # After a release, the index has other files than the checkout
            printed.append(shell.run(re.sub(r"'quantizer-torch(\[\w+\])'", r"'.\1'", block)))
    first, second, third, fourth = printed
    check_table(first)
    assert "Wrote mine/export/Sequential.onnx: " in second
    assert "gate sqnr_db>=20: met" in third
    check_language_model(fourth, clone)


def check_language_model(printed: str, clone: Path) -> None:
    """Compare the sentence on the language model with what its block prints."""
    told = re.search(r"its perplexity of ([\d.]+) and shrinks from (\d+) to (\d+ kB)", README)
    assert told is not None
    measured = re.search(r"perplexity is ([\d.]+), in float ([\d.]+);", printed)
    assert measured is not None, printed
    for found in measured.groups():
        assert float(found) == pytest.approx(float(told[1]), abs=0.01)
    weights = clone / "quantizer_demo" / "tales" / "model.safetensors"
    assert round(weights.stat().st_size / 1000) == int(told[2])
    assert f"float activations; {told[3]}" in printed


def check_table(printed: str) -> None:
    """Compare the first table with what the first block prints."""
    rows = re.findall(r"^\| (\w+)[^|]*\| ([^|]+) \| ([^|]+) \|$", README, re.M)
    shown = {name: (before, after) for name, before, after in rows}
    (metric,) = re.findall(r"top1 is (\d+\.\d+), in float (\d+\.\d+)", printed)
    for told, measured in zip(shown["accuracy"], reversed(metric), strict=True):
        assert float(told) == pytest.approx(float(measured), abs=0.001)
    before, after = shown["weights"]
    assert f"Weights take {before} in float, {after} quantized." in printed
    speed = re.findall(r"10 of 10 multiplications in int8; ([\d.]+)x the speed of", printed)
    assert "10 of 10 multiplications in int8" in printed
    # A busy machine prints no speed
    for ratio in speed:
        assert float(ratio) > 1, "processors differ, but it is faster than in float"


def check_environment(shell: Shell) -> None:
    """Check what was installed before the extra llm is, and that errors advise what fits it."""
    clone = shell.folder
    assert shell.run("python -c 'import torch; print(torch.version.cuda)'") == "None\n"
    llama = clone / "llama"
    llama.mkdir()
    (llama / "config.json").write_text('{"architectures": ["Tiny"]}')
    refused = f"quantizer run {llama} --to w4"
    assert "help: pip install '.[llm]'\n" in shell.run(refused, 3)
    shell.folder = clone.parent
    assert f"help: pip install '{clone}[llm]'\n" in shell.run(refused, 3)
