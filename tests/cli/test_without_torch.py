"""What a plain install can do: the commands that only read and write configs, and the
dataclasses.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.without_torch import BLOCK, BLOCKED

from quantizer.cli.main import subcommands
from quantizer.installation import pip_line

CONFIGS = Path(__file__).parents[2] / "configs"
LIGHT = [
    ["--help"],
    ["--version"],
    ["validate", str(CONFIGS / "example.json"), str(CONFIGS / "weight_int8.json")],
    ["init", "-o", "-"],
    ["init", "--strategy", "awq", "-o", "-"],
    ["convert", str(CONFIGS / "weight_int8.json")],
    ["explain"],
    ["explain", "QZ301"],
    ["explain", "gptq"],
    ["schema"],
    ["diff", str(CONFIGS / "weight_int8.json"), str(CONFIGS / "weight_int4_group.json")],
    ["help", "analyze"],
    *([name, "--help"] for name in subcommands()),
]
SLIPS = {
    2: [["run"], ["run", "net.py", "--to", "tensor"], ["run", "net.py", "--presett", "dpu"]],
    3: [["run", "net.py"], ["run", "net.py:build", "--to", "onnx"]],
}
"""Commands that end before anything is done, by exit code. There is no net.py."""
HEAVY = [
    ["--quant_mode", "calib", "--model", "my_model.py"],
    ["plan", "--model", "my_model.py"],
    ["inspect", "--model", "my_model.py"],
    ["retune", "--method", "maxmin"],
    ["report"],
    ["analyze", "--model", "my_model.py"],
    ["explain", "--model", "my_model.py", "conv1"],
]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def test_commands_about_configs_do_not_ask_for_torch() -> None:
    """In one process: the first of them that asks for torch is noted."""
    program = """
import json
from quantizer.cli.main import run_command
for words in json.loads(sys.argv[1]):
    assert run_command(words) == 0, words
    assert not Missing.asked, (words, Missing.asked)
"""
    done = run(BLOCK + program, json.dumps(LIGHT))
    assert done.returncode == 0, done.stderr


def test_slips_do_not_wait_for_torch() -> None:
    program = """
import json
from quantizer.cli.main import run_command
for code, commands in json.loads(sys.argv[1]).items():
    for words in commands:
        assert run_command(words) == int(code), words
        assert not Missing.asked, (words, Missing.asked)
"""
    done = run(BLOCK + program, json.dumps(SLIPS))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", HEAVY, ids=lambda arguments: " ".join(arguments[:2]))
def test_a_missing_torch_is_one_sentence(arguments: list[str]) -> None:
    done = run(BLOCKED, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: this command needs the package torch, which is not installed\n"
        f"help: {pip_line('torch')}\n"
    )


def test_the_dataclasses_work_without_torch(tmp_path: Path) -> None:
    program = """
import quantizer
names = {name: getattr(quantizer, name) for name in quantizer.__all__ if name not in ("calibrate", "load", "quantize", "Quantized")}
config = quantizer.Config(quantizer.QuantizationConfig(weight=quantizer.QuantizationSpec(quantizer.Dtype.int8)))
config.save(sys.argv[1])
assert quantizer.Config.load(sys.argv[1]) == config
assert not Missing.asked, Missing.asked
from quantizer import calibrate
"""
    done = run(BLOCK + program, str(tmp_path / "config.json"))
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: quantizer.calibrate needs torch: " + pip_line("torch")
    )
    assert "assert" not in done.stderr
