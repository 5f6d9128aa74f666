"""A release: what the two files hold, what a tag has to fulfil, and what the workflow may do."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path

import pytest
from support.checkouts import copied_checkout

import quantizer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "releasing.md").read_text("utf-8")
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
FAULTS: Callable[..., Iterator[str]] = runpy.run_path(str(ROOT / "docs" / "releasing.py"))[
    "faults"
]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"


def built(folder: Path, what: str, into: Path) -> Path:
    """A file that pip would build from a folder."""
    into.mkdir()
    command = [sys.executable, "-c", BUILD.format(what), str(into)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (file,) = into.iterdir()
    return file


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.real
def test_the_source_distribution_is_the_checkout_and_builds_its_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="it builds the package")
    if not (ROOT / ".git").exists():
        pytest.skip("git says which files belong to the checkout")
    checkout = tmp_path / "checkout"
    files = copied_checkout(checkout)
    source = built(checkout, "build_sdist", tmp_path / "source")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert [path for path in files if not (unpacked / path).is_file()] == []
    wheel = built(unpacked, "build_wheel", tmp_path / "wheel")
    of_source = content(wheel)
    assert of_source == content(built(checkout, "build_wheel", tmp_path / "direct"))
    of_tests = ("tests/", "docs/", "benchmarks/", "examples/")
    assert [name for name in of_source if name.startswith(of_tests)] == []
    assert "quantizer/examples/mnist.py" in of_source
    (metadata,) = [name for name in of_source if name.endswith(".dist-info/METADATA")]
    described(of_source[metadata])


def described(metadata: bytes) -> None:
    """Check what an index shows."""
    said = message_from_bytes(metadata)
    assert said["Name"] == "quantizer-torch"
    assert said["Version"] == quantizer.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    urls = said.get_all("Project-URL") or []
    assert urls[0] == "Documentation, https://quantizer-torch.readthedocs.io/"
    text = said.get_payload()
    assert isinstance(text, str)
    assert text.lstrip().startswith("# quantizer\n")
    assert "## 0.20.0 - " in text
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text)
    assert len(links) > 20
    relative = [found for found in links if not "".join(found).startswith(("https://", "#"))]
    assert relative == [], "an index has no files of the checkout"


def test_a_tag_is_that_of_the_version_and_everything_is_known() -> None:
    tag = f"v{quantizer.__version__}"
    address = "https://example.org/me/quantizer"
    assert list(FAULTS(tag, published=True, address=address)) == []
    assert len(list(FAULTS(tag, published=False, address=""))) == 2
    (fault,) = FAULTS("v0.1.0", published=True, address=address)
    assert fault.startswith("the tag is v0.1.0, and the version in ")


def test_the_workflow_asks_a_person_and_has_no_secrets() -> None:
    yaml = pytest.importorskip("yaml", reason="a workflow is YAML (extra: llm)")
    text = WORKFLOW.read_text("utf-8")
    workflow = yaml.safe_load(text)
    # YAML reads the key `on` as true
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert workflow["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build" and publish["environment"]["name"] == "pypi"
    assert "secrets." not in text and "password" not in text
    assert [step for step in publish["steps"] if "run" in step] == []
    commands = [step["run"] for step in build["steps"] if "run" in step]
    assert commands == [
        'python docs/releasing.py "$GITHUB_REF_NAME"',
        "make dist",
        "make test-wheel",
    ]
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    assert set(re.findall(r"\bmake ([\w-]+)", PAGE + text)) <= targets


def test_the_check_of_the_workflow_ends_with_each_fault() -> None:
    command = [sys.executable, "docs/releasing.py", "v0.1.0"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"the version in quantizer/__init__.py is {quantizer.__version__}" in done.stderr
