"""Says which files of the user's a run may replace. Imports no torch.

By default a run replaces no file that exists. `--overwrite` allows it, but never for the inputs
of the run. The files that quantizer has listed as its own need no permission: see
`storage.owned_folder`.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from quantizer.errors import UsageError


@dataclass(frozen=True)
class _Permission:
    """What the code that runs now may replace.

    Attributes:
        overwrite: whether files that are not listed as quantizer's may be replaced.
        inputs: the model, weights, data and configs of the run, as absolute paths. A folder
            stands for all that is in it.
    """

    overwrite: bool = False
    inputs: frozenset[Path] = frozenset()


_NOTHING = _Permission()
_current: ContextVar[_Permission] = ContextVar("permission", default=_NOTHING)


@contextmanager
def replacing(
    *, overwrite: bool | None = None, inputs: Iterable[str | os.PathLike[str]] = ()
) -> Iterator[None]:
    """Let the code inside the `with` block replace files.

    Args:
        overwrite: whether files that exist may be replaced, and changed results. None for what
            an outer block says.
        inputs: paths that are never written, in addition to those of an outer block. Words
            that are not a path of this machine do no harm.
    """
    outer = _current.get()
    protected = set(outer.inputs)
    for path in inputs:
        protected.add(Path(os.path.realpath(path)))
    if overwrite is None:
        overwrite = outer.overwrite
    token = _current.set(_Permission(overwrite, frozenset(protected)))
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def changing_in_place() -> Iterator[None]:
    """Let the code inside the `with` block replace inputs, for commands whose task it is."""
    token = _current.set(_Permission(overwrite=True))
    try:
        yield
    finally:
        _current.reset(token)


def may_overwrite() -> bool:
    """Return whether files may be replaced that quantizer has not listed as its own."""
    return _current.get().overwrite


def require_no_input(path: Path) -> None:
    """Check that a path is not an input of the run.

    Raises:
        UsageError: it is one, under this name or another one.
    """
    if is_input(path):
        text = f"{path} is an input of this run, so it is not written"
        raise UsageError(text, help="give another path")


def is_input(path: Path) -> bool:
    """Return whether a path is an input of the run, under this name or another one."""
    resolved = Path(os.path.realpath(path))
    for source in _current.get().inputs:
        if resolved == source:
            return True
        # A hard link has another name
        if path.exists() and source.exists() and os.path.samefile(path, source):
            return True
    return False


def require_replaceable(path: Path) -> None:
    """Check that a file outside the folders of quantizer does not exist, or may be replaced.

    Raises:
        UsageError: naming the file.
    """
    require_no_input(path)
    if not path.exists():
        return
    resolved = Path(os.path.realpath(path))
    for source in _current.get().inputs:
        if source in resolved.parents:
            raise UsageError(
                f"{path} belongs to {source}, an input of this run, so it is not written",
                help="give another path",
            )
    if not may_overwrite():
        raise UsageError(
            f"{path} exists already", help="give another path, or add <--overwrite>"
        )
