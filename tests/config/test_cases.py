"""Every file in tests/cases/configs gives exactly the findings in its `.expected` file, none if
it has none. A new case needs no code.

A line there has the place, the severity, the code, the key that the remedy is about, and the
other places of the conflict. The sentences stand in tests/cases/sentences.txt, each once under
its code; tests/cases/rendered.txt shows a few findings whole. After a change of wording,
`python -m tests.config.test_cases` writes all of them anew; read the difference before
committing it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import click
import pytest

from quantizer.cli.terminal.render import render_text
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.load import LoadResult, load_config
from quantizer.config.rules.spec_rules import spec_rules

CASES = Path(__file__).parents[1] / "cases" / "configs"
SENTENCES = CASES.parent / "sentences.txt"
RENDERED = CASES.parent / "rendered.txt"
SHOWN = ("h_qz302_after_merging", "qz002_nul_byte", "qz003_nesting")
"""A conflict of two lines, a character that cannot be shown, and a line that is cut."""
FILES = sorted(CASES.glob("*/*.json"))
PRESETS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))
KEY_IN_REMEDY = re.compile(r'"([a-z_0-9]+)":')
Sentences = Mapping[str, set[str]]
"""By code."""


@cache
def loaded(path: Path) -> LoadResult:
    return load_config(path)


def expectation(path: Path) -> str:
    """A line for each finding."""
    lines = [f"{line_of(finding)}\n" for finding in loaded(path).diagnostics]
    return "".join(lines)


def line_of(finding: Diagnostic) -> str:
    parts = [columns(finding.place), finding.severity, finding.code, remedy_key(finding)]
    for place, _ in finding.related:
        parts.append(columns(place))
    return " ".join(parts)


def columns(place: Place | None) -> str:
    """The line, the first column, and the column after the caret's last."""
    if place is None or not place.line:
        return "-"
    return f"{place.line}:{place.column}-{place.column + place.length}"


def remedy_key(finding: Diagnostic) -> str:
    """The key that the help writes; otherwise the one that the finding points to."""
    written = KEY_IN_REMEDY.search(finding.help or "")
    if written:
        return written[1]
    pointer = finding.place.pointer if finding.place else ""
    keys = [part for part in pointer.split("/") if part and not part.isdigit()]
    return keys[-1] if keys else "-"


def sentences_of(paths: Iterable[Path]) -> Sentences:
    """The sentences of all findings, with {} for a string of the file that is underlined."""
    sentences: dict[str, set[str]] = {}
    for path in paths:
        result = loaded(path)
        for finding in result.diagnostics:
            of_code = sentences.setdefault(finding.code, set())
            text = underlined(finding.place, result.sources)
            of_code.add(finding.message.replace(text, "{}") if text else finding.message)
            for _, remark in finding.related:
                of_code.add(f"- {remark}")
            if finding.remark:
                of_code.add(f"^ {finding.remark}")
            if finding.help:
                of_code.add(f"help: {finding.help}")
    return sentences


def underlined(place: Place | None, sources: Mapping[str, str]) -> str:
    """The string at the place with its quotes; empty if there is something else."""
    if place is None or not place.line:
        return ""
    line = sources.get(place.file, "").split("\n")[place.line - 1]
    text = line[place.column - 1 : place.column - 1 + place.length]
    return text if text.startswith('"') else ""


def golden_text(sentences: Sentences) -> str:
    lines = []
    for code in sorted(sentences):
        lines.append(f"{code}\n")
        lines += [f"    {sentence}\n" for sentence in sorted(sentences[code])]
    return "".join(lines)


def rendered_text() -> str:
    """The findings of a few cases as a terminal shows them."""
    text = ""
    for name in SHOWN:
        result = loaded(CASES / "invalid" / f"{name}.json")
        text += click.unstyle(render_text(result.diagnostics, result.sources)) + "\n"
    return text.replace(f"{CASES}/", "")


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case(path: Path) -> None:
    expected = path.with_suffix(".expected")
    assert expectation(path) == (expected.read_text("utf-8") if expected.exists() else "")
    assert (loaded(path).config is not None) == (path.parent.name == "valid")


def test_sentences() -> None:
    assert SENTENCES.read_text("utf-8") == golden_text(sentences_of(FILES))


def test_excerpts() -> None:
    assert RENDERED.read_text("utf-8") == rendered_text()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_is_valid_without_a_warning(path: Path) -> None:
    assert load_config(path).diagnostics == ()


def test_every_rule_has_a_case() -> None:
    codes = {finding.code for path in FILES for finding in loaded(path).diagnostics}
    assert set(spec_rules()) <= codes


if __name__ == "__main__":
    for file in FILES:
        lines = expectation(file)
        if lines:
            file.with_suffix(".expected").write_text(lines, encoding="utf-8")
        else:
            file.with_suffix(".expected").unlink(missing_ok=True)
    SENTENCES.write_text(golden_text(sentences_of(FILES)), encoding="utf-8")
    RENDERED.write_text(rendered_text(), encoding="utf-8")
