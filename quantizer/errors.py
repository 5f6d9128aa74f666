"""What can go wrong for a user, one class per exit code. Only `cli` turns these into an
exit.
"""

from collections.abc import Sequence

from quantizer.printable import one_line

TORCH = ("torch", "safetensors")
"""The packages of the extra `torch`, which a plain install lacks."""


def pip_line(extra: str) -> str:
    """The command that installs an optional part of the package; PyPI's `quantizer` is another
    project.
    """
    return f"pip install 'quantizer-torch[{extra}]'"


class QuantizerError(Exception):
    """A sentence for the user: what happened and where, with `help` saying what to do, in one
    line or several.

    Both may quote names from anywhere: what would steer a terminal or a CI log is escaped. Only
    `quantizer.cli` catches it; its `exit_code` is the process's.
    """

    exit_code = 70

    def __init__(
        self,
        message: str,
        *,
        help: str | Sequence[str] | None = None,  # noqa: A002 - the word users read
    ) -> None:
        self.message = one_line(message)
        super().__init__(self.message)
        self.help = None if help is None else _Lines(help)

    def __str__(self) -> str:
        """Message and help: all that whoever calls from Python sees."""
        return f"{self.message}\nhelp: {self.help}" if self.help else self.message


class _Lines(str):
    """Lines of a help, each escaped; taken from one error to another they stay as they are."""

    def __new__(cls, text: str | Sequence[str]) -> "_Lines":
        if isinstance(text, _Lines):
            return text
        parts = [text] if isinstance(text, str) else text
        return super().__new__(cls, "\n".join(map(one_line, parts)))


class GateError(QuantizerError):
    """Check failed: a gate of `--gate` is not met."""

    exit_code = 1


class VerificationError(QuantizerError):
    """Check failed: a deployed file does not compute what test mode does, so it is not kept."""

    exit_code = 1


class UsageError(QuantizerError):
    """The command line or the config cannot be used."""

    exit_code = 2


class ModelError(QuantizerError):
    """The model cannot be loaded, checked or traced."""

    exit_code = 3


class DataError(QuantizerError):
    """The data is unreadable, empty, of the wrong shape, or not finite."""

    exit_code = 4


class ResultError(QuantizerError):
    """Calibration results are missing, incomplete, or of another model or config."""

    exit_code = 5


class OutOfMemoryError(QuantizerError):
    """There is not as much memory as the run needs."""

    exit_code = 6


class RankError(QuantizerError):
    """Another rank of a run of several processes is lost, or does not do the same."""

    exit_code = 40


_NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "unable to mmap",
)
"""What torch and the system say then, in small letters; torch on a CPU raises a plain
RuntimeError.
"""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, or one that it comes from, is that there is no more memory."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        text = str(found).lower()
        if isinstance(found, MemoryError) or (
            isinstance(found, RuntimeError | OSError)
            and any(words in text for words in _NO_MEMORY)
        ):
            return True
        seen.append(found)
        found = found.__cause__ or found.__context__
    return False


def lost_worker(error: BaseException | None) -> str | None:
    """Return what torch says of the end of a loader's process, None for any other error.

    torch raises that by a signal, wherever this process is just then.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or not text.startswith("DataLoader worker (pid"):
        return None
    return text.split(". ")[0].strip().rstrip(".")


WORKER_HELP = "the worker may have run out of memory; with num_workers=0 its own error is shown"
"""What to do about it."""
