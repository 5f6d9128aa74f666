"""Says errors of a run with `--to`, which its user has written, instead of `--deploy`."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quantizer.errors import QuantizerError
from quantizer.export.destinations import DESTINATIONS
from quantizer.export.targets import EXPORTERS

_NAMES = "|".join(sorted({*EXPORTERS, *DESTINATIONS}, reverse=True))
_DEPLOY = re.compile(rf"--deploy (?P<names>(?:{_NAMES})(?:(?:, | or | and )(?:{_NAMES}))*)")
"""Matches the option with one target or several."""


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
    written_by_target = {name: name for name in DESTINATIONS} | {target: destination}

    def option(match: re.Match[str]) -> str:
        """Return the option of a run for those targets that a run writes; if it writes none,
        say that test mode does.
        """
        targets = re.split(", | or | and ", match["names"])
        names = [written_by_target[name] for name in targets if name in written_by_target]
        if not names:
            return f"test mode's {match[0]}"
        joined = " and " if " and " in match["names"] else " or "
        return f"--to {joined.join(names)}"

    def reworded(text: str) -> str:
        """Return a sentence with destinations."""
        text = text.replace(written, f"--to {destination}")
        return _DEPLOY.sub(option, text)

    with _in_words(reworded):
        yield


@contextmanager
def in_words_of_checkpoint() -> Iterator[None]:
    """Name no option in errors of the code inside, which writes the only file that a model
    quantized in place has. Other targets need a result of `calibrate`.
    """

    def reworded(text: str) -> str:
        """Return a sentence without the option of the target."""
        for target, row in EXPORTERS.items():
            if row.modules_exporter:
                text = text.replace(f"--deploy {target}", target)
        return _DEPLOY.sub(r"`calibrate` and test mode's \g<0>", text)

    with _in_words(reworded):
        yield


@contextmanager
def _in_words(reworded: Callable[[str], str]) -> Iterator[None]:
    """Change the texts of errors of the code inside."""
    try:
        yield
    except QuantizerError as error:
        error.reworded(reworded)
        raise
