"""A hook of the site: the version in its title, the pages that follow from the package, files
of the repository that pages link to, and the schemas at their addresses.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files  # type: ignore[import-not-found]

sys.path.append(str(Path(__file__).parent))

from install_lines import repository
from site_pages import site_pages, with_links

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(
    r"\]\(\.\./((?:examples|configs|quantizer|schemas)/[\w./-]+|(?:README|CONTRIBUTING)\.md)"
    r"(?:#[\w-]+)?\)"
)
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
_GENERATED = frozenset([*site_pages(), "engine_results.md", "family_results.md"])


def on_config(config: Any) -> Any:
    """Write the package's version into the title. With the address of the repository, each page
    has a link to edit it.
    """
    source = (ROOT / "quantizer" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "([\d.]+)"$', source, re.MULTILINE)
    config.site_name = f"{config.site_name} {version}"
    config.repo_url = repository()
    if not config.repo_url:
        config.edit_uri = None
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that follow from the package, what pages link to outside of docs/, and the
    schemas.
    """
    for place, text in site_pages().items():
        files.append(File.generated(config, place, content=text))
    named = {
        name
        for path in (ROOT / "docs").glob("*.md")
        for name in OUTSIDE.findall(path.read_text("utf-8"))
    }
    for name in sorted(named):
        files.append(File.generated(config, f"files/{name}.txt", abs_src_path=str(ROOT / name)))
    for path in (ROOT / "schemas").glob("*.schema.json"):
        files.append(File.generated(config, f"schemas/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write a page as the site needs it.

    Commands that print a page link to it. Links to files of the repository lead to the copies.
    In the cells of tables, a bar in code has a backslash for GitHub, which the site would show.
    The search leaves out decisions, and pages that are generated.
    """
    place = page.file.src_uri
    if place.startswith("decisions/") or place in _GENERATED:
        page.meta["search"] = {"exclude": True}
    text = TABLE_ROW.sub(_with_bars, with_links(place, markdown))
    if "/" in place:
        return text
    return OUTSIDE.sub(r"](files/\1.txt)", text)


def _with_bars(row: re.Match[str]) -> str:
    return CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0])
