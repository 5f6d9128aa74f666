"""action.yml and docs/ci.md: each command runs as it is written, with the inputs that a
workflow gives it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantizer.cli.main import run_command

yaml = pytest.importorskip("yaml", reason="the pages are YAML (extra: llm)")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ci.md").read_text("utf-8")
BLOCKS = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
MODEL = re.findall(
    r"```python\n(# my_model\.py.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL
)[0]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A user's, with a config from `init`."""
    (tmp_path / "my_model.py").write_text(MODEL)
    shell("quantizer init --device CPU -o quantize_config.json", tmp_path)
    return tmp_path


def shell(command: str, folder: Path, code: int = 0, **variables: str) -> str:
    """What bash prints, as a step of Actions or a job of GitLab runs it: it ends with the first
    command that fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **variables}
    env.pop("COLUMNS", None)
    run = subprocess.run(
        ["bash", "-e", "-c", command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout + run.stderr


def steps(**inputs: str) -> dict[str, tuple[str, dict[str, str]]]:
    """The action's steps that run with these inputs: their commands and variables."""
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    known = {
        name: str(said.get("default", "")) for name, said in action["inputs"].items()
    } | inputs
    assert set(inputs) <= set(action["inputs"])

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: known[found[1]], text)

    found = {}
    for step in action["runs"]["steps"]:
        if "run" not in step:
            continue
        assert step["working-directory"] == "${{ inputs.working_directory }}"
        condition = step.get("if", "inputs.model == inputs.model")
        name = re.fullmatch(r"inputs\.(\w+) != ''", condition)
        if name is None or known[name[1]]:
            found[step["name"]] = (
                step["run"],
                {key: filled(value) for key, value in step.get("env", {}).items()},
            )
    return found


def test_a_config_alone_is_validated_at_its_lines_and_needs_no_torch(repository: Path) -> None:
    found = steps(config="quantize_config.json")
    assert list(found) == ["Install", "Validate"]
    command, variables = found["Install"]
    command = command.replace("python -m pip install --quiet", "echo")
    variables["GITHUB_ACTION_PATH"] = str(ROOT)
    index = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert shell(command, repository, **variables) == f"{index} {ROOT}\n"
    with_cuda = {**variables, "TORCH_INDEX": ""}
    assert shell(command, repository, **with_cuda) == f"{ROOT}\n"
    mirrored = {**variables, "PACKAGE": "mirror", "MODEL": "my_model.py", "EXTRAS": "onnx"}
    assert shell(command, repository, **mirrored) == f"{index} mirror[onnx]\n"
    assert shell(found["Validate"][0], repository, **found["Validate"][1]).strip() == ""
    config = repository / "quantize_config.json"
    config.write_text(config.read_text().replace('"maxmin"', '"minmax"', 1))
    said = shell(found["Validate"][0], repository, 1, **found["Validate"][1])
    assert re.search(
        r"^::error file=quantize_config\.json,line=\d+,col=\d+,title=QZ\d+::",
        said,
        re.MULTILINE,
    )


@pytest.mark.real
def test_the_workflow_of_the_page_gates_a_model_with_an_annotation(repository: Path) -> None:
    inputs = BLOCKS[1]["jobs"]["gate"]["steps"][2]["with"]
    summary = repository / "summary.md"
    found = steps(**inputs)
    actions = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    assert list(found) == ["Install", "Validate", "Calibrate", "Test"]
    for name in ("Validate", "Calibrate", "Test"):
        command, variables = found[name]
        said = shell(command, repository, **variables, **actions)
    assert "sqnr_db" in said and "::error" not in said
    written = summary.read_text()
    assert written.startswith(
        "### quantizer: Sequential\n\n- The output differs from float by "
    )
    assert "- gate sqnr_db>=20: met (" in written
    assert "| weights of `0` | int8 per_channel" in written
    command, variables = found["Test"]
    said = shell(
        command, repository, 1, **(variables | {"GATES": "sqnr_db>=20\ncosine>=2\n"}), **actions
    )
    (line,) = re.findall(
        r"^::error file=quantize_config\.json,line=(\d+),title=quantizer::not met: cosine>=2; ",
        said,
        re.M,
    )
    report = json.loads((repository / "quantize_result" / "report.json").read_text())
    assert int(line) == report["layers"][0]["line"]
    assert "::error" not in shell(
        command, repository, 1, **(variables | {"GATES": "cosine>=2"}), GITHUB_ACTIONS=""
    )


@pytest.mark.real
def test_gitlab_s_script_and_the_comparison_run(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job: dict[str, Any] = BLOCKS[2]["quantization"]
    install, *rest = map(shlex.split, job["script"])
    assert install[:2] == ["pip", "install"]
    assert install[2].partition(" @ git+")[0] == "quantizer-torch[torch]"
    assert install[3:] == ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    monkeypatch.chdir(repository)
    assert [(words[0], run_command(words[1:])) for words in rest] == [("quantizer", 0)] * 3
    for path in job["artifacts"]["paths"]:
        assert (repository / path).exists()
    shutil.copytree("quantize_result", "release/quantize_result")
    (command,) = re.findall(r"^quantizer diff .*$", PAGE, re.MULTILINE)
    assert run_command(shlex.split(command)[1:]) == 0
    assert "no tensor differs" in capsys.readouterr().out


def test_the_hook_of_the_page_is_that_of_the_repository() -> None:
    (hook,) = BLOCKS[0]["repos"][0]["hooks"]
    (own,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert {name: hook[name] for name in ("id", "name", "entry", "language", "files")} == {
        name: own[name] for name in ("id", "name", "entry", "language", "files")
    }
    assert re.search(own["files"], "models/quantize_config.v2.json")
