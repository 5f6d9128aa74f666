"""Says errors of a run with `--to`, which its user has written, instead of `--deploy`."""

from collections.abc import Iterator
from contextlib import contextmanager

from quantizer.errors import QuantizerError
from quantizer.export.destinations import DESTINATIONS
from quantizer.export.targets import EXPORTERS
from quantizer.option_words import Option, Words, marked, worded

_IN_TEST_MODE = "<shell:test mode's ><python:`Result.export` with >"


@contextmanager
def in_words_of_run(target: str, destination: str) -> Iterator[None]:
    """Name destinations instead of targets in errors of the code inside.

    Args:
        target: of the run.
        destination: what its user calls it.
    """
    choices = DESTINATIONS[destination].choices.items()
    written = [Option("deploy", (target,))]
    written += [Option(name, (value,)) for name, value in choices]
    written_by_target = {name: name for name in DESTINATIONS} | {target: destination}

    def words(options: tuple[Option, ...]) -> str:
        """Return the option of a run for those targets that a run writes; if it writes none,
        say that test mode does.
        """
        if options == tuple(written):
            return marked(Option("to", (destination,)))
        deploy, *others = options
        if deploy.name != "deploy":
            return marked(*options)
        names = [written_by_target[name] for name in deploy.values if name in written_by_target]
        if not names:
            return f"{_IN_TEST_MODE}{marked(*options)}"
        return marked(Option("to", tuple(names), deploy.joint), *others)

    with _in_words(words):
        yield


@contextmanager
def in_words_of_checkpoint() -> Iterator[None]:
    """Name no option in errors of the code inside, which writes the only file that a model
    quantized in place has. Other targets need a result of `calibrate`.
    """

    def words(options: tuple[Option, ...]) -> str:
        """Return the format for the option of this file, and how to write that of others."""
        deploy = options[0]
        if deploy.name != "deploy":
            return marked(*options)
        are_of_modules = [bool(EXPORTERS[name].modules_exporter) for name in deploy.values]
        if len(options) == 1 and all(are_of_modules):
            return deploy.listed(deploy.values)
        return f"`calibrate` and {_IN_TEST_MODE}{marked(*options)}"

    with _in_words(words):
        yield


@contextmanager
def _in_words(words: Words) -> Iterator[None]:
    """Change the names of options in errors of the code inside."""
    try:
        yield
    except QuantizerError as error:
        error.reworded(lambda text: worded(text, words, surface=""))
        raise
