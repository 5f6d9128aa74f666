"""The errors that a user can get, one class per exit code. Only `cli` exits with the codes."""

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from quantizer.option_words import Sentence, marked_text
from quantizer.printable import one_line

_Found = TypeVar("_Found")
LEFT_OUT = "quantizer.left_out"
"""The logger of analyses that failed, and of no others."""

TORCH = ("torch", "safetensors")
"""The packages of the extra `torch`. A plain install does not have them."""

DAMAGE_ERRORS = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
)
"""The errors of code that reads changed or incomplete results."""


class QuantizerError(Exception):
    """An error with a message for the user: what happened and where. Its help, of one line or
    several, is what to do.

    Both may quote names from anywhere, so characters that control a terminal or a CI log are
    escaped. `quantizer.cli` catches it and exits with its `exit_code`.
    """

    exit_code = 70

    def __init__(
        self,
        message: str,
        *,
        # Users read this word, too
        help: str | Sequence[str] | None = None,  # noqa: A002
    ) -> None:
        self.message = Sentence(one_line(marked_text(message)))
        super().__init__(self.message)
        self.help = None if help is None else _Lines(help)

    def reworded(self, change: Callable[[str], str]) -> None:
        """Replace the message and the help by what `change` makes of them, with their marks."""
        self.message = Sentence(change(self.message.marked))
        self.args = (self.message,)
        if self.help is not None:
            self.help = _Lines(change(self.help.marked).splitlines())

    def __str__(self) -> str:
        """Return message and help, for callers from Python."""
        if self.help:
            return f"{self.message}\nhelp: {self.help}"
        return self.message


class _Lines(Sentence):
    """The lines of a help, each escaped once, even if they are passed to another error."""

    def __new__(cls, text: str | Sequence[str]) -> "_Lines":
        if isinstance(text, _Lines):
            return text
        parts = [text] if isinstance(text, str) else text
        lines = [one_line(marked_text(part)) for part in parts]
        lines_of_help = super().__new__(cls, "\n".join(lines))
        assert isinstance(lines_of_help, _Lines)
        return lines_of_help


class GateError(QuantizerError):
    """A check failed: a gate of `--gate` is not met."""

    exit_code = 1


class VerificationError(QuantizerError):
    """A check failed: a deployed file differs from test mode, so it is deleted."""

    exit_code = 1


class UsageError(QuantizerError):
    """The command line or the config cannot be used."""

    exit_code = 2


class ModelError(QuantizerError):
    """The model cannot be loaded, checked or traced."""

    exit_code = 3


class UntraceableError(ModelError):
    """`torch.export` cannot trace the model, although it may run. Its layers with weights can
    still be quantized as modules.
    """


class SameForAllExamplesError(UntraceableError):
    """Says that another example would fail, too: forward() branches on values, or exits."""


class DataError(QuantizerError):
    """The data is unreadable, empty, of the wrong shape, or not finite."""

    exit_code = 4


class BatchError(DataError):
    """A batch does not fit the model or the other batches. A run could resume with other data
    only.
    """


class ResultError(QuantizerError):
    """Calibration results are missing, incomplete, or of another model or config."""

    exit_code = 5


class CheckpointError(ResultError):
    """A checkpoint is damaged, or this run cannot continue from it."""


class OutOfMemoryError(QuantizerError):
    """The run needs more memory than there is."""

    exit_code = 6


class RankError(QuantizerError):
    """Another process of the run is lost, or does something else."""

    exit_code = 40


_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "unable to mmap",
)
"""Parts of messages, in lower case, of torch and of the system. On a CPU, torch raises a plain
RuntimeError.
"""


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, is that there is no more memory."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, MemoryError):
            return True
        text = str(cause).lower()
        is_system_error = isinstance(cause, RuntimeError | OSError)
        if is_system_error and any(words in text for words in _NO_MEMORY):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False


WORKER_HELP = "the worker may have run out of memory; num_workers=0 shows its own error"
"""The help of an error about the end of a loader's process."""


_LOST_CONNECTION = (ConnectionError, EOFError, FileNotFoundError)
"""What Python raises if the process at the other end of a connection is gone."""


def lost_worker(error: BaseException | None) -> str | None:
    """Return what says that a loader's process ended, or None for another error.

    torch raises its own message in a signal handler, so it can occur anywhere. The connection
    to the process can break before that signal arrives.
    """
    text = str(error)
    if isinstance(error, RuntimeError) and text.startswith("DataLoader worker (pid"):
        return text.split(". ")[0].strip().rstrip(".")
    if isinstance(error, _LOST_CONNECTION) and _broke_in_a_loader(error):
        return "a DataLoader worker ended before its batch was read"
    return None


def _broke_in_a_loader(error: BaseException) -> bool:
    """Return whether a connection broke while torch's DataLoader read a batch."""
    files: list[str] = []
    for frame in traceback.extract_tb(error.__traceback__):
        files.append(frame.filename.replace("\\", "/"))
    reads_a_connection = bool(files) and "/multiprocessing/" in files[-1]
    return reads_a_connection and any("/torch/utils/data/" in file for file in files)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def or_without(what: str, analyse: Callable[[], _Found], without: _Found) -> _Found:
    """Return what an analysis finds that only improves a figure or a choice, and `without` if
    it fails: such an analysis ends no run. A line of run.log says what was left out, and why.

    Args:
        what: the analysis, for that line.
        analyse: the analysis; what it changes in place must be its own.
        without: what a run without the analysis has.

    Raises:
        QuantizerError: the analysis raises it.
        MemoryError: it needs more memory than there is.

    >>> or_without("the half", lambda: 6 / 2, 0.0), or_without("the half", lambda: 6 / 0, 0.0)
    (3.0, 0.0)
    """
    try:
        return analyse()
    except (QuantizerError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - a bug in it may raise any error
        place = traceback.extract_tb(error.__traceback__)[-1]
        logging.getLogger(LEFT_OUT).warning(
            "%s: left out after an internal error (%s: %s, line %d of %s), which is a bug of "
            "quantizer; the run continues without it",
            what,
            type(error).__name__,
            first_line(error),
            place.lineno or 0,
            place.name,
        )
        return without
