"""Renders diagnostics as text with excerpts, JSON, GitHub annotations or SARIF."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import click

from quantizer import __version__
from quantizer.cli.arguments.places import as_typed
from quantizer.cli.terminal.screen import screen
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.printable import json_text, one_line

MAX_SHOWN = 50
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_WIDTH = 100
Diagnostics = Sequence[Diagnostic]
Sources = Mapping[str, str]
"""The texts of config files, by name."""
Renderer = Callable[[Diagnostics, Sources], str]
_COLORS = {"error": "red", "warning": "yellow", "note": "blue"}


def print_diagnostics(diagnostics: Diagnostics, sources: Sources) -> None:
    """Print findings as text on standard error, no notes with `--quiet`; nothing if there are
    none.
    """
    if screen().quiet:
        diagnostics = [finding for finding in diagnostics if finding.severity != "note"]
    if diagnostics:
        click.echo(as_typed(render_text(diagnostics, sources)), err=True)


def say(text: str, *, err: bool = False) -> None:
    """Print one line of text, with control characters of names escaped."""
    click.echo(one_line(as_typed(text)), err=err)


def say_note(text: str) -> None:
    """Print one line of text on standard error, unless `--quiet` is given."""
    if not screen().quiet:
        say(text, err=True)


def render_text(diagnostics: Diagnostics, sources: Sources) -> str:
    """Return the findings as text: place, code and message, the source line with a caret, and a
    remedy. Return at most 50 of them.
    """
    shown = [_text(diagnostic, sources) for diagnostic in diagnostics[:MAX_SHOWN]]
    if len(diagnostics) > MAX_SHOWN:
        shown.append(f"… and {len(diagnostics) - MAX_SHOWN} more")
    return "\n".join(shown)


def render_json(diagnostics: Diagnostics, sources: Sources) -> str:
    """Return a JSON list with one object per finding."""
    return json_text([_as_json(diagnostic) for diagnostic in diagnostics])


def render_github(diagnostics: Diagnostics, sources: Sources) -> str:
    """Return workflow commands of GitHub Actions."""
    return "\n".join(map(_github, diagnostics))


def render_sarif(diagnostics: Diagnostics, sources: Sources) -> str:
    """Return a SARIF 2.1.0 log (OASIS standard)."""
    codes = sorted({finding.code for finding in diagnostics})
    rules = [{"id": code} for code in codes]
    driver = {"name": "quantizer", "version": __version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": list(map(_sarif, diagnostics)),
    }
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return json_text(log)


RENDERERS: dict[str, Renderer] = {
    "text": render_text,
    "json": render_json,
    "github": render_github,
    "sarif": render_sarif,
}


def _text(diagnostic: Diagnostic, sources: Sources) -> str:
    color = _COLORS[diagnostic.severity]
    label = click.style(f"{diagnostic.severity} {diagnostic.code}:", fg=color, bold=True)
    where = f"{diagnostic.place}: " if diagnostic.place else ""
    lines = [f"{one_line(where)}{label} {one_line(diagnostic.message)}"]
    if diagnostic.place:
        lines += _excerpt(diagnostic.place, sources, ("^", color), diagnostic.remark or "")
    for place, remark in diagnostic.related:
        lines += _excerpt(place, sources, ("-", "blue"), remark)
    if diagnostic.help:
        lines.append(f"   help: {one_line(diagnostic.help)}")
    return "\n".join(lines)


def _excerpt(place: Place, sources: Sources, mark: tuple[str, str], remark: str) -> list[str]:
    """Return the source line, cut if it is long, and marks under the place."""
    lines = sources.get(place.file, "").split("\n")
    if place.line > len(lines):
        return []
    line = lines[place.line - 1].rstrip("\r")
    if not line.strip():
        return []
    start = place.column - 1
    if len(line) > _MAX_WIDTH:
        cut = max(0, start - _MAX_WIDTH // 3)
        line = line[cut : cut + _MAX_WIDTH]
        start -= cut
    line = _printable(line)
    length = max(1, min(place.length, len(line) - start))
    character, color = mark
    width = max(1, _width(line[start : start + length]))
    marks = click.style(character * width, fg=color)
    padding = " " * _width(line[:start])
    return [
        f"{place.line:5} | {line}",
        f"{'':5} | {padding}{marks} {one_line(remark)}".rstrip(),
    ]


def _printable(text: str) -> str:
    """Return text of the same length without control characters, so that carets stay in
    place.
    """
    shown = ""
    for character in text.replace("\t", " "):
        shown += character if character.isprintable() else _REPLACEMENT
    if one_line(shown) != shown:
        return shown.replace("#", _REPLACEMENT)
    return shown


def _width(text: str) -> int:
    """Return the number of columns on a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide


def _as_json(diagnostic: Diagnostic) -> dict[str, object]:
    content: dict[str, object] = {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "help": diagnostic.help,
    }
    if diagnostic.place:
        content |= asdict(diagnostic.place)
    related = []
    for place, remark in diagnostic.related:
        related.append({**asdict(place), "remark": remark})
    content["related"] = related
    return content


def _github(diagnostic: Diagnostic) -> str:
    level = "notice" if diagnostic.severity == "note" else diagnostic.severity
    properties = {}
    if diagnostic.place:
        properties["file"] = diagnostic.place.file
        properties["line"] = str(diagnostic.place.line)
        properties["col"] = str(diagnostic.place.column)
    properties["title"] = diagnostic.code
    text = one_line(diagnostic.message)
    if diagnostic.help:
        text += "\n" + one_line(f"help: {diagnostic.help}")
    return workflow_command(level, properties, text)


def workflow_command(level: str, properties: Mapping[str, str], text: str) -> str:
    """Return a line that GitHub Actions shows at a place of a file.

    >>> workflow_command("error", {"file": "a,b.json", "line": "3"}, "50 % is too much")
    '::error file=a%2Cb.json,line=3::50 %25 is too much'
    """
    pairs = []
    for key, value in properties.items():
        value = _github_escape(value)
        value = value.replace(":", "%3A").replace(",", "%2C")
        pairs.append(f"{key}={value}")
    return f"::{level} {','.join(pairs)}::{_github_escape(text)}"


def _github_escape(text: str) -> str:
    text = text.replace("%", "%25")
    text = text.replace("\r", "%0D")
    return text.replace("\n", "%0A")


def _sarif(diagnostic: Diagnostic) -> dict[str, object]:
    text = diagnostic.message
    if diagnostic.help:
        text += f" ({diagnostic.help})"
    result: dict[str, object] = {
        "ruleId": diagnostic.code,
        "level": diagnostic.severity,
        "message": {"text": text},
    }
    if diagnostic.place:
        result["locations"] = [_sarif_place(diagnostic.place)]
    if diagnostic.related:
        locations = []
        for place, remark in diagnostic.related:
            locations.append({**_sarif_place(place), "message": {"text": remark}})
        result["relatedLocations"] = locations
    return result


def _sarif_place(place: Place) -> dict[str, object]:
    region = {
        "startLine": place.line,
        "startColumn": place.column,
        "endColumn": place.column + place.length,
    }
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": place.file.replace("\\", "/")},
            "region": region,
        }
    }
