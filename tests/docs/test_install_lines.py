"""What readers are told to install works now: in a clone until there is a release, from an index
afterwards.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL_LINES = runpy.run_path(str(ROOT / "docs" / "install_lines.py"))
PUBLISHED = INSTALL_LINES["PUBLISHED"]
ADDRESS = INSTALL_LINES["repository"]()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
INSTALLED = re.compile(r"pip install [^\n`]*?(\.|quantizer[\w-]*)\[([a-z,]+)\]([^\n`]*)")


def lines_of(text: str) -> list[tuple[str, str, str]]:
    """The package, the extras and the rest of each line that installs this one."""
    return INSTALLED.findall(text)


def written(page: str, *, published: bool, address: str = "") -> str:
    text: str = INSTALL_LINES["with_install_lines"](page, published=published, address=address)
    return text


@pytest.mark.parametrize("published", [False, True])
def test_all_pages_install_from_the_same_place(published: bool) -> None:
    """From an index, or from a clone and its address."""
    if PUBLISHED and not published:
        pytest.skip("there was a release")
    found = []
    for path in PAGES:
        text = written(path.read_text("utf-8"), published=published)
        assert published or text == path.read_text("utf-8") or ADDRESS, path
        found += lines_of(text)
    assert len(found) > 20
    extras = set(re.findall(r"^(\w+) = \[", PROJECT, re.MULTILINE))
    assert {extra for _, names, _ in found for extra in names.split(",")} <= extras
    of_clone = {("quantizer-torch", "torch"), (".", "examples,onnx")}
    for package, names, rest in found:
        if published:
            assert package == "quantizer-torch" or (package, names) in of_clone
            assert "clone" not in rest and "git+" not in rest
        else:
            assert package == "." or " @ git+" in rest


def test_the_first_line_of_the_readme_keeps_to_the_index_of_torch() -> None:
    readme = written((ROOT / "README.md").read_text("utf-8"), published=True)
    index = " --extra-index-url https://download.pytorch.org/whl/cpu"
    assert f"```\npip install 'quantizer-torch[onnx]'{index}\n" in readme
    assert "a clone of" not in readme


def test_an_address_is_written_where_a_clone_is_named() -> None:
    address = "https://example.org/me/quantizer"
    line = written("pip install '.[onnx]'\n", published=False, address=address)
    assert line == f"pip install '.[onnx]'  # in a clone of {address}\n"
    assert written(line, published=False, address=address) == line
    assert written(line, published=True, address=address) == (
        "pip install 'quantizer-torch[onnx]'\n"
    )
    job = "- pip install 'quantizer-torch[torch] @ git+ADDRESS_OF_YOUR_CLONE'\n"
    assert written(job, published=False) == job
    found = written(job, published=False, address=address)
    assert found == f"- pip install 'quantizer-torch[torch] @ git+{address}'\n"
    assert written(found, published=True) == "- pip install 'quantizer-torch[torch]'\n"
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert f"git clone {address} && cd quantizer" in written(
        contributing, published=False, address=address
    )


def test_the_readme_says_whose_name_it_is() -> None:
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert (
        "pip knows this package as `quantizer-torch`; PyPI's `quantizer` is another project."
    ) in readme
