"""The type of options and arguments that name a place: one that the system refuses to look at
is told at once.
"""

import errno
import os
from typing import Any

import click

from quantizer.errors import DataError, ModelError, QuantizerError, ResultError, UsageError

ERRORS: dict[str, type[QuantizerError]] = {
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
"""What an unusable place is for each parameter; for all others it is wrong usage."""
_MISSING = (errno.ENOENT, errno.ENOTDIR)


class Place(click.Path):
    """A path, which shells complete. Whoever opens it says what is missing there."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the text of the path.

        Raises:
            QuantizerError: nobody can look at the place: its name is too long, a folder on the
                way is locked, or links lead in a circle.
        """
        text = str(super().convert(value, param, ctx))
        name = param.name if param is not None and param.name is not None else ""
        if name == "preprocess" and text.lstrip().startswith("{"):
            return text
        try:
            os.stat(text)
        except OSError as error:
            if error.errno not in _MISSING:
                shown = text if len(text) <= 80 else f"{text[:80]}…"
                raise ERRORS.get(name, UsageError)(
                    f"{shown} cannot be used: {error.strerror}"
                ) from None
        except ValueError:
            raise click.BadParameter(f"{text!r} is no path.") from None
        return text
