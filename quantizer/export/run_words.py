"""Says errors of a run with `--to`, which its user has written, instead of `--deploy`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from quantizer.errors import QuantizerError
from quantizer.export.destinations import DESTINATIONS

_DEPLOY = re.compile(r"--deploy ([\w-]+)")


@contextmanager
def in_words_of_run(target: str, destination: str) -> Iterator[None]:
    """Name destinations instead of targets in errors of the code inside.

    Args:
        target: of the run.
        destination: what its user calls it.
    """
    written = f"--deploy {target}"
    for name, value in DESTINATIONS[destination].choices.items():
        written += f" --{name} {value}"

    def option(match: re.Match[str]) -> str:
        """Return the option of a run for a target; `--deploy` if no destination writes it."""
        name = match[1]
        if name in DESTINATIONS:
            return f"--to {name}"
        if name == target:
            return f"--to {destination}"
        return match[0]

    def reworded(text: str) -> str:
        """Return a sentence with destinations."""
        text = text.replace(written, f"--to {destination}")
        return _DEPLOY.sub(option, text)

    try:
        yield
    except QuantizerError as error:
        error.reworded(reworded)
        raise
