"""Imports the user's Python and calls it, so that what goes wrong there is reported with the
user's own lines.

The only place that runs foreign code by name: `FILE.py:NAME` or `package.module:NAME`. Leaves
`sys.path` as it was.
"""

import difflib
import importlib
import importlib.util
import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from quantizer.errors import GateError, QuantizerError

logger = logging.getLogger(__name__)

FORMS = "give FILE.py, FILE.py:factory or package.module:factory"
_INSTALLED = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_OURS = str(Path(__file__).parents[1] / "_")[:-1]
_IMPORTED: ContextVar[dict[Path, ModuleType] | None] = ContextVar("_IMPORTED", default=None)
"""The files of a command so far; None outside of one."""


@contextmanager
def imported_once() -> Iterator[None]:
    """What a command is run in: a file of the user's runs once, though `--model` and `--data`
    both name it, so they share what it keeps. The next command runs it again, as it may have
    changed.
    """
    token = _IMPORTED.set({})
    try:
        yield
    finally:
        _IMPORTED.reset(token)


@dataclass(frozen=True)
class UserModule:
    """A module of the user's; `folder` is importable while `call` runs code of it; a miss is an
    `error`.
    """

    module: ModuleType
    folder: Path
    label: str
    error: type[QuantizerError]

    def find(self, name: str) -> Any | None:
        """The attribute called `name`, or None."""
        return getattr(self.module, name, None)

    def get(self, name: str) -> Any:
        """The attribute called `name`. A miss is an error with the closest names."""
        if hasattr(self.module, name):
            return getattr(self.module, name)
        public = [known for known in vars(self.module) if not known.startswith("_")]
        close = difflib.get_close_matches(name, public, n=3)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"it defines: {', '.join(public) or 'nothing'}"
        )
        raise self.error(f"{self.label} has no {name!r}", help=hint)

    def call(
        self, function: Callable[..., Any], error: type[QuantizerError], *args: Any
    ) -> Any:
        """`function(*args)` with the folder importable; what it raises comes back as `error`
        with the user's frames.
        """
        name = getattr(function, "__name__", type(function).__name__)
        with user_errors(f"{name}() of {self.label}", error), _importable(self.folder):
            return function(*args)


def import_user_module(location: str, error: type[QuantizerError]) -> UserModule:
    """The module at `location`: a path that ends in `.py`, or a dotted name looked up in the
    working directory first.

    Raises:
        error: there is no such file or module, or it raises while it is imported.
    """
    if location.endswith(".py"):
        return _import_file(Path(location), error)
    if not all(part.isidentifier() for part in location.split(".")):
        raise error(f"{location!r} is neither a file nor a module", help=FORMS)
    folder = Path.cwd()
    with user_errors(location, error), _importable(folder):
        try:
            module = importlib.import_module(location)
        except ModuleNotFoundError as cause:
            if cause.name and (location == cause.name or location.startswith(f"{cause.name}.")):
                where = "in the working directory or among the installed packages"
                remedy = "run from the folder that holds it, or give FILE.py:factory"
                raise error(f"there is no module {cause.name!r} {where}", help=remedy) from None
            raise
    logger.info(
        "importing %s from %s", location, getattr(module, "__file__", "a namespace package")
    )
    return UserModule(module, folder, location, error)


def split_spec(spec: str) -> tuple[str, str | None]:
    """`FILE.py:NAME` or `package.module:NAME` as (location, name); name is None if there is
    none.

    >>> split_spec("nets/small.py:build"), split_spec("nets/small.py")
    (('nets/small.py', 'build'), ('nets/small.py', None))
    """
    location, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py") or "/" in name or "\\" in name:
        return spec, None
    return location, name


@contextmanager
def user_errors(
    what: str, error: type[QuantizerError], ended: type[QuantizerError] | None = None
) -> Iterator[None]:
    """Turn what the user's code raises into `error`: "`what` raised ValueError: …" and the
    user's own frames.

    Args:
        what: was run.
        error: for all but the errors of quantizer itself and Ctrl-C.
        ended: instead of `error` for what would end the process, as `sys.exit()` does.
    """
    with user_exits(what, ended or error):
        try:
            yield
        except QuantizerError as cause:
            # 0 and 1 say that all went well and that a gate failed: no code of the user's
            # decides that.
            if cause.exit_code in (0, GateError.exit_code):
                raise raised(what, cause, error) from cause
            raise
        except Exception as cause:
            raise raised(what, cause, error) from cause


@contextmanager
def user_exits(what: str, error: type[QuantizerError]) -> Iterator[None]:
    """Turn what would end the process into `error`: `sys.exit()`, GeneratorExit, the user's own
    BaseException.

    Other exceptions pass, and so does Ctrl-C. The body must not yield: who closes a generator
    raises GeneratorExit in it.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as cause:
        raise raised(what, cause, error) from cause


def raised(what: str, cause: BaseException, error: type[QuantizerError]) -> QuantizerError:
    """Return the sentence that `what` raised `cause`, with the user's own frames, as an
    `error`.
    """
    kind = type(cause).__name__
    text = " ".join(str(cause).split())
    return error(
        f"{what} raised {kind}: {text}" if text else f"{what} raised {kind}",
        help=_frames(cause),
    )


def was_called(model: Any, cause: BaseException) -> bool:
    """Return whether an exception was raised in a call of the model, and not beside it."""
    frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__))
    return any(frame.f_locals.get("self") is model for frame in frames)


def _import_file(path: Path, error: type[QuantizerError]) -> UserModule:
    if not path.is_file():
        raise error(f"there is no file {path}", help=FORMS)
    place, imported = path.resolve(), _IMPORTED.get()
    if imported is not None and place in imported:
        return UserModule(imported[place], place.parent, str(path), error)
    logger.info("importing %s", path)
    name = _fresh_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look a class's module up there
    try:
        with user_errors(str(path), error), _importable(place.parent):
            spec.loader.exec_module(module)
    except QuantizerError:
        del sys.modules[name]
        raise
    if imported is not None:
        imported[place] = module
    return UserModule(module, place.parent, str(path), error)


def _fresh_name(path: Path) -> str:
    """A module name that no other file holds, and that does not depend on where the file
    lies.
    """
    stem, n = f"user_{path.stem}", 1
    name = stem
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        n += 1
        name = f"{stem}_{n}"
    return name


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Look in `folder` first for imports, write no bytecode there, and undo both."""
    _forget_namesakes(folder)
    entry, wrote_bytecode = str(folder), sys.dont_write_bytecode
    sys.path.insert(0, entry)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = wrote_bytecode
        if entry in sys.path:
            sys.path.remove(entry)


def _forget_namesakes(folder: Path) -> None:
    """Two users' files may each have a `helper.py` beside them: drop the one whose folder is no
    longer importable.
    """
    importable = {str(folder), *(str(Path(entry or ".").resolve()) for entry in sys.path)}
    for file in folder.glob("*.py"):
        origin = getattr(sys.modules.get(file.stem), "__file__", None)
        if (
            origin is not None
            and str(Path(origin).resolve().parent) not in importable
            and file.is_file()
        ):
            del sys.modules[file.stem]


def _frames(cause: BaseException) -> list[str]:
    """Where in the user's code: `file.py:12 in build: the line`, outermost first, at most
    five.
    """
    others = (*_INSTALLED, _OURS, "<frozen")
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if not frame.filename.startswith(others)
    ]
    lines = [
        f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in frames[-5:]
    ]
    return lines or ["no frame of your code is involved"]
