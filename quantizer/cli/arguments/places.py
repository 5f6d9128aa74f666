"""Defines the types of options and arguments: paths, sizes and counts. Writes the file of
--output. Keeps paths where the user has said, also if the user's code changes the working
directory. Imports no torch, as people wait for completions.
"""

import contextlib
import errno
import glob
import json
import math
import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from quantizer.errors import DataError, ModelError, QuantizerError, ResultError, UsageError
from quantizer.storage.opened_files import FileSetKind, open_files
from quantizer.storage.permission import changing_in_place
from quantizer.storage.process_memory import parse_size
from quantizer.storage.replacing import replace_file, require_writable

_ERRORS: dict[str, type[QuantizerError]] = {
    "model": ModelError,
    "weights": ModelError,
    "data": DataError,
    "eval_data": DataError,
    "evaluate": DataError,
    "tokenizer": DataError,
    "output_dir": ResultError,
    "folder": ResultError,
    "folders": ResultError,
    "first": ResultError,
    "second": ResultError,
}
"""The error of an unusable path, by parameter; otherwise it is `UsageError`."""
_MISSING = (errno.ENOENT, errno.ENOTDIR)


_start = Path.cwd()
_as_typed: dict[str, str] = {}
"""The relative paths of the command line, by the absolute ones."""
_PLAN = FileSetKind("plan.json", changed="", missing="", again="")
"""The file with the names of layers; a shell needs no other file of a calibration."""
_DAMAGE = (AttributeError, KeyError, OSError, ResultError, TypeError, ValueError)


def enter_start_folder() -> None:
    """Note the working directory in which a command begins."""
    global _start
    _start = Path.cwd()
    _as_typed.clear()


def from_start(path: str) -> Path:
    """Return a path of the command line, absolute from where the command began."""
    place = Path(_start, path)
    if str(place) != path:
        _as_typed[str(place)] = os.path.normpath(path)
    return place


def unmoved(path: str | None) -> str | None:
    """Return an option that names an input. If the user's code has changed the working
    directory, paths are absolute. Words such as `random:8`, which name no file where the
    command began, stay as they are.
    """
    if path is None or Path.cwd() == _start:
        return path
    place = str(Path(_start, path))
    file, _, _ = place.rpartition(":")
    if glob.glob(place) or os.path.exists(file):
        return place
    return path


def as_typed(text: str) -> str:
    """Return a text for the user, with the paths of the command line as they were typed."""
    for place, typed in _as_typed.items():
        text = text.replace(place, typed)
    return text


class PluginWord(click.Choice[str]):
    """One of the words that plug-ins add, such as a target."""


class DestinationWord(click.ParamType[str]):
    """A destination, by any of its names."""

    name = "destination"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the name in lower case.

        Raises:
            UsageError: no destination has this name.
        """
        # Few runs name one
        from quantizer.export.destinations import destination_named

        destination_named(value)
        return str(value).lower()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the destinations that begin with a word."""
        from quantizer.export.destinations import DESTINATIONS

        return [CompletionItem(name) for name in DESTINATIONS if name.startswith(incomplete)]


class WrittenPath(click.Path):
    """A path, which shells complete. It need not exist."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the text of the path.

        Raises:
            BadParameter: it is empty.
        """
        text = str(super().convert(value, param, ctx))
        if not text:
            raise click.BadParameter("the path is empty; is a variable of the shell unset?")
        return text


class PathType(WrittenPath):
    """A path that is checked before the command runs, as far as the system can reach it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the text of the path.

        Raises:
            QuantizerError: the path is not accessible: its name is too long, a folder on the
                way is not readable, or links form a loop.
        """
        text = str(super().convert(value, param, ctx))
        name = "" if param is None else param.name or ""
        if name == "preprocess" and text.lstrip().startswith("{"):
            return text
        try:
            os.stat(text)
        except OSError as error:
            if error.errno not in _MISSING:
                shown = text if len(text) <= 80 else f"{text[:80]}…"
                error_class = _ERRORS.get(name, UsageError)
                message = f"{shown} cannot be used: {error.strerror}"
                raise error_class(message, help="give another path") from None
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a valid path.") from None
        return text


class OutputFile(PathType):
    """A file that a command writes. It is checked before the command runs."""


def require_free(path: str) -> None:
    """Check before work begins that a file of `--output` can be written; - is standard output.

    Raises:
        UsageError: it exists and may not be replaced, or it is an input of the run.
    """
    if path == "-":
        return
    try:
        require_writable(Path(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def write_output(
    path: str, text: str, *, encoding: str = "utf-8", in_place: bool = False
) -> None:
    """Write the file of `--output` atomically, without translating newlines.

    Args:
        path: of the file.
        text: its content.
        encoding: of the text.
        in_place: whether the command is to change this file, which is its input.

    Raises:
        UsageError: the file cannot be written.
    """
    permission = changing_in_place() if in_place else contextlib.nullcontext()
    try:
        with permission:
            replace_file(from_start(path), text.encode(encoding))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def rows_shown(text: str) -> int | str:
    """Return the value of `--top`: a whole number, or "all".

    Raises:
        BadParameter: it is neither.
    """
    if text == "all":
        return text
    if not text.isdecimal() or int(text) == 0:
        raise click.BadParameter(f"{text!r} is neither a number of rows nor 'all'.")
    return int(text)


def memory_size(text: str) -> int:
    """Return the value of `--memory` and `--max_unpacked` in bytes.

    Raises:
        BadParameter: it is not a size.
    """
    try:
        return parse_size(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a size of memory; write 8GB or 512MB, for example."
        ) from None


def minutes(text: str) -> float:
    """Return the value of `--minutes`.

    Raises:
        BadParameter: it is not a number, or below 0.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise click.BadParameter(f"{text!r} is not a number of minutes; write 10 or 0.5.")
    return value


def layers_of_results(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the module paths of layers in the result folder, if there is one.

    The folder is the one on the command line, else quantize_result in the working directory.
    """
    folder = Path("quantize_result")
    for name in ("output_dir", "folder"):
        if context.params.get(name):
            folder = Path(context.params[name])
    layers: list[str] = []
    with contextlib.suppress(*_DAMAGE):
        opened = open_files(folder, _PLAN, lambda _: {})
        content = opened[_PLAN.index].content()
        plan = json.loads(content)
        for path in plan["paths"].values():
            if path.startswith(incomplete) and path not in layers:
                layers.append(path)
    return layers
