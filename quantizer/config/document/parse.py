"""The JSON grammar (RFC 8259) with positions. Goes on after what it can understand (comments,
trailing commas, duplicate keys, NaN), so that one run shows all of it; stops at what it
cannot.
"""

import json
import math
import re
from typing import Any, NoReturn

from quantizer.config.diagnostics import Diagnostic, Edit, Fix
from quantizer.config.document.document import Span, Text, pointer_to

MAX_DEPTH = 64
MAX_PROBLEMS = 1000

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_NUMBER_LIKE = re.compile(r"[-+.0-9](?:[-+.0-9A-Za-z_])*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SINGLE_QUOTED = re.compile(r"'([^'\"\\\x00-\x1f]*)'(?=\s*[:,}\]])")
_BARE_KEY = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(?=\s*:)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LITERALS = {"true": True, "false": False, "null": None}
_FOREIGN_LITERALS = {
    **dict.fromkeys(("True", "TRUE"), "true"),
    **dict.fromkeys(("False", "FALSE"), "false"),
    **dict.fromkeys(("None", "undefined"), "null"),
}
_NOT_FINITE = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "-NaN", "+Infinity"}


class _StopError(Exception):
    """Parsing cannot go on; the reason is already in `problems`."""


class Parser:
    """One parse of one text; `problems`, `values` and `keys` fill as it goes."""

    def __init__(self, source: Text) -> None:
        self.source = source
        self.text = source.text
        self.start = 0
        self.problems: list[Diagnostic] = []
        self.values: dict[str, Span] = {}
        self.keys: dict[str, Span] = {}
        self._decoder = json.JSONDecoder()

    def parse(self) -> Any:
        """The value, or None if `problems` say why there is none."""
        try:
            self.start = self._space(0)
            if self.start == len(self.text):
                remedy = "`quantizer init` writes a config to start from"
                self._fail("the file is empty", self.start, remedy, code="QZ009")
            value, at = self._value(self.start, (), 0)
            at = self._space(at)
            if at < len(self.text):
                self._fail(
                    "there is text after the end of the JSON value",
                    at,
                    "check the brackets above it",
                )
        except _StopError:
            return None
        return value

    def report(
        self, code: str, message: str, span: Span, remedy: str, instead: str | None = None
    ) -> None:
        """Note a problem and go on, unless there are so many that the file is something else.

        `instead` is the text that is meant, where only one can be.
        """
        fixes = (Fix(remedy, (Edit(*span, instead),)),) if instead is not None else ()
        self._note(Diagnostic(code, message, self.source.place(span), help=remedy, fixes=fixes))

    def _note(self, problem: Diagnostic) -> None:
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            raise _StopError

    def _fail(
        self,
        message: str,
        at: int,
        remedy: str,
        *,
        end: int = 0,
        code: str = "QZ004",
        instead: str | None = None,
    ) -> NoReturn:
        self.report(code, message, (at, end or at + 1), remedy, instead)
        raise _StopError

    def _space(self, at: int) -> int:
        while True:
            at = self._match(_SPACE, at)
            comment = _COMMENT.match(self.text, at)
            if not comment:
                return at
            remedy = 'remove it, or make it a key: "// note": "…"'
            self.report("QZ005", "JSON has no comments", comment.span(), remedy)
            at = comment.end()

    def _match(self, pattern: re.Pattern[str], at: int) -> int:
        found = pattern.match(self.text, at)
        return found.end() if found else at

    def _value(self, at: int, path: tuple[str | int, ...], depth: int) -> tuple[Any, int]:
        if depth > MAX_DEPTH:
            message = f"values are nested more than {MAX_DEPTH} levels deep"
            self._fail(message, at, "a config needs 5 levels", code="QZ003")
        value: Any
        match self.text[at : at + 1]:
            case "{":
                value, end = self._object(at, path, depth)
            case "[":
                value, end = self._array(at, path, depth)
            case '"':
                value, end = self._string(at)
            case _:
                value, end = self._scalar(at)
        self.values[pointer_to(*path)] = (at, end)
        return value, end

    def _object(
        self, start: int, path: tuple[str | int, ...], depth: int
    ) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        at = self._space(start + 1)
        while self.text[at : at + 1] != "}":
            self._not_ended(at, start, "}")
            key_at = at
            key, at = self._key(at)
            pointer = pointer_to(*path, key)
            if key in members:
                self._duplicate(key, self.keys[pointer], (key_at, at))
            else:
                self.keys[pointer] = (key_at, at)
            at = self._space(at)
            if self.text[at : at + 1] != ":":
                self._fail(
                    "a colon is missing after this key", key_at, 'write "key": value', end=at
                )
            members[key], at = self._value(self._space(at + 1), (*path, key), depth + 1)
            at = self._separator(at, "}", start)
        return members, at + 1

    def _array(
        self, start: int, path: tuple[str | int, ...], depth: int
    ) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = self._space(start + 1)
        while self.text[at : at + 1] != "]":
            self._not_ended(at, start, "]")
            item, at = self._value(at, (*path, len(items)), depth + 1)
            items.append(item)
            at = self._separator(at, "]", start)
        return items, at + 1

    def _separator(self, value_end: int, close: str, start: int) -> int:
        at = self._space(value_end)
        self._not_ended(at, start, close)
        if self.text[at] == close:
            return at
        if self.text[at] != ",":
            message = f'a comma or a "{close}" is missing after this value'
            self._fail(message, value_end - 1, "write a comma between members")
        following = self._space(at + 1)
        if self.text[following : following + 1] == close:
            self.report(
                "QZ006",
                "JSON has no trailing commas",
                (at, at + 1),
                f'remove the comma before "{close}"',
                "",
            )
        return following

    def _not_ended(self, at: int, start: int, close: str) -> None:
        if at >= len(self.text):
            self._fail(
                f'this bracket is never closed: a "{close}" is missing',
                start,
                "is the file cut off?",
            )

    def _key(self, at: int) -> tuple[str, int]:
        if self.text[at] == "'":
            self._single_quoted(at)
        if self.text[at] != '"':
            end = max(self._match(_WORD, at), at + 1)
            remedy = "remove it" if self.text[at] == "," else "put the key in double quotes"
            message = f"expected a key in double quotes, not {self.text[at:end][:40]}"
            instead = f'"{self.text[at:end]}"' if _BARE_KEY.match(self.text, at) else None
            self._fail(message, at, remedy, end=end, instead=instead)
        return self._string(at)

    def _single_quoted(self, at: int) -> NoReturn:
        text = _SINGLE_QUOTED.match(self.text, at)
        end, instead = (text.end(), f'"{text[1]}"') if text else (0, None)
        self._fail(
            "JSON strings are in double quotes", at, 'write "…"', end=end, instead=instead
        )

    def _duplicate(self, key: str, first: Span, second: Span) -> None:
        place, again = self.source.place(first), self.source.place(second)
        lines = (
            f"on lines {place.line} and {again.line}"
            if again.line != place.line
            else f"on line {again.line}"
        )
        message = f'the key "{key[:60]}" appears twice, {lines}'
        self._note(
            Diagnostic(
                "QZ007",
                message,
                again,
                help="keep one of the two",
                related=((place, "first here"),),
            )
        )

    def _string(self, at: int) -> tuple[str, int]:
        try:
            value, end = self._decoder.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            reason = {
                "Unterminated": "this string is never closed",
                "Invalid \\": "JSON has no such escape sequence",
            }
            message = next(
                (text for start, text in reason.items() if error.msg.startswith(start)),
                "this string is not closed on its line, or contains a control character",
            )
            self._fail(message, error.pos, 'inside a string write \\n, \\t, \\\\ and \\"')
        if _SURROGATE.search(value):
            remedy = "write the character itself, or both halves"
            self._fail("this string contains half of a surrogate pair", at, remedy, end=end)
        return str(value), end

    def _scalar(self, at: int) -> tuple[Any, int]:
        end = max(self._match(_NUMBER_LIKE, at), self._match(_WORD, at))
        word = self.text[at:end]
        number = _NUMBER.fullmatch(word)
        if number:
            return self._number(number, (at, end)), end
        if word[:1].isdecimal() or word[:1] == ".":
            self._fail(
                f"{word[:40]} is not a JSON number", at, "write it like 8, -1 or 99.99", end=end
            )
        if word in _LITERALS:
            return _LITERALS[word], end
        if word in _NOT_FINITE:
            self.report("QZ008", f"JSON has no {word}", (at, end), "write a finite number")
        elif literal := _FOREIGN_LITERALS.get(word):
            self.report("QZ004", f"JSON has no {word}", (at, end), f"write {literal}", literal)
        elif self.text[at : at + 1] == "'":
            self._single_quoted(at)
        else:
            shown = word[:40] or self.text[at : at + 1] or "the end of the file"
            self._fail(
                f"expected a value, not {shown}", at, 'text goes in double quotes: "…"', end=end
            )
        return None, end

    def _number(self, number: re.Match[str], span: Span) -> int | float | None:
        if not math.isfinite(float(number.group())):
            message = f"the number {number.group()[:20]}… is out of range"
            self.report("QZ008", message, span, "write a smaller number")
            return None
        fraction, exponent = number.groups()
        return (
            int(number.group())
            if fraction is None and exponent is None
            else float(number.group())
        )
