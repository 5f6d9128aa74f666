"""Load a config: from a path, text or document to a checked `ResolvedConfig`, and all findings.

A document of either form is checked against its schema. Then its valid part is checked for
conflicts.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quantizer.config.algorithms import Algorithm
from quantizer.config.diagnostics import (
    ConfigError,
    Diagnostic,
    Diagnostics,
    Fix,
    by_place,
    is_syntax,
    merged_by_cause,
)
from quantizer.config.document.document import Document, Text
from quantizer.config.document.read import parse_document, read_over_faults, read_text
from quantizer.config.forms.form import ALGORITHM_BLOCKS, Form, form_of, plugin_of_setting
from quantizer.config.forms.layered import translate_layered
from quantizer.config.model import ConfigRule, ResolvedConfig, Selector, Settings
from quantizer.config.resources import load_resource, preset_text
from quantizer.config.rules.check_layered import check_layered
from quantizer.config.rules.check_structure import check_present, check_structure
from quantizer.config.wording import counted

_logger = logging.getLogger(__name__)

_MANY_ERRORS = 200
"""With more structural errors the file is not checked for conflicts: most of it is missing."""

_HARMLESS = ("QZ105", "QZ106", "QZ116")
"""Findings that leave the value at their place as it is."""

_Findings = tuple[Diagnostic, ...]


@dataclass(frozen=True)
class LoadResult:
    """A loaded file: the config if it can be used, and every finding; `sources` has the text
    for excerpts.
    """

    config: ResolvedConfig | None
    diagnostics: tuple[Diagnostic, ...]
    sources: Mapping[str, str]
    document: Document | None = None

    def require(self) -> ResolvedConfig:
        """Return the config.

        Raises:
            ConfigError: there is none (exit code 2), with all findings.
        """
        if self.config is None:
            raise ConfigError(self.diagnostics, self.sources)
        return self.config


def load_config(path: str | os.PathLike[str]) -> LoadResult:
    """Read and check the file at `path`; all that is wrong with it is in `diagnostics`."""
    try:
        result = load_text(read_text(path))
    except ConfigError as error:
        return LoadResult(None, error.diagnostics, error.sources)
    if result.config is not None:
        count = counted(len(result.diagnostics), "finding")
        _logger.debug("%s has the %s form: %s", path, result.config.form, count)
    return result


def load_text(source: Text) -> LoadResult:
    """Check text that is already read."""
    try:
        return check_document(read_over_faults(source))
    except ConfigError as error:
        return LoadResult(None, error.diagnostics, error.sources)


def load_preset(name: str) -> ResolvedConfig:
    """Return the config of a preset."""
    return load_text(Text(name, preset_text(name))).require()


def check_document(document: Document) -> LoadResult:
    """Check a parsed document; its valid part is checked for conflicts even if another part is
    invalid.
    """
    config, findings = _translate(document)
    if any(finding.fixes for finding in findings):
        findings = _with_tried_fixes(document, findings)
    if document.problems:
        # What a fix writes depends on how JSON is laid out
        others = [replace(finding, fixes=()) for finding in findings if not is_syntax(finding)]
        findings = by_place([*document.problems, *others])
    source = document.source
    sources = {} if document.dotted else {source.name: source.text}
    return LoadResult(config, findings, sources, document)


def fix_text(source: Text) -> tuple[Text, int]:
    """Return the text with every known fix in it, and how many there were; a second call finds
    none.

    A fix may uncover errors that nothing could read before, and with them further fixes.
    """
    from quantizer.config.document.fixes import apply_fixes

    count = 0
    while True:
        fixes: list[Fix] = []
        for finding in load_text(source).diagnostics:
            fixes += finding.fixes
        if not fixes:
            return source, count
        first_turn = min(fix.turn for fix in fixes)
        due = [fix for fix in fixes if fix.turn == first_turn]
        source = apply_fixes(source, due)
        count += len(due)


def default_config() -> ResolvedConfig:
    """Return the config that holds when no file is given: DPU, power-of-two scales. The file
    check does not apply to it.

    It is the ready config for the DPU with equalization and without narrow ranges. What needs a
    plug-in that is not there is off.

    Source: Vitis AI, quantization configuration, table "Default Configurations", with `half_up`
    for activations as the restrictions of the same page ask.
    """
    value = {}
    for key, entry in load_resource("configs", "dpu.json").items():
        if not key.startswith(("$", "/")):
            value[key] = entry
    value["include_cle"] = True
    for key in value:
        if plugin_of_setting(key):
            value[key] = False
    value["overall_quantize_config"] = value["overall_quantize_config"] | {
        "narrow_range": False
    }
    document = Document(Text("<built-in default>", ""), value, values={}, keys={})
    settings, rules, _ = translate_layered(document)
    return _resolved(document, "layered", settings, rules)


def _translate(document: Document) -> tuple[ResolvedConfig | None, _Findings]:
    """Return the config, if the document makes one, and every finding; proposed fixes are not
    tried.
    """
    form = form_of(document.value)
    findings = [*document.problems]
    if form == "hierarchical":
        from quantizer.config.forms.aliases import canonical

        document, notes = canonical(document)
        findings += notes
    findings += check_structure(document)
    if len(findings) > _MANY_ERRORS:
        return None, merged_by_cause(findings)
    unread = document.ignored
    findings = [row for row in findings if not (row.place and row.place.pointer in unread)]
    places = [finding.place for finding in findings if finding.code not in _HARMLESS]
    wrong = {place.pointer for place in places if place}
    file = replace(document, ignored=unread | wrong)
    # Only the rules that are about something in the file are imported
    if form == "hierarchical":
        from quantizer.config.forms.hierarchical import translate_hierarchical
        from quantizer.config.rules.check_hierarchical import check_hierarchical

        settings, rules, levels = translate_hierarchical(file)
        config = _resolved(file, form, settings, rules)
        findings += check_hierarchical(file, config, levels)
    else:
        settings, rules, layered_levels = translate_layered(file)
        config = _resolved(file, form, settings, rules)
        findings += check_layered(file, config, layered_levels)
    if config.algorithms:
        from quantizer.config.rules.check_algorithms import check_algorithms

        findings += check_algorithms(config)
    findings += check_present(file)
    findings += _wrong_patterns(config.rules)
    is_usable = all(finding.severity != "error" for finding in findings)
    return config if is_usable else None, merged_by_cause(findings)


def _resolved(
    file: Document, form: Form, settings: Settings, rules: Iterable[ConfigRule]
) -> ResolvedConfig:
    """Return the config of a file in a form, with its algorithms and the layers it excludes."""
    algorithms: tuple[Algorithm, ...] = ()
    if file.entries(*ALGORITHM_BLOCKS[form]):
        from quantizer.config.forms.algorithm_words import read_algorithms

        algorithms = read_algorithms(file, form)
    rules = list(rules)
    for number, path in enumerate(file.items("exclude")):
        selector = Selector("exclude", file.get(*path), file.place(*path))
        rule = ConfigRule(selector, f"exclude[{number}]", frozenset(), selector.place)
        rules.append(rule)
    source = file.source
    return ResolvedConfig(
        settings=settings,
        rules=tuple(rules),
        source=source.name,
        document=file.value,
        form=form,
        algorithms=algorithms,
        text=source.text,
    )


def _wrong_patterns(rules: Iterable[ConfigRule]) -> Diagnostics:
    """Yield a finding for each selector that is not a regular expression and should be one."""
    for rule in rules:
        selector = rule.selector
        if selector.kind in ("all", "weighted", "type") or not selector.text.startswith("re:"):
            continue
        try:
            re.compile(selector.text.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            yield Diagnostic(
                "QZ104",
                f"this is not a regular expression: {error}",
                selector.place,
                help="the syntax is that of Python's re module",
            )


def _with_tried_fixes(document: Document, findings: _Findings) -> _Findings:
    """Return the findings, each with the fix that leaves fewer errors in the text."""
    from quantizer.config.document.fixes import with_sound_fixes

    if document.dotted:
        try:
            document = _in_text(document)
        except ConfigError:
            # JSON has no word for a value of it
            return tuple(replace(finding, fixes=()) for finding in findings)
        _, findings = _translate(document)
    return with_sound_fixes(document.source, findings, _findings)


def _in_text(document: Document) -> Document:
    """Return a document of Python values with the text of a file that has these values.

    Raises:
        ConfigError: no file can have them.
    """
    text = json.dumps(document.value, default=str)
    parsed = parse_document(Text(document.source.name, text))
    return replace(parsed, value=document.value, dotted=document.dotted)


def _findings(source: Text) -> _Findings:
    """Return all findings on a text.

    Raises:
        ConfigError: it cannot be read to its end.
    """
    _, findings = _translate(read_over_faults(source))
    return findings
