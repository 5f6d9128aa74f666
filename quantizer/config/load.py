"""From a path to a checked `Config`, or to a fixed text: the door of this room. What is in a
file never raises.

A document of either form is checked against its schema; then what the sound part of it means is
checked.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from quantizer.config.diagnostics import ConfigError, Diagnostic, in_order
from quantizer.config.document.document import Document, Text
from quantizer.config.document.fixes import applied, tried
from quantizer.config.document.read import parse_document, read_text
from quantizer.config.forms import hierarchical, layered
from quantizer.config.forms.aliases import canonical
from quantizer.config.forms.form import Form, form_of
from quantizer.config.model import Config, ConfigRule
from quantizer.config.resources import load_resource
from quantizer.config.rules.check_algorithms import check_algorithms
from quantizer.config.rules.check_hierarchical import check_hierarchical
from quantizer.config.rules.check_layered import check_layered
from quantizer.config.rules.check_structure import check_structure

MANY = 200
"""From so many structural errors on, what the file means is not looked at: most of it is not
there.
"""

Findings = tuple[Diagnostic, ...]


@dataclass(frozen=True)
class LoadResult:
    """What a file gave: the config if it can be used, and every finding; `sources` has the text
    for excerpts.
    """

    config: Config | None
    diagnostics: tuple[Diagnostic, ...]
    sources: Mapping[str, str]
    document: Document | None = None

    def require(self) -> Config:
        """The config; `ConfigError` (exit code 2) with all findings if there is none."""
        if self.config is None:
            raise ConfigError(self.diagnostics, self.sources)
        return self.config


def load_config(path: str | os.PathLike[str]) -> LoadResult:
    """Read and check the file at `path`; all that is wrong with it is in `diagnostics`."""
    try:
        return load_text(read_text(path))
    except ConfigError as error:
        return LoadResult(None, error.diagnostics, error.sources)


def load_text(source: Text) -> LoadResult:
    """Check text that is already read."""
    try:
        return check_document(parse_document(source))
    except ConfigError as error:
        return LoadResult(None, error.diagnostics, error.sources)


def check_document(document: Document) -> LoadResult:
    """Check a parsed document; the part of it that is sound is checked for conflicts even if
    another part is not.
    """
    config, found = checked(document)
    sources = {} if document.dotted else {document.source.name: document.source.text}
    return LoadResult(config, _with_fixes(document, found), sources, document)


def fixed(source: Text) -> tuple[Text, int]:
    """The text with every known fix in it, and how many there were; a second call finds none.

    A fix may uncover errors that nothing could read before, and with them further fixes.
    """
    count = 0
    while fixes := [fix for finding in load_text(source).diagnostics for fix in finding.fixes]:
        first = min(fix.turn for fix in fixes)
        due = [fix for fix in fixes if fix.turn == first]
        source, count = applied(source, due), count + len(due)
    return source, count


def checked(document: Document) -> tuple[Config | None, Findings]:
    """The config, if the document makes one, and every finding, by place; proposed fixes are
    not tried.
    """
    form = form_of(document.value)
    known, notes = canonical(document) if form == "hierarchical" else (document, ())
    structure = [*notes, *check_structure(known)]
    if len(structure) > MANY:
        return None, in_order(structure)
    wrong = {
        found.place.pointer
        for found in structure
        if found.place and found.code not in _NO_VALUE
    }
    config, meaning = _meaning(form, known, wrong)
    findings = (*structure, *meaning, *check_algorithms(config), *_wrong_patterns(config.rules))
    found = in_order(findings)
    return (None if any(finding.severity == "error" for finding in found) else config), found


def _meaning(
    form: Form, document: Document, wrong: Collection[str]
) -> tuple[Config, Iterable[Diagnostic]]:
    """What the values that are not wrong say, and the findings on it."""
    if form == "layered":
        flat = layered.translate(document, wrong)
        return flat.config, check_layered(flat)
    levels = hierarchical.translate(document, wrong)
    return levels.config, check_hierarchical(levels)


_NO_VALUE = ("QZ105", "QZ106", "QZ116")
"""Findings that leave the value at their place as it is."""


def _wrong_patterns(rules: Iterable[ConfigRule]) -> Iterator[Diagnostic]:
    for selector in (rule.selector for rule in rules):
        if selector.kind in ("name", "exclude") and selector.text.startswith("re:"):
            try:
                re.compile(selector.text[3:])
            except (re.error, RecursionError, OverflowError) as error:
                message = f"this is not a regular expression: {error}"
                yield Diagnostic(
                    "QZ104",
                    message,
                    selector.place,
                    help="the syntax is that of Python's re module",
                )


def _with_fixes(document: Document, found: Findings) -> Findings:
    """The findings with the fixes that hold. A document without text is written as one to try
    them.
    """
    if not document.dotted:
        return tried(document.source, found, _findings)
    if not any(finding.fixes for finding in found):
        return found
    source = Text(document.source.name, json.dumps(document.value, default=str))
    helps = {
        (other.code, other.place and other.place.pointer): other.help
        for other in load_text(source).diagnostics
    }
    return tuple(
        replace(
            finding,
            help=helps.get((finding.code, finding.place and finding.place.pointer)),
            fixes=(),
        )
        for finding in found
    )


def _findings(source: Text) -> Findings:
    try:
        return checked(parse_document(source))[1]
    except ConfigError as error:
        return error.diagnostics


def default_config() -> Config:
    """The config that holds when no file is given: DPU, power-of-two scales. The file check
    does not apply to it.

    It is the ready config for the DPU with equalization and without narrow ranges.

    Source: Vitis AI, quantization configuration, table "Default Configurations", with `half_up`
    for activations as the restrictions of the same page ask.
    """
    ready = {
        key: value
        for key, value in load_resource("configs", "dpu.json").items()
        if key[0] not in "$/"
    }
    overall = ready["overall_quantize_config"] | {"narrow_range": False}
    value = ready | {"include_cle": True, "overall_quantize_config": overall}
    return layered.translate(
        Document(Text("<built-in default>", ""), value, values={}, keys={})
    ).config
