"""Shells complete commands, codes and the layers of the last calibration; nothing runs for
that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from quantizer.cli.arguments.places import layers_of_results

SHELLS = {
    "bash": """
eval "$(_QUANTIZER_COMPLETE=bash_source quantizer)"
complete_words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _quantizer_completion quantizer; }
shown() { printf '%s\n' "${COMPREPLY[@]}"; }
""",
    "zsh": """
compdef() { }
compadd() { found+=($completions) }
_describe() { found+=(${completions_with_descriptions%%:*}) }
eval "$(_QUANTIZER_COMPLETE=zsh_source quantizer)"
complete_words() { found=(); words=("$@"); CURRENT=$#; _quantizer_completion }
shown() { print -l -- $found }
""",
}
PARAMETER = click.Option(["--filter"])


def context(**params: str) -> click.Context:
    made = click.Context(click.Command("plan"))
    made.params = dict(params)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_codes_and_layers(shell: str, calibrated: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    asked = (
        "quantizer pl",
        "quantizer plan --model net.py --filter layer1.0.c",
        "quantizer explain QZ30",
    )
    script = SHELLS[shell] + "".join(
        f"complete_words {words}\nshown\necho --\n" for words in asked
    )
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    output = subprocess.run(
        [shell, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        cwd=calibrated.parent,
    ).stdout
    commands, layers, codes = (part.split() for part in output.split("--\n")[:3])
    assert commands == ["plan"]
    assert layers == ["layer1.0.conv1", "layer1.0.conv2"]
    assert {"QZ301", "QZ302"} <= {*codes}
    assert all(code.startswith("QZ30") for code in codes)


def test_layers_are_those_of_the_folder_on_the_command_line_or_of_the_last_results(
    calibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(calibrated.parent)
    layers = layers_of_results(context(), PARAMETER, "layer1")
    assert layers[0] == "layer1.0.conv1"
    monkeypatch.chdir(calibrated)
    assert layers_of_results(context(), PARAMETER, "layer1") == []
    for name in ("folder", "output_dir"):
        named = context(**{name: str(calibrated)})
        assert layers_of_results(named, PARAMETER, "layer1") == layers


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"paths": []}'])
def test_a_damaged_plan_completes_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    assert layers_of_results(context(folder=str(tmp_path)), PARAMETER, "") == []


def test_completion_imports_no_torch(calibrated: Path) -> None:
    code = (
        "import sys, click\n"
        "from quantizer.cli.arguments.places import layers_of_results\n"
        "context = click.Context(click.Command('plan'))\n"
        "assert layers_of_results(context, None, 'layer1')\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=calibrated.parent, env=environment
    )
