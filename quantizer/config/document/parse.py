"""Parse JSON (RFC 8259) with positions. The parser goes on after what it understands (comments,
trailing commas, duplicate keys, NaN), so that one run shows every such fault.
"""

import json
import math
import re
from typing import Any, NoReturn

from quantizer.config.diagnostics import Diagnostic, Edit, Fix
from quantizer.config.document.document import JsonPath, Span, Text, pointer_to

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
    """One parse of one text; `problems`, `values` and `keys` fill as it goes.

    Methods take the index of a character and return the index after what they have read.
    """

    def __init__(self, source: Text) -> None:
        self.source = source
        self.text = source.text
        self.start = 0
        self.problems: list[Diagnostic] = []
        self.values: dict[str, Span] = {}
        self.keys: dict[str, Span] = {}
        self._decoder = json.JSONDecoder()

    def parse(self) -> Any:
        """Return the value, or None if `problems` say why there is none."""
        try:
            self.start = self._space(0)
            if self.start == len(self.text):
                remedy = "`quantizer init` writes a config to start from"
                self._fail("the file is empty", self.start, remedy, code="QZ009")
            value, end = self._value(self.start, (), 0)
            end = self._space(end)
            if end < len(self.text):
                message = "there is text after the end of the JSON value"
                self._fail(message, end, "check the brackets above it")
        except _StopError:
            return None
        return value

    def report(
        self, code: str, message: str, span: Span, remedy: str, *, instead: str | None = None
    ) -> None:
        """Note a problem and go on, unless there are so many that the file is something else.

        `instead` is the text that is meant, where only one can be.
        """
        fixes: tuple[Fix, ...] = ()
        if instead is not None:
            fixes = (Fix(remedy, (Edit(*span, instead),)),)
        place = self.source.place(span)
        self._note(Diagnostic(code, message, place, help=remedy, fixes=fixes))

    def _note(self, problem: Diagnostic) -> None:
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            raise _StopError

    def _fail(
        self,
        message: str,
        start: int,
        remedy: str,
        *,
        end: int = 0,
        code: str = "QZ004",
        instead: str | None = None,
    ) -> NoReturn:
        self.report(code, message, (start, end or start + 1), remedy, instead=instead)
        raise _StopError

    def _space(self, index: int) -> int:
        """Skip white space, and report comments."""
        while True:
            index = self._match(_SPACE, index)
            comment = _COMMENT.match(self.text, index)
            if not comment:
                return index
            remedy = 'remove it, or make it a key: "// note": "…"'
            self.report("QZ005", "JSON has no comments", comment.span(), remedy)
            index = comment.end()

    def _match(self, pattern: re.Pattern[str], index: int) -> int:
        match = pattern.match(self.text, index)
        return match.end() if match else index

    def _value(self, start: int, path: JsonPath, depth: int) -> tuple[Any, int]:
        if depth > MAX_DEPTH:
            message = f"values are nested more than {MAX_DEPTH} levels deep"
            self._fail(message, start, "a config needs 5 levels", code="QZ003")
        value: Any
        match self.text[start : start + 1]:
            case "{":
                value, end = self._object(start, path, depth)
            case "[":
                value, end = self._array(start, path, depth)
            case '"':
                value, end = self._string(start)
            case _:
                value, end = self._scalar(start)
        self.values[pointer_to(*path)] = (start, end)
        return value, end

    def _object(self, start: int, path: JsonPath, depth: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        index = self._space(start + 1)
        while self.text[index : index + 1] != "}":
            self._require_more(index, start, "}")
            key_start = index
            key, key_end = self._key(key_start)
            pointer = pointer_to(*path, key)
            if key in members:
                self._duplicate(key, self.keys[pointer], (key_start, key_end))
            else:
                self.keys[pointer] = (key_start, key_end)
            colon = self._space(key_end)
            if self.text[colon : colon + 1] != ":":
                message = "a colon is missing after this key"
                self._fail(message, key_start, 'write "key": value', end=colon)
            value_start = self._space(colon + 1)
            members[key], value_end = self._value(value_start, (*path, key), depth + 1)
            index = self._separator(value_end, "}", start)
        return members, index + 1

    def _array(self, start: int, path: JsonPath, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        index = self._space(start + 1)
        while self.text[index : index + 1] != "]":
            self._require_more(index, start, "]")
            item, value_end = self._value(index, (*path, len(items)), depth + 1)
            items.append(item)
            index = self._separator(value_end, "]", start)
        return items, index + 1

    def _separator(self, value_end: int, close: str, start: int) -> int:
        """Read the comma between two members; stop at the closing bracket."""
        index = self._space(value_end)
        self._require_more(index, start, close)
        if self.text[index] == close:
            return index
        if self.text[index] != ",":
            message = f'a comma or a "{close}" is missing after this value'
            self._fail(message, value_end - 1, "write a comma between members")
        following = self._space(index + 1)
        if self.text[following : following + 1] == close:
            message = "JSON has no trailing commas"
            remedy = f'remove the comma before "{close}"'
            self.report("QZ006", message, (index, index + 1), remedy, instead="")
        return following

    def _require_more(self, index: int, start: int, close: str) -> None:
        """Stop if the text ends before the bracket at `start` is closed."""
        if index >= len(self.text):
            message = f'this bracket is never closed: a "{close}" is missing'
            self._fail(message, start, "is the file cut off?")

    def _key(self, start: int) -> tuple[str, int]:
        if self.text[start] == "'":
            self._single_quoted(start)
        if self.text[start] != '"':
            end = max(self._match(_WORD, start), start + 1)
            word = self.text[start:end]
            remedy = "remove it" if word == "," else "put the key in double quotes"
            message = f"expected a key in double quotes, not {word[:40]}"
            instead = f'"{word}"' if _BARE_KEY.match(self.text, start) else None
            self._fail(message, start, remedy, end=end, instead=instead)
        return self._string(start)

    def _single_quoted(self, start: int) -> NoReturn:
        message = "JSON strings are in double quotes"
        string = _SINGLE_QUOTED.match(self.text, start)
        if string is None:
            self._fail(message, start, 'write "…"')
        self._fail(message, start, 'write "…"', end=string.end(), instead=f'"{string[1]}"')

    def _duplicate(self, key: str, first: Span, second: Span) -> None:
        place = self.source.place(first)
        repeated = self.source.place(second)
        lines = f"on line {repeated.line}"
        if place.line != repeated.line:
            lines = f"on lines {place.line} and {repeated.line}"
        message = f'the key "{key[:60]}" appears twice, {lines}'
        related = ((place, "first here"),)
        help_ = "keep one of the two"
        self._note(Diagnostic("QZ007", message, repeated, help=help_, related=related))

    def _string(self, start: int) -> tuple[str, int]:
        try:
            value, end = self._decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated"):
                message = "this string is never closed"
            elif error.msg.startswith("Invalid \\"):
                message = "JSON has no such escape sequence"
            else:
                message = (
                    "this string is not closed on its line, or contains a control character"
                )
            self._fail(message, error.pos, 'inside a string write \\n, \\t, \\\\ and \\"')
        if _SURROGATE.search(value):
            remedy = "write the character itself, or both halves"
            self._fail("this string contains half of a surrogate pair", start, remedy, end=end)
        return str(value), end

    def _scalar(self, start: int) -> tuple[Any, int]:
        end = max(self._match(_NUMBER_LIKE, start), self._match(_WORD, start))
        word = self.text[start:end]
        number = _NUMBER.fullmatch(word)
        if number:
            return self._number(number, (start, end)), end
        if word[:1].isdecimal() or word[:1] == ".":
            message = f"{word[:40]} is not a JSON number"
            self._fail(message, start, "write it like 8, -1 or 99.99", end=end)
        if word in _LITERALS:
            return _LITERALS[word], end
        literal = _FOREIGN_LITERALS.get(word)
        if word in _NOT_FINITE:
            self.report("QZ008", f"JSON has no {word}", (start, end), "write a finite number")
        elif literal:
            remedy = f"write {literal}"
            self.report("QZ004", f"JSON has no {word}", (start, end), remedy, instead=literal)
        elif self.text[start : start + 1] == "'":
            self._single_quoted(start)
        else:
            shown = word[:40] or self.text[start : start + 1] or "the end of the file"
            message = f"expected a value, not {shown}"
            self._fail(message, start, 'text goes in double quotes: "…"', end=end)
        return None, end

    def _number(self, number: re.Match[str], span: Span) -> int | float | None:
        text = number.group()
        if not math.isfinite(float(text)):
            message = f"the number {text[:20]}… is out of range"
            self.report("QZ008", message, span, "write a smaller number")
            return None
        fraction, exponent = number.groups()
        is_whole = fraction is None and exponent is None
        return int(text) if is_whole else float(text)
