"""Read a file into a `Document`, JSON (RFC 8259) with positions. Every fault of syntax or
encoding is a finding in a `ConfigError`. The parser continues after comments, missing and
trailing commas, single quotes, duplicate keys and NaN: one run shows all that is wrong.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from quantizer.config.diagnostics import (
    ConfigError,
    Diagnostic,
    Edit,
    Fix,
    Place,
    merged_by_cause,
)
from quantizer.config.document.document import Document, Text, TextSpan, pointer_to
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.resources import help_for_missing
from quantizer.plugins import if_command
from quantizer.storage.system_calls import read_start

MAX_CONFIG_BYTES = 1_000_000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_DEPTH = 64
MAX_PROBLEMS = 1000

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
_NUMBER_LIKE = re.compile(r"[-+.0-9](?:[-+.0-9A-Za-z_])*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SINGLE_QUOTED = re.compile(r"'([^'\"\\\x00-\x1f]*)'(?=\s*[:,}\]]|[ \t]*\r?\n)")
_BARE_KEY = re.compile(r"([A-Za-z_][A-Za-z_0-9]*)(?=\s*:)")
_ENDED_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*(?=\s*[,}\]])")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_NEXT_MEMBERS = {"}": re.compile(r'"[^"\n]*"\s*:'), "]": re.compile(r'"[^"\n]*"\s*[,\]]|[{\[]')}
"""What begins the member after the one that has no comma, by the closing bracket."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_LITERALS = {"true": True, "false": False, "null": None}
_FOREIGN_LITERALS = {
    **dict.fromkeys(("True", "TRUE"), "true"),
    **dict.fromkeys(("False", "FALSE"), "false"),
    **dict.fromkeys(("None", "undefined"), "null"),
}
_NOT_FINITE = {"NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "-NaN", "+Infinity"}


def read_document(path: str | os.PathLike[str]) -> Document:
    """Read the JSON object in the file `path`; a `ConfigError` has all that is wrong."""
    return parse_document(read_text(path))


def read_text(path: str | os.PathLike[str]) -> Text:
    """Read the file `path`, at most 1 MB of UTF-8; a byte order mark is accepted.

    Raises:
        ConfigError: the file cannot be read, is larger, or is not UTF-8.
    """
    return _decode(os.fspath(path), _read_bytes(path))


def parse_document(source: Text) -> Document:
    """Parse a JSON object that is nested at most 64 deep.

    Raises:
        ConfigError: all that is wrong with the syntax.
    """
    document = read_over_faults(source)
    if document.problems:
        raise ConfigError(document.problems, {source.name: source.text})
    return document


def read_over_faults(source: Text) -> Document:
    """Parse a JSON object. Faults after which the text can be read are in `problems` of it.

    Raises:
        ConfigError: the text cannot be read to its end.
    """
    parser = Parser(source)
    value = parser.parse()
    if not parser.has_stopped and not isinstance(value, dict):
        kind = "an array" if isinstance(value, list) else "a single value"
        parser.report(
            "QZ009",
            f"the file contains {kind}, not an object",
            (parser.start, parser.start + 1),
            "a config begins with { and ends with }",
        )
        parser.has_stopped = True
    if parser.problems and Path(source.name).suffix == ".py":
        message = "this is Python, not a config"
        help_ = f"a model is given as <--model {source.name}>"
        raise _unreadable(source.name, message, help_, code="QZ004")
    problems = merged_by_cause(parser.problems)
    if parser.has_stopped:
        raise ConfigError(problems, {source.name: source.text})
    unread = frozenset(parser.unread)
    return Document(source, value, parser.values, parser.keys, {}, unread, problems)


def _read_bytes(path: str | os.PathLike[str]) -> bytes:
    name = os.fspath(path)
    try:
        data = read_start(path, MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        help_ = help_for_missing(Path(path))
        raise _unreadable(name, "there is no such file", help_) from None
    except IsADirectoryError:
        raise _unreadable(name, "this is a directory", "give the path of a JSON file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(name, f"the file cannot be read: {reason}") from None
    if len(data) > MAX_CONFIG_BYTES:
        help_ = "no config is this large: is it the right file?"
        raise _unreadable(name, "the file is larger than 1 MB", help_, code="QZ003")
    return data


def _decode(name: str, data: bytes) -> Text:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        message = "the file is not UTF-8 at byte 0: it looks like UTF-16"
        raise _unreadable(name, message, "save it as UTF-8", code="QZ002")
    nul = data.find(b"\0")
    if nul >= 0:
        message = f"the file is not UTF-8 text at byte {nul}: there is a NUL byte"
        raise _undecodable(name, data, nul, message)
    has_mark = data.startswith(_BYTE_ORDER_MARK)
    encoding = "utf-8-sig" if has_mark else "utf-8"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        position = error.start
        if has_mark:
            position += len(_BYTE_ORDER_MARK)
        message = f"the file is not UTF-8 at byte {position}"
        raise _undecodable(name, data, position, message) from None
    return Text(name, text, encoding)


def _undecodable(name: str, data: bytes, position: int, message: str) -> ConfigError:
    """Return the finding at the line and column of a byte.

    The excerpt shows a replacement character for what is not UTF-8.
    """
    shown = Text(name, data.decode("utf-8-sig", errors="replace"))
    start = len(data[:position].decode("utf-8-sig", errors="replace"))
    place = shown.place((start, start + 1))
    finding = Diagnostic("QZ002", message, place, help="save it as UTF-8")
    return ConfigError([finding], {name: shown.text})


def _unreadable(
    name: str, message: str, help_: str | None = None, *, code: str = "QZ001"
) -> ConfigError:
    return ConfigError([Diagnostic(code, message, Place(name, 1, 1), help=help_)])


class _StopError(Exception):
    """Parsing cannot continue; the reason is already in `problems`."""


class Parser:
    """One parse of one text; `problems`, `values` and `keys` fill as it goes.

    `unread` has the JSON pointers of what is no value. `_index` is the character to read next.
    """

    def __init__(self, source: Text) -> None:
        self.source = source
        self.text = source.text
        self.start = 0
        self.problems: list[Diagnostic] = []
        self.values: dict[str, TextSpan] = {}
        self.keys: dict[str, TextSpan] = {}
        self.unread: set[str] = set()
        self.has_stopped = False
        self._index = 0
        self._decoder = json.JSONDecoder()

    def parse(self) -> Any:
        """Return the value, or None if `problems` say why there is none."""
        try:
            self._skip_space()
            self.start = self._index
            if not self._next():
                remedy = if_command("init", "`quantizer init` writes a config to start from")
                self._fail("the file is empty", remedy, code="QZ009")
            value = self._value(())
            self._skip_space()
            if self._next():
                message = "there is text after the end of the JSON value"
                place = (self._index, self._index + 1)
                self.report("QZ004", message, place, "check the brackets above it")
        except _StopError:
            self.has_stopped = True
            return None
        return value

    def report(
        self,
        code: str,
        message: str,
        span: TextSpan,
        remedy: str,
        *,
        instead: str | None = None,
        related: tuple[tuple[Place, str], ...] = (),
    ) -> None:
        """Note a problem, unless there are so many that the file is something else.

        `instead` is the text that is meant, where only one can be.
        """
        fixes: tuple[Fix, ...] = ()
        if instead is not None:
            fixes = (Fix(remedy, (Edit(*span, instead),)),)
        place = self.source.place(span)
        problem = Diagnostic(code, message, place, help=remedy, related=related, fixes=fixes)
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            raise _StopError

    def _fail(
        self,
        message: str,
        remedy: str,
        *,
        span: TextSpan | None = None,
        code: str = "QZ004",
        instead: str | None = None,
    ) -> NoReturn:
        """Report a problem at `span`, or at the next character, and stop."""
        span = span or (self._index, self._index + 1)
        message += "" if code == "QZ009" else "; the rest of the file was not checked"
        self.report(code, message, span, remedy, instead=instead)
        raise _StopError

    def _next(self) -> str:
        """Return the next character, or "" at the end."""
        return self.text[self._index : self._index + 1]

    def _skip_space(self) -> None:
        """Skip white space, and report comments."""
        while True:
            self._index = self._end_of(_SPACE)
            comment = _COMMENT.match(self.text, self._index)
            if not comment:
                return
            remedy = 'remove it, or make it a key: "// note": "…"'
            self.report("QZ005", "JSON has no comments", comment.span(), remedy)
            self._index = comment.end()

    def _end_of(self, pattern: re.Pattern[str]) -> int:
        """Return where a match of a pattern at the next character ends."""
        match = pattern.match(self.text, self._index)
        return match.end() if match else self._index

    def _value(self, path: JsonPath) -> Any:
        """Parse a value of any kind, and note where it is."""
        start = self._index
        if len(path) > MAX_DEPTH:
            message = f"values are nested more than {MAX_DEPTH} levels deep"
            self._fail(message, "a config needs 5 levels", code="QZ003")
        value: Any
        match self._next():
            case "{":
                value = self._object(path)
            case "[":
                value = []
                for _ in self._members("]"):
                    value.append(self._value((*path, len(value))))
            case '"':
                value = self._string()
            case _:
                value = self._scalar(path)
        self.values[pointer_to(*path)] = (start, self._index)
        return value

    def _object(self, path: JsonPath) -> JsonObject:
        members: JsonObject = {}
        for _ in self._members("}"):
            key_start = self._index
            key = self._key()
            span = (key_start, self._index)
            pointer = pointer_to(*path, key)
            if key in members:
                self._duplicate(key, self.keys[pointer], span)
            else:
                self.keys[pointer] = span
            self._skip_space()
            if self._next() != ":":
                span = (key_start, self._index)
                self._fail("a colon is missing after this key", 'write "key": value', span=span)
            self._index += 1
            self._skip_space()
            members[key] = self._value((*path, key))
        return members

    def _members(self, close: str) -> Iterator[None]:
        """Yield where a member of an object or array begins, and read what is around them."""
        start = self._index
        self._index += 1
        self._skip_space()
        while self._next() != close:
            if not self._next():
                # Few files have this fault
                from quantizer.config.document.fixes import unclosed_bracket

                start, remedy = unclosed_bracket(self.source, start)
                close = "}" if self.text[start] == "{" else "]"
                message = f'this bracket is never closed: a "{close}" is missing'
                self._fail(message, remedy, span=(start, start + 1))
            yield
            value_end = self._index
            self._skip_space()
            comma = (self._index, self._index + 1)
            if self._next() in ("", close):
                continue
            if self._next() != ",":
                self._missing_comma(close, value_end)
                continue
            self._index += 1
            self._skip_space()
            if self._next() == close:
                remedy = f'remove the comma before "{close}"'
                message = "JSON has no trailing commas"
                self.report("QZ006", message, comma, remedy, instead="")
        self._index += 1

    def _missing_comma(self, close: str, value_end: int) -> None:
        """Report that a comma is missing, or stop if no other member begins here."""
        message = f'a comma or a "{close}" is missing after this value'
        remedy = "write a comma between members"
        span = (value_end - 1, value_end)
        if not _NEXT_MEMBERS[close].match(self.text, self._index):
            self._fail(message, remedy, span=span)
        self.report("QZ004", message, span, remedy, instead=f"{self.text[value_end - 1]},")

    def _key(self) -> str:
        if self._next() == "'":
            return self._single_quoted()
        if self._next() != '"':
            end = max(self._end_of(_WORD), self._index + 1)
            word = self.text[self._index : end]
            message = f"expected a key in double quotes, not {word[:40]}"
            remedy = "remove it" if word == "," else "put the key in double quotes"
            span = (self._index, end)
            if not _BARE_KEY.match(self.text, self._index):
                self._fail(message, remedy, span=span)
            self.report("QZ004", message, span, remedy, instead=f'"{word}"')
            self._index = end
            return word
        return self._string()

    def _single_quoted(self) -> str:
        message = "JSON strings are in double quotes"
        remedy = 'write "…"'
        string = _SINGLE_QUOTED.match(self.text, self._index)
        if string is None:
            self._fail(message, remedy)
        self.report("QZ004", message, string.span(), remedy, instead=f'"{string[1]}"')
        self._index = string.end()
        return string[1]

    def _duplicate(self, key: str, first: TextSpan, second: TextSpan) -> None:
        place = self.source.place(first)
        line = self.source.place(second).line
        lines = f"on line {line}"
        if place.line != line:
            lines = f"on lines {place.line} and {line}"
        message = f'the key "{key[:60]}" appears twice, {lines}'
        related = ((place, "first here"),)
        self.report("QZ007", message, second, "keep one of the two", related=related)

    def _string(self) -> str:
        start = self._index
        try:
            value, self._index = self._decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            message = "this string is not closed on its line, or contains a control character"
            if error.msg.startswith("Unterminated"):
                message = "this string is never closed"
            elif error.msg.startswith("Invalid \\"):
                message = "JSON has no such escape sequence"
            remedy = 'inside a string write \\n, \\t, \\\\ and \\"'
            span = (error.pos, error.pos + 1)
            string = _STRING.match(self.text, start)
            if string is None:
                self._fail(message, remedy, span=span)
            self.report("QZ004", message, span, remedy)
            self._index = string.end()
            value = string[1]
        if _SURROGATE.search(value):
            message = "this string contains half of a surrogate pair"
            span = (start, self._index)
            self.report("QZ004", message, span, "write the character itself, or both halves")
            value = _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
        return str(value)

    def _scalar(self, path: JsonPath) -> Any:
        """Parse a number or a literal; stop if the end of what is none is not known."""
        end = max(self._end_of(_NUMBER_LIKE), self._end_of(_WORD))
        span = (self._index, end)
        word = self.text[self._index : end]
        value: Any = None
        if _NUMBER.fullmatch(word):
            value = float(word)
            if not math.isfinite(value):
                message = f"the number {word[:20]}… is out of range"
                self.report("QZ008", message, span, "write a smaller number")
                self.unread.add(pointer_to(*path))
                value = None
            elif word.removeprefix("-").isdecimal():
                value = int(word)
        elif word[:1].isdecimal() or word[:1] == ".":
            message = f"{word[:40]} is not a JSON number"
            self.report("QZ004", message, span, "write it like 8, -1 or 99.99")
            self.unread.add(pointer_to(*path))
        elif word in _LITERALS:
            value = _LITERALS[word]
        elif word in _NOT_FINITE:
            self.report("QZ008", f"JSON has no {word}", span, "write a finite number")
            self.unread.add(pointer_to(*path))
        elif word in _FOREIGN_LITERALS:
            literal = _FOREIGN_LITERALS[word]
            value = _LITERALS[literal]
            message = f"JSON has no {word}"
            self.report("QZ004", message, span, f"write {literal}", instead=literal)
        elif self._next() == "'":
            return self._single_quoted()
        else:
            span = (self._index, max(end, self._index + 1))
            message = (
                f"expected a value, not {word[:40] or self._next() or 'the end of the file'}"
            )
            remedy = 'text goes in double quotes: "…"'
            if not _ENDED_WORD.match(self.text, self._index):
                self._fail(message, remedy, span=span)
            self.report("QZ004", message, span, remedy)
            value = word
        self._index = end
        return value
