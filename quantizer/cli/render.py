"""Shows diagnostics: text with excerpts, JSON, GitHub annotations, SARIF. Changes none of
them.
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import click

from quantizer import __version__
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.printable import json_text, one_line

MAX_SHOWN = 50
REPLACED = "\N{REPLACEMENT CHARACTER}"
MAX_WIDTH = 100

Renderer = Callable[[Sequence[Diagnostic], Mapping[str, str]], str]
_COLORS = {"error": "red", "warning": "yellow", "note": "blue"}


def print_diagnostics(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> None:
    """Print findings as text on standard error; nothing if there are none."""
    if diagnostics:
        click.echo(render_text(diagnostics, sources), err=True)


def say(text: str, *, err: bool = False) -> None:
    """Print one line of text, whatever names are in it."""
    click.echo(one_line(text), err=err)


def render_text(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """`file:line:column: error CODE: message`, the source line with a caret, and what to do; at
    most 50 findings.
    """
    shown = [_text(diagnostic, sources) for diagnostic in diagnostics[:MAX_SHOWN]]
    if len(diagnostics) > MAX_SHOWN:
        shown.append(f"… and {len(diagnostics) - MAX_SHOWN} more")
    return "\n".join(shown)


def render_json(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """A JSON list with one object per finding."""
    return json_text([_as_json(diagnostic) for diagnostic in diagnostics])


def render_github(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """GitHub Actions workflow commands (docs.github.com, "Workflow commands", setting an error
    message).
    """
    return "\n".join(map(_github, diagnostics))


def render_sarif(diagnostics: Sequence[Diagnostic], sources: Mapping[str, str]) -> str:
    """A SARIF 2.1.0 log (OASIS standard)."""
    rules = [{"id": code} for code in sorted({found.code for found in diagnostics})]
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


def _text(diagnostic: Diagnostic, sources: Mapping[str, str]) -> str:
    label = click.style(
        f"{diagnostic.severity} {diagnostic.code}:", fg=_COLORS[diagnostic.severity], bold=True
    )
    where = f"{diagnostic.place}: " if diagnostic.place else ""
    lines = [f"{one_line(where)}{label} {one_line(diagnostic.message)}"]
    color = _COLORS[diagnostic.severity]
    if diagnostic.place:
        lines += _excerpt(diagnostic.place, sources, ("^", color), diagnostic.remark or "")
    for place, remark in diagnostic.related:
        lines += _excerpt(place, sources, ("-", "blue"), remark)
    if diagnostic.help:
        lines.append(f"   help: {one_line(diagnostic.help)}")
    return "\n".join(lines)


def _excerpt(
    place: Place, sources: Mapping[str, str], mark: tuple[str, str], remark: str
) -> list[str]:
    """The source line, cut to a window if it is long, and marks under the place."""
    lines = sources.get(place.file, "").split("\n")
    if place.line > len(lines) or not lines[place.line - 1].strip():
        return []
    line = lines[place.line - 1].rstrip("\r")
    start, length = place.column - 1, place.length
    if len(line) > MAX_WIDTH:
        cut = max(0, start - MAX_WIDTH // 3)
        line, start = line[cut : cut + MAX_WIDTH], start - cut
    line = _printable(line)
    length = max(1, min(length, len(line) - start))
    character, color = mark
    marks = click.style(character * max(1, _width(line[start : start + length])), fg=color)
    padding = " " * _width(line[:start])
    return [
        f"{place.line:5} | {line}",
        f"{'':5} | {padding}{marks} {one_line(remark)}".rstrip(),
    ]


def _printable(text: str) -> str:
    """Text that cannot steer the terminal, character for character as long, so that carets stay
    in place.
    """
    shown = "".join(c if c.isprintable() else " " if c == "\t" else REPLACED for c in text)
    return shown if one_line(shown) == shown else shown.replace("#", REPLACED)


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _as_json(diagnostic: Diagnostic) -> dict[str, object]:
    return {
        "code": diagnostic.code,
        "severity": diagnostic.severity,
        "message": diagnostic.message,
        "help": diagnostic.help,
        **(asdict(diagnostic.place) if diagnostic.place else {}),
        "related": [
            {**asdict(place), "remark": remark} for place, remark in diagnostic.related
        ],
    }


def _github(diagnostic: Diagnostic) -> str:
    level = {"error": "error", "warning": "warning", "note": "notice"}[diagnostic.severity]
    properties = {"title": diagnostic.code}
    if diagnostic.place:
        place = diagnostic.place
        properties = {
            "file": place.file,
            "line": str(place.line),
            "col": str(place.column),
            **properties,
        }
    return workflow_command(
        level, properties, one_line(diagnostic.message) + _help(diagnostic.help)
    )


def workflow_command(level: str, properties: Mapping[str, str], text: str) -> str:
    """A line that GitHub Actions shows at a place of a file.

    >>> workflow_command("error", {"file": "a,b.json", "line": "3"}, "50 % is too much")
    '::error file=a%2Cb.json,line=3::50 %25 is too much'
    """
    escaped = ",".join(
        f"{key}={_github_escape(value, in_property=True)}" for key, value in properties.items()
    )
    return f"::{level} {escaped}::{_github_escape(text)}"


def _help(text: str | None) -> str:
    return f"\n{one_line(f'help: {text}')}" if text else ""


def _github_escape(text: str, *, in_property: bool = False) -> str:
    replaced = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return replaced.replace(":", "%3A").replace(",", "%2C") if in_property else replaced


def _sarif(diagnostic: Diagnostic) -> dict[str, object]:
    text = diagnostic.message + (f" ({diagnostic.help})" if diagnostic.help else "")
    result: dict[str, object] = {
        "ruleId": diagnostic.code,
        "level": diagnostic.severity,
        "message": {"text": text},
    }
    if diagnostic.place:
        result["locations"] = [_sarif_place(diagnostic.place)]
    if diagnostic.related:
        result["relatedLocations"] = [
            {**_sarif_place(place), "message": {"text": remark}}
            for place, remark in diagnostic.related
        ]
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
