"""The pages as a site: all are in its navigation, links lead somewhere, and the tutorial runs
as it is written.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.pages import commands_of
from support.site import SITE_PAGES, with_links

import quantizer
from quantizer.cli.main import run_command

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path: path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")]}
"""The pages of the repository."""
SITE = {DOCS / place: text for place, text in SITE_PAGES.items()} | {
    path: with_links(path.relative_to(DOCS).as_posix(), text)
    for path, text in PAGES.items()
    if path.parent != ROOT
}
"""The pages of the site, which links between them in addition."""
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(\$ | {4})?(quantizer|torchrun|python|pip|sed|export) ")
WIDEST_COMMAND = 96
"""docs/site.css makes the page wide enough for so many characters."""
TUTORIAL = (DOCS / "tutorial.md").read_text("utf-8")
BLOCKS = re.findall(r"^```\n(.*?)```", TUTORIAL, re.S | re.M)
COMMANDS = [
    command
    for block in BLOCKS
    if block.startswith(("quantizer ", "sed "))
    for command in commands_of(block)
]


def anchors(text: str) -> set[str]:
    """What a link may name: headings as GitHub and the site spell them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", text), re.MULTILINE)
    plain = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
        for title in titles
    ]
    found = {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}
    return (
        found
        | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
        | set(re.findall(r"\{#([\w-]+)\}", text))
    )


@pytest.mark.parametrize("pages", [PAGES, SITE], ids=["repository", "site"])
def test_links_lead_to_files_and_headings_that_are_there(pages: dict[Path, str]) -> None:
    lost = [
        f"{page.relative_to(ROOT)}: {link}"
        for page, text in pages.items()
        for link in lost_links(page, text, pages)
    ]
    assert lost == []


def lost_links(page: Path, text: str, pages: dict[Path, str]) -> Iterator[str]:
    text = FENCED.sub("", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if file not in pages and not file.exists():
            yield f"{target} is not there"
        elif anchor and file in pages and anchor not in anchors(pages[file]):
            yield f"{target} has no such heading"


def test_no_command_is_cut_at_a_width_of_1280_pixels() -> None:
    cut = [
        f"{page.relative_to(ROOT)}: {command}"
        for page, text in {**PAGES, **SITE}.items()
        for command in cut_commands(text)
    ]
    assert cut == []


def cut_commands(text: str) -> Iterator[str]:
    code = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    code += re.findall(r"^ {4}\S.*$", FENCED.sub("", text), re.MULTILINE)
    in_command = False
    for line in "\n".join(code).splitlines():
        is_command = in_command or COMMAND.match(line) is not None
        in_command = is_command and line.endswith("\\")
        if is_command and len(line) > WIDEST_COMMAND:
            yield line


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    named = set(re.findall(r"[\w/]+\.md", text.partition("\nnav:")[2]))
    pages = {path.name for path in SITE if path.parent == DOCS}
    assert named == pages | {"config/README.md", "decisions/index.md"}


@pytest.mark.real
def test_the_search_of_the_site_needs_no_server_and_leaves_out_what_is_generated(
    tmp_path: Path,
) -> None:
    pytest.importorskip("material", reason="it builds the site (extra: docs)")
    build = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-d",
        str(tmp_path),
    ]
    subprocess.run(build, cwd=ROOT, check=True)
    index = (tmp_path / "search" / "search_index.js").read_text("utf-8")
    entries = json.loads(index.removeprefix("var __index = "))["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries}
    assert {"onnx.html", "yolo.html", "config/index.html"} <= found
    generated = {place.replace(".md", ".html") for place in SITE_PAGES}
    generated |= {"engine_results.html", "family_results.html"}
    assert not found & generated
    assert not any(place.startswith("decisions/") for place in found)
    page = (tmp_path / "onnx.html").read_text("utf-8")
    scripts = re.findall(r'<script[^>]* src="([^"]+)"', page)
    assert "iframe-worker.js" in scripts
    assert not any("//" in script for script in scripts)


def test_every_decision_is_in_their_list() -> None:
    listed = re.findall(
        r"\]\((\d+[\w-]+\.md)\)", (DOCS / "decisions/index.md").read_text("utf-8")
    )
    assert listed == sorted(path.name for path in (DOCS / "decisions").glob("0*.md"))


HOUSE = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(DOCS / "decisions").glob("*.md")]


@pytest.mark.parametrize("page", HOUSE, ids=lambda page: page.name)
def test_files_that_the_house_papers_name_are_there(page: Path) -> None:
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text("utf-8")):
        places = [ROOT / name, ROOT / "quantizer" / name, ROOT / "benchmarks" / name]
        assert any(place.exists() for place in places), name


def test_the_newest_version_of_the_changelog_is_that_of_the_package() -> None:
    versions = re.findall(
        r"^## ([\d.]+) - 20\d\d-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M
    )
    assert versions[0] == quantizer.__version__


def test_the_architecture_is_short() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text("utf-8").splitlines()) <= 150


@pytest.mark.parametrize("name", ["layered", "hierarchical", "quantization_spec"])
def test_a_schema_has_the_address_that_configs_and_the_page_on_editors_name(name: str) -> None:
    schema = json.loads((ROOT / "schemas" / f"{name}.schema.json").read_text("utf-8"))
    (site,) = re.findall(
        r"^site_url: (\S+)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    assert schema["$id"] == f"{site}schemas/{name}.schema.json"
    if name != "quantization_spec":
        assert schema["$id"] in (DOCS / "editors.md").read_text("utf-8")


@pytest.mark.real
def test_the_tutorial_runs_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "onnxruntime", reason="it ends with a file for ONNX Runtime (extra: onnx)"
    )
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 13
    said = {}
    for command in COMMANDS:
        program, *words = shlex.split(command)
        if program == "quantizer":
            assert run_command(words) == 0, command
        else:
            subprocess.run(["bash", "-c", command], check=True)
        said[command] = capsys.readouterr().out
    first = said[next(command for command in COMMANDS if "--quant_mode test" in command)]
    figure = re.findall(r"^sqnr_db (\d+)\.", TUTORIAL, re.MULTILINE)[0]
    assert re.search(rf"^sqnr_db {figure}\.", first, re.MULTILINE), "as the page shows it"
    assert (tmp_path / "quantize_result" / "export" / "ResNet.onnx").exists()
