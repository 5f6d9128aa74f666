"""All findings on a document of either form: what differs from its schema, then what the sound part of it means."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from quantizer.config import hierarchical, layered
from quantizer.config.check_algorithms import check_algorithms
from quantizer.config.check_hierarchical import check_hierarchical
from quantizer.config.check_layered import check_layered
from quantizer.config.check_structure import check_structure
from quantizer.config.diagnostics import Diagnostic, in_order
from quantizer.config.document import Document
from quantizer.config.form import Form, form_of
from quantizer.config.model import Config, ConfigRule
from quantizer.config.spellings import canonical

MANY = 200
"""From so many structural errors on, what the file means is not looked at: most of it is not there."""

Findings = tuple[Diagnostic, ...]


def checked(document: Document) -> tuple[Config | None, Findings]:
    """The config, if the document makes one, and every finding, by place; proposed fixes are not tried."""
    form = form_of(document.value)
    known, notes = canonical(document) if form == "hierarchical" else (document, ())
    structure = [*notes, *check_structure(known)]
    if len(structure) > MANY:
        return None, in_order(structure)
    wrong = {found.place.pointer for found in structure if found.place and found.code not in _NO_VALUE}
    config, meaning = _READERS[form](known, wrong)
    found = in_order([*structure, *meaning, *_wrong_patterns(config.rules)])
    return (None if any(finding.severity == "error" for finding in found) else config), found


def _layered(document: Document, wrong: Collection[str]) -> tuple[Config, Findings]:
    levels = layered.translate(document, wrong)
    config = levels.config()
    return config, (*check_layered(levels), *check_algorithms(levels.algorithms, config))


def _hierarchical(document: Document, wrong: Collection[str]) -> tuple[Config, Findings]:
    levels = hierarchical.translate(document, wrong)
    config = levels.config()
    return config, (*check_hierarchical(levels), *check_algorithms(levels.algorithms, config))


_READERS: Mapping[Form, Callable[[Document, Collection[str]], tuple[Config, Findings]]] = {
    "layered": _layered,
    "hierarchical": _hierarchical,
}
_NO_VALUE = ("QZ105", "QZ106", "QZ116")
"""Findings that leave the value at their place as it is."""


def _wrong_patterns(rules: Iterable[ConfigRule]) -> Iterator[Diagnostic]:
    for selector in (rule.selector for rule in rules):
        if selector.kind in ("name", "exclude") and selector.text.startswith("re:"):
            try:
                re.compile(selector.text[3:])
            except (re.error, RecursionError, OverflowError) as error:
                message = f"this is not a regular expression: {error}"
                yield Diagnostic("QZ104", message, selector.place, help="the syntax is that of Python's re module")
