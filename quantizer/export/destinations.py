"""Lists the destinations of `--to`: for each the preset to start from and the file to write.
Errors of a run name its destination instead of its target. Imports no torch.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quantizer.config.wording import did_you_mean
from quantizer.declarations import Destination
from quantizer.errors import QuantizerError, UsageError
from quantizer.export.targets import CHECKED_TARGETS, CHOICES, EXPORTERS
from quantizer.option_words import Option, Words, marked, worded
from quantizer.plugins import plugins, remedy_for_absent

NETWORK = "network"
_LANGUAGE_MODEL = "language model"
"""The values of `Destination.stands_for`."""
DESTINATIONS: dict[str, Destination] = {}
"""By the values of `--to`."""
for _plugin in plugins():
    DESTINATIONS.update(_plugin.destinations)
for _name in EXPORTERS:
    if not any(_name in (key, *row.also) for key, row in DESTINATIONS.items()):
        # A target of another package
        DESTINATIONS[_name] = Destination(f"files of {_name}", "cpu_int8", _name)
ALSO: dict[str, tuple[str, str]] = {}
"""Other names: the destination of each, and the preset that it stands for, empty for that of
the destination.
"""
for _name, _row in DESTINATIONS.items():
    for _other, _preset in _row.also.items():
        ALSO[_other] = (_name, _preset)
SIZED = {name: row for name, row in DESTINATIONS.items() if row.wider}
"""The destinations for which `--max_mb` can choose the widths."""


def destination_named(name: str) -> tuple[str, str]:
    """Return a destination by any of its names, and the preset that the name stands for, empty
    for that of the destination.

    >>> destination_named("onnx"), destination_named("Q4_K_M")
    (('onnx', ''), ('gguf', 'gguf_q4_k_m'))

    Raises:
        UsageError: no destination has this name.
    """
    word = name.lower()
    if word in DESTINATIONS:
        return word, ""
    if word in ALSO:
        return ALSO[word]
    known = f"known are {', '.join(DESTINATIONS)}; {remedy_for_absent(name)}"
    remedy = did_you_mean(word, (*DESTINATIONS, *ALSO), known)
    raise UsageError(f"<--to>: there is no destination {name!r}", help=remedy)


def default_destination(model: Any) -> str:
    """Return the destination of a model if the user names none.

    Raises:
        UsageError: none is there for such a model.
    """
    can_generate = getattr(model, "can_generate", None)
    is_language_model = callable(can_generate) and can_generate()
    kind = _LANGUAGE_MODEL if is_language_model else NETWORK
    name = destination_for(kind)
    if not name:
        raise UsageError(
            f"no plug-in is there that writes a {kind} if <--to> is left out",
            help=f"give <--to> with one of {', '.join(DESTINATIONS)}",
        )
    return name


def destination_for(kind: str) -> str:
    """Return the destination of such models if the user names none; empty if there is none."""
    names = (name for name, row in DESTINATIONS.items() if row.stands_for == kind)
    return next(names, "")


def about_destinations() -> str:
    """Return what plug-ins say about their destinations, and which ones are the defaults."""
    sentences = [plugin.about_destinations for plugin in plugins()]
    text = "".join(f" {sentence}" for sentence in sentences if sentence)
    for_texts, for_others = destination_for(_LANGUAGE_MODEL), destination_for(NETWORK)
    if for_texts and for_others:
        text += f"  [default: {for_texts} for language models, else {for_others}]"
    return text


def choices_for(name: str, choices: Mapping[str, str]) -> dict[str, str]:
    """Return the values of options, by name, with those that a destination stands for.

    Raises:
        UsageError: another value is given for an option that the destination sets.
    """
    values = dict(choices)
    for option, value in DESTINATIONS[name].choices.items():
        chosen = values.get(option, CHOICES[option].default)
        if chosen not in (value, CHOICES[option].default):
            raise UsageError(
                f"<--to {name}> writes <--{option} {value}>, and <--{option} {chosen}> is "
                "given",
                help=f"leave out <--{option}>, or give <--to {DESTINATIONS[name].target}>",
            )
        values[option] = value
    return values


def preset_for(name: str, *, has_data: bool) -> str:
    """Return the preset to start from.

    Args:
        name: of the destination.
        has_data: whether there is calibration data.

    Raises:
        UsageError: the destination needs data, and there is none.
    """
    destination = DESTINATIONS[name]
    if has_data:
        return destination.preset
    if destination.without_data is not None:
        return destination.without_data
    # It imports torch
    from quantizer.sources.kinds import advice_without_data

    others = [
        f"<--to {other}>"
        for other, place in DESTINATIONS.items()
        if place.without_data is not None
    ]
    raise UsageError(
        f"<--to {name}> needs calibration data, and there is none",
        help="give <--data><shell:, or add calibration_data() to the model's file>"
        f"{advice_without_data()}; these need no data: {', '.join(others)}",
    )


def written_targets(
    words: Iterable[str], choices: Mapping[str, str], model: Any
) -> tuple[list[str], dict[str, str]]:
    """Return the targets of destinations, and the options that have not their defaults.

    Args:
        words: names of destinations.
        choices: the options that were given, by name.
        model: the model.

    Raises:
        UsageError: two of them set an option differently, or another value is given.
    """
    targets: dict[str, None] = {}
    values = dict(choices)
    for word in words:
        name, _ = destination_named(word)
        values = choices_for(name, values)
        targets[DESTINATIONS[name].target_of(model)] = None
    for name in choices:
        if values[name] == CHOICES[name].default:
            del values[name]
    return list(targets), values


def checked_names(words: Iterable[str], model: Any) -> list[str]:
    """Return what is checked before a calibration whose results go to destinations."""
    names: dict[str, None] = {}
    for word in words:
        name, _ = destination_named(word)
        checked = name if name in CHECKED_TARGETS else DESTINATIONS[name].target_of(model)
        names[checked] = None
    return list(names)


def possible_targets(words: Iterable[str]) -> list[str]:
    """Return all targets that destinations may have; which one depends on the model."""
    targets: dict[str, None] = {}
    for word in words:
        row = DESTINATIONS[destination_named(word)[0]]
        for target in filter(None, (row.target, row.transformers_target)):
            targets[target] = None
    return list(targets)


@contextmanager
def in_words_of_run(target: str, destination: str) -> Iterator[None]:
    """Name a destination instead of its target in errors of the code inside.

    Args:
        target: of the run.
        destination: what its user calls it.
    """
    choices = DESTINATIONS[destination].choices.items()
    written = [Option("deploy", (target,))]
    written += [Option(name, (value,)) for name, value in choices]

    def words(options: tuple[Option, ...]) -> str:
        """Return the option of a run for options of its target."""
        if options == tuple(written):
            return marked(Option("to", (destination,)))
        deploy, *others = options
        if deploy.name != "deploy":
            return marked(*options)
        names = [destination if name == target else name for name in deploy.values]
        return marked(Option("to", tuple(names), deploy.joint), *others)

    with _in_words(words):
        yield


_IN_TEST_MODE = "<shell:test mode's ><python:`Result.export` with >"


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
