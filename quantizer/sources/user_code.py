"""Import and call the user's Python code, and report its errors with the lines of that code.

Code that the user names by `FILE.py:NAME` or `package.module:NAME` runs only here. `sys.path`
is restored afterwards.
"""

import importlib
import importlib.util
import inspect
import logging
import os
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

from quantizer.config.wording import counted, did_you_mean
from quantizer.errors import WORKER_HELP, GateError, QuantizerError, lost_worker
from quantizer.storage import process_memory
from quantizer.torch_state import default_device_kept, default_device_of_user

_logger = logging.getLogger(__name__)

_FORMS = "give FILE.py, FILE.py:factory or package.module:factory"
_MAX_FRAMES = 5
_FOREIGN_PREFIXES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    os.path.join(Path(__file__).parents[1], ""),
    "<frozen",
)
"""The beginnings of file names of code that is not the user's: Python, packages and
quantizer.
"""
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, also those outside of the environment."""
_IMPORTED: ContextVar[dict[Path, ModuleType] | None] = ContextVar("_IMPORTED", default=None)
"""The files imported by the current command; None if no command runs."""


@contextmanager
def imported_once() -> Iterator[None]:
    """Import each file of the user's only once inside the `with` block, so that `--model` and
    `--data` share its variables. A later block imports it again, as it may have changed.
    """
    token = _IMPORTED.set({})
    try:
        with default_device_kept():
            yield
    finally:
        _IMPORTED.reset(token)


@dataclass(frozen=True)
class UserModule:
    """An imported module of the user's.

    Args:
        module: the module.
        folder: is in `sys.path` while `call` runs its code.
        label: names the module in messages.
        error: the class of the error if it lacks a name.
    """

    module: ModuleType
    folder: Path
    label: str
    error: type[QuantizerError]

    def find(self, name: str) -> Any | None:
        """Return the attribute called `name`, or None."""
        return getattr(self.module, name, None)

    def get(self, name: str) -> Any:
        """Return the attribute called `name`.

        Raises:
            error: there is none; the closest names are given.
        """
        if hasattr(self.module, name):
            return getattr(self.module, name)
        public = []
        for known, value in vars(self.module).items():
            if callable(value) and not known.startswith("_"):
                public.append(known)
        defined = f"it defines: {', '.join(public) or 'nothing'}"
        remedy = did_you_mean(name, public, defined)
        raise self.error(f"{self.label} has no {name!r}", help=remedy)

    def call(
        self, function: Callable[..., Any], error: type[QuantizerError], *args: Any
    ) -> Any:
        """Return `function(*args)`. During the call, the module's folder is in `sys.path`.

        Raises:
            error: the function does not take these arguments, or raises; the user's frames are
                given.
        """
        name = getattr(function, "__name__", type(function).__name__)
        require_callable(function, len(args), f"{name} of {self.label}", error)
        with user_errors(f"{name}() of {self.label}", error), _importable(self.folder):
            return function(*args)


def import_user_module(location: str, error: type[QuantizerError]) -> UserModule:
    """Import a path that ends in `.py`, or a dotted name, which is looked up in the working
    directory first.

    Raises:
        error: there is no such file or module, or it raises while it is imported.
    """
    if location.endswith(".py"):
        return _import_file(Path(location), error)
    if not all(part.isidentifier() for part in location.split(".")):
        raise error(f"{location!r} is neither a file nor a module", help=_FORMS)
    folder = Path.cwd()
    with user_errors(location, error), _importable(folder):
        try:
            module = importlib.import_module(location)
        except ModuleNotFoundError as cause:
            missing = cause.name or ""
            # If the missing module is another one, the user's code has failed to import it
            if not missing or not f"{location}.".startswith(f"{missing}."):
                raise
            raise error(
                f"there is no module {missing!r} in the working directory or among the "
                "installed packages",
                help="run from the folder that holds it, or give FILE.py:factory",
            ) from None
    file = getattr(module, "__file__", "a namespace package")
    _logger.info("importing %s from %s", location, file)
    return UserModule(module, folder, location, error)


def require_file(spec: str, error: type[QuantizerError]) -> None:
    """Check that there is the file of `FILE.py` or `FILE.py:NAME`.

    Raises:
        error: there is none.
    """
    location, _ = split_spec(spec)
    if location.endswith(".py") and not Path(location).is_file():
        raise error(f"there is no file {location}", help=_FORMS)


def split_spec(spec: str) -> tuple[str, str | None]:
    """Split `FILE.py:NAME` or `package.module:NAME` into location and name, which may be None.

    >>> split_spec("nets/small.py:build"), split_spec("nets/small.py")
    (('nets/small.py', 'build'), ('nets/small.py', None))
    """
    location, colon, name = spec.rpartition(":")
    if not colon or name.endswith(".py") or "/" in name or "\\" in name:
        return spec, None
    return location, name


@contextmanager
def user_errors(
    what: str, error: type[QuantizerError], *, remedy: str | None = None
) -> Iterator[None]:
    """Turn exceptions of the user's code into `error`: "`what` raised ValueError: …", with the
    user's frames. Errors of quantizer itself and Ctrl-C pass.

    Args:
        what: names the code that runs.
        error: the error to raise.
        remedy: what to do about an error without frames of the user's.
    """
    with user_exits(what, error), default_device_of_user():
        try:
            yield
        except QuantizerError as cause:
            # Exit codes 0 and 1 mean success and a failed gate. The user's code must not set
            # them
            if cause.exit_code in (0, GateError.exit_code):
                raise user_error(what, cause, error) from cause
            raise
        except Exception as cause:
            raise user_error(what, cause, error, remedy) from cause


@contextmanager
def user_exits(what: str, error: type[QuantizerError]) -> Iterator[None]:
    """Turn exceptions that would end the process into `error`: `sys.exit()`, GeneratorExit and
    subclasses of BaseException of the user's. All others pass, and so does Ctrl-C.

    A generator must not yield inside the `with` block: closing it raises GeneratorExit there.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as cause:
        raise user_error(what, cause, error) from cause


def user_error(
    what: str, cause: BaseException, error: type[QuantizerError], remedy: str | None = None
) -> QuantizerError:
    """Return an `error` saying that `what` raised `cause`, with the user's frames, or with a
    remedy if there are none.
    """
    lost = lost_worker(cause)
    if lost is not None:
        return error(f"{what}: {lost}", help=WORKER_HELP)
    message = f"{what} raised {type(cause).__name__}"
    text = cause.msg if isinstance(cause, SyntaxError) else str(cause)
    text = " ".join(text.split())
    if text:
        message += f": {text}"
    lines = [*_import_remedies(cause), *frames_of(cause)]
    if not lines:
        lines.append(remedy or _last_frame(cause))
    return error(message, help=lines)


def _import_remedies(cause: BaseException) -> Iterator[str]:
    """Yield what to do about an import that failed."""
    if not isinstance(cause, ImportError):
        return
    if "relative import" in str(cause):
        yield (
            "a file has no package if it is imported by its path: give package.module:NAME "
            "from the folder that holds the package"
        )
    elif isinstance(cause, ModuleNotFoundError) and cause.name:
        package = cause.name.partition(".")[0]
        yield f"install {package} where quantizer is installed, or put its folder on PYTHONPATH"


def require_callable(
    function: Callable[..., Any], arguments: int, what: str, error: type[QuantizerError]
) -> None:
    """Check that a function of the user's can be called with this number of arguments.

    Args:
        function: the function, or a class.
        arguments: how many it is called with, by position.
        what: names it in messages.
        error: the error to raise.

    Raises:
        error: it needs more or takes fewer.
    """
    try:
        signature = inspect.signature(function)
    # Builtins have no signature. The error of the call shows what is missing
    except (ValueError, TypeError):
        return
    try:
        signature.bind(*range(arguments))
        return
    except TypeError:
        pass
    if arguments > 0:
        raise error(
            f"{what} takes {signature}, and it is called with {counted(arguments, 'argument')}"
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in variadic:
            names.append(parameter.name)
    name = what.partition(" ")[0]
    raise error(
        f"{what} needs arguments: {', '.join(names)}",
        help=f"give them defaults, or write a function without parameters that calls {name}",
    )


def was_called(model: Any, cause: BaseException) -> bool:
    """Return whether an exception was raised within a call of the model."""
    frames = traceback.walk_tb(cause.__traceback__)
    return any(frame.f_locals.get("self") is model for frame, _ in frames)


def _import_file(path: Path, error: type[QuantizerError]) -> UserModule:
    """Import a file of the user, once for each command."""
    require_file(str(path), error)
    place = path.resolve()
    folder = place.parent
    imported = _IMPORTED.get()
    if imported is not None and place in imported:
        return UserModule(imported[place], folder, str(path), error)
    _logger.debug("importing %s", path)
    name = _fresh_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise error(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    # dataclasses and typing look up the module of a class there
    sys.modules[name] = module
    try:
        remedy = "it has to be a text file in Python"
        with (
            user_errors(str(path), error, remedy=remedy),
            _importable(folder),
            process_memory.pause_garbage_collection(),
        ):
            spec.loader.exec_module(module)
    except QuantizerError:
        del sys.modules[name]
        raise
    if imported is not None:
        imported[place] = module
        # Building the model is then not slowed by searches of what the file imports
        process_memory.skip_existing_objects()
    return UserModule(module, folder, str(path), error)


def _fresh_name(path: Path) -> str:
    """Return a name for the module of a file that no module of another file has.

    It does not depend on the folder, so that it is the same on other machines.
    """
    stem = f"user_{path.stem}"
    name = stem
    number = 1
    while name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
        number += 1
        name = f"{stem}_{number}"
    return name


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put `folder` first in `sys.path` inside the `with` block, and write no bytecode."""
    _forget_namesakes(folder)
    entry = str(folder)
    wrote_bytecode = sys.dont_write_bytecode
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
    """Forget imported modules of other folders whose names are those of files in `folder`.

    Otherwise `import helper` in one file of the user's would give the `helper.py` of another.
    """
    for file in folder.glob("*.py"):
        origin = getattr(sys.modules.get(file.stem), "__file__", None)
        if origin is None or not file.is_file():
            continue
        home = Path(origin).resolve().parent
        importable = (Path(entry or ".").resolve() for entry in sys.path)
        if home != folder and home not in importable:
            del sys.modules[file.stem]


def ends_in_user_code(cause: BaseException) -> bool:
    """Return whether an exception was raised by a line of the user's code."""
    frames = traceback.extract_tb(cause.__traceback__)
    return bool(frames) and is_file_of_user(frames[-1].filename)


def is_file_of_user(name: str) -> bool:
    """Return whether a file of Python is not part of Python, of an installed package or of
    quantizer. Packages that are installed in editable mode are the user's.
    """
    if name.startswith(_FOREIGN_PREFIXES):
        return False
    return _PACKAGE_FOLDERS.isdisjoint(Path(name).parts)


def frames_of(cause: BaseException) -> list[str]:
    """Return the last frames of the user's code, such as `file.py:12 in build: the line`, the
    innermost last. A line that Python cannot read is the last one, with its column.
    """
    lines: list[str] = []
    for frame in traceback.extract_tb(cause.__traceback__):
        if is_file_of_user(frame.filename):
            lines.append(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}")
    if isinstance(cause, SyntaxError) and cause.filename:
        place = f"{cause.filename}:{cause.lineno or 1}:{cause.offset or 1}"
        lines.append(f"{place}: {(cause.text or '').strip()}")
    return lines[-_MAX_FRAMES:]


def _last_frame(cause: BaseException) -> str:
    """Return the innermost frame of code that is not the user's."""
    for frame in reversed(traceback.extract_tb(cause.__traceback__)):
        return (
            f"no frame of your code is involved; the innermost is {frame.filename}:"
            f"{frame.lineno} in {frame.name}"
        )
    return "no frame of your code is involved"
