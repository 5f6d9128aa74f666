"""The command that an error offers for a missing extra fits how the package was installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import ROOT
from support.without_torch import BLOCKED

Installed = Callable[..., Path]


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    """Return a function that lays out a folder for PYTHONPATH, as pip does."""

    def lay_out(origin: dict[str, object] | None) -> Path:
        packages = tmp_path / "site-packages"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "quantizer", packages / "quantizer", ignore=ignored)
        for folder in ("configs", "schemas"):
            shutil.copytree(ROOT / folder, packages / "quantizer" / folder)
        information = packages / "quantizer_torch-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            "Metadata-Version: 2.4\nName: quantizer-torch\nVersion: 1.0\n"
            'Requires-Dist: torch>=2.8; extra == "torch"\n'
            'Requires-Dist: safetensors>=0.8; extra == "torch"\n'
        )
        if origin is not None:
            (information / "direct_url.json").write_text(json.dumps(origin))
        return packages

    return lay_out


def advice(packages: Path, folder: Path) -> str:
    """Return the help of a command that needs torch, which is missing."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "plan", "--model", "my_model.py"],
        cwd=folder,
        env={"PYTHONPATH": str(packages)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    first, _, rest = done.stderr.partition("\nhelp: ")
    assert first == "error: this command needs the package torch, which is not installed"
    return rest.rstrip("\n")


def test_from_an_index(installed: Installed, tmp_path: Path) -> None:
    packages = installed(None)
    assert advice(packages, tmp_path) == "pip install 'quantizer-torch[torch]'"


def test_from_a_clone(installed: Installed, tmp_path: Path) -> None:
    clone = tmp_path / "a clone"
    clone.mkdir()
    packages = installed({"url": clone.as_uri(), "dir_info": {}})
    assert advice(packages, clone) == "pip install '.[torch]'"
    assert advice(packages, tmp_path) == f"pip install '{clone}[torch]'"


def test_from_a_wheel(installed: Installed, tmp_path: Path) -> None:
    wheel = tmp_path / "quantizer_torch-1.0-py3-none-any.whl"
    wheel.touch()
    packages = installed({"url": wheel.as_uri(), "archive_info": {}})
    assert advice(packages, tmp_path) == f"pip install '{wheel}[torch]'"
    wheel.unlink()
    assert advice(packages, tmp_path) == "pip install 'torch>=2.8' 'safetensors>=0.8'"


def test_from_an_address(installed: Installed, tmp_path: Path) -> None:
    source = {"vcs": "git", "commit_id": "0a1b2c"}
    packages = installed({"url": "https://example.org/quantizer", "vcs_info": source})
    assert advice(packages, tmp_path) == (
        "pip install 'quantizer-torch[torch] @ git+https://example.org/quantizer@0a1b2c'"
    )


def test_in_a_clone_the_installation_stays_editable(tmp_path: Path) -> None:
    assert advice(ROOT, ROOT) == "pip install -e '.[torch]'"
    assert advice(ROOT, tmp_path) == f"pip install -e '{ROOT}[torch]'"
