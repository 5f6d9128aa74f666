"""Tries proposed fixes on a copy of the file, against all rules: only those that hold are
offered and written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from quantizer.config.diagnostics import Diagnostic, Fix
from quantizer.config.document.document import Text

Check = Callable[[Text], Sequence[Diagnostic]]
"""From a file's text to all findings on it."""

MAX_TRIALS = 200
MAX_CHECKED = 1_000_000
"""Characters that the trials of one file may check in all; a trial of a long file takes as long
as its check.
"""


def tried(source: Text, found: Sequence[Diagnostic], check: Check) -> tuple[Diagnostic, ...]:
    """The findings, each with the first of its fixes that removes it and, together with the
    others, adds no error.

    The help of a finding offers that fix; without one it stays as it is.
    """
    candidates = {at: iter(finding.fixes) for at, finding in enumerate(found)}
    sound = _sound(source, found, candidates, check)
    known = {at: fix for at, fix in sound.items() if fix.is_known}
    # The examples are not written, so the others have to hold without them
    if len(known) < len(sound):
        known = _sound(source, found, {at: iter((fix,)) for at, fix in known.items()}, check)
    helps = {at: fix.help for at, fix in sound.items() if at in known or not fix.is_known}
    return tuple(
        replace(
            finding, help=helps.get(at, finding.help), fixes=(known[at],) if at in known else ()
        )
        for at, finding in enumerate(found)
    )


def applied(source: Text, fixes: Iterable[Fix]) -> Text:
    """The text with all the fixes in it; nothing else of it changes."""
    pieces, at = [], 0
    edits = dict.fromkeys(edit for fix in fixes for edit in fix.edits)
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        pieces += [source.text[at : edit.start], edit.text]
        at = edit.end
    return replace(source, text="".join(pieces) + source.text[at:])


def _sound(
    source: Text,
    found: Sequence[Diagnostic],
    candidates: Mapping[int, Iterator[Fix]],
    check: Check,
) -> dict[int, Fix]:
    """One candidate for each finding, all of which hold together; none for a finding whose
    candidates all fail.
    """
    trials = min(MAX_TRIALS, MAX_CHECKED // (len(source.text) + 1))
    chosen = {at: fix for at, fixes in candidates.items() if (fix := next(fixes, None))}
    for trial in range(trials):
        if not chosen:
            break
        blamed = _blamed(found, check(applied(source, chosen.values())), chosen)
        if not blamed:
            return chosen
        for at in blamed:
            following = next(candidates[at], None) if trial < trials // 2 else None
            chosen = {other: fix for other, fix in chosen.items() if other != at}
            chosen |= {at: following} if following else {}
    return {}


def _blamed(
    before: Sequence[Diagnostic], after: Sequence[Diagnostic], chosen: Mapping[int, Fix]
) -> set[int]:
    """The findings whose fix does not remove them, or adds an error: of several, the one that
    is easiest to replace.
    """
    left = {_cause(finding) for finding in after if finding.severity == "error"}
    blamed = {at for at in chosen if _cause(before[at]) in left} | _rivals(chosen)
    known = {_cause(finding) for finding in before}
    for finding in after:
        pointers = [
            place.pointer
            for place in (finding.place, *(place for place, _ in finding.related))
            if place
        ]
        if (
            finding.severity != "error"
            or _cause(finding) in known
            or _is_uncovered(finding, pointers, chosen.values())
        ):
            continue
        at_fault = [
            at
            for at, fix in chosen.items()
            if any(_meet(*pair) for pair in product(pointers, fix.touches))
        ]
        blamed.add(max(at_fault or chosen, key=lambda at: _doubt(chosen[at])))
    return blamed


def _rivals(chosen: Mapping[int, Fix]) -> set[int]:
    """Fixes that write what another one writes."""
    owners: dict[str, int] = {}
    for at in sorted(chosen, key=lambda at: _doubt(chosen[at])):
        for pointer in chosen[at].touches:
            owners.setdefault(pointer, at)
    return {
        at
        for at, fix in chosen.items()
        if any(owners[pointer] != at for pointer in fix.touches)
    }


def _cause(finding: Diagnostic) -> tuple[str, str | None]:
    return finding.code, finding.place.pointer if finding.place else None


def _is_uncovered(finding: Diagnostic, pointers: Sequence[str], fixes: Iterable[Fix]) -> bool:
    """Whether an error is inside what was not read before, or is the value itself, whatever
    stands around it.
    """
    members = [fix.uncovers for fix in fixes if fix.uncovers is not None]
    is_value = finding.code.startswith("QZ10") and pointers[:1] != [] and pointers[0] in members
    return is_value or any(
        pointer.startswith(f"{member}/") for pointer in pointers for member in members
    )


def _meet(pointer: str, other: str) -> bool:
    """Whether one of two members is the other, or inside it."""
    return f"{pointer}/".startswith(f"{other}/") or f"{other}/".startswith(f"{pointer}/")


def _doubt(fix: Fix) -> tuple[bool, int, int]:
    """Examples are given up first, then what depends on other fixes, then what stands further
    down.
    """
    return not fix.is_known, fix.turn, fix.edits[0].start
