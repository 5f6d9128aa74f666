"""Defines the options of all commands, as the fields of one dataclass, and their `--help`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

import click

from quantizer.cli.arguments.grouped_command import GroupedOption
from quantizer.cli.arguments.grouped_command import command as command
from quantizer.cli.arguments.places import (
    DestinationWord,
    OutputFile,
    PathType,
    PluginWord,
    WrittenPath,
    layers_of_results,
    memory_size,
    rows_shown,
    unmoved,
)
from quantizer.cli.terminal.screen import screen
from quantizer.config.algorithms import MAX_SEED
from quantizer.config.run_options import FINETUNE_MODES, LEVELS, SIZE_CHOICES
from quantizer.config.wording import joined
from quantizer.declarations import DataKind, Plugin
from quantizer.export.targets import CHECKED_TARGETS, CHOICES, EXPORTERS
from quantizer.plugins import if_command, plugins

QUANT_MODES = ("float", "calib", "test")
TARGET_OPTIONS = "target_options"
"""The field of `Options` that stands for the options of all targets."""
RAISING = ("fast_finetune", "dpu_accuracy")
"""Options of calibration that test mode accepts too: they must match the results."""


LISTED = if_command("targets", ", as `quantizer targets` lists it")
"""The end of a sentence about a destination."""


def word_of(name: str) -> str:
    """Return the name of a field's option. The field of `--to` is `to_`.

    >>> word_of("to_"), word_of("gate")
    ('to', 'gate')
    """
    return name.rstrip("_")


def option(
    help: str,  # noqa: A002
    *others: str,
    default: Any = None,
    group: str = "",
    **settings: Any,
) -> Any:
    """Return a field that is also an option.

    A field that is False by default is a flag, one that is () may be repeated. The help shows
    any other default.

    Args:
        help: its text.
        others: further spellings of the option, which the help shows if they are short.
        default: of the field.
        group: the section of the help.
        settings: of `click.option`.
    """
    if default is False:
        settings["is_flag"] = True
    elif default == ():
        settings["multiple"] = True
    elif default is not None:
        settings = {"default": default, "show_default": True} | settings
    return field(
        default=default,
        metadata={"names": others, "settings": {**settings, "help": help, "group": group}},
    )


def _of_plugins(name: str, **settings: Any) -> Any:
    """Return the field of an option that only plug-ins read, which `--help` leaves out without
    them.
    """
    readers: list[DataKind | Plugin] = [*_KINDS, *plugins()]
    helps = [reader.options[name] for reader in readers if name in reader.options]
    return option("".join(helps[:1]), hidden=not helps, **settings)


_KINDS = [kind for plugin in plugins() for kind in plugin.data]
_FOLDERS = [kind.form for plugin in plugins() for kind in plugin.models]
_FILES = [kind.name for kind in _KINDS if not kind.word and not kind.form]
_WORDS = [kind.word for kind in _KINDS if kind.word]
_DATA_FORMS = ("a factory", "a folder", "files", *_FILES, "random:NxCxHxW", *_WORDS)
_PYTHON = ("file.py with model()", "file.py:factory", "package.module:factory")
_WITH_CODE = ("a .pt2 file", *_FOLDERS)
_SIZES = [f"; for {kind.name} {kind.batch_size}" for kind in _KINDS if kind.batch_size]
_FILE = PathType()
_OUTPUT = OutputFile()
output_option = functools.partial(click.option, "--output", "-o", type=_OUTPUT, metavar="FILE")
overwrite_option = functools.partial(
    click.option, "--overwrite", is_flag=True, help="Replace the file if it exists."
)
_file = functools.partial(option, type=_FILE, metavar="FILE")
_count = functools.partial(option, type=click.IntRange(1), metavar="N")
_KNOWN_TARGETS = PluginWord(list(EXPORTERS))
_targets = functools.partial(
    option, default=(), type=_KNOWN_TARGETS, metavar="TARGET", hidden=True
)


def _option_of_target(name: str) -> Callable[..., Any]:
    """Return the decorator with an option that a target declares."""
    declared = CHOICES[name]
    settings: dict[str, Any] = {"help": declared.help, "group": "Output"}
    settings["target"] = declared.target
    if declared.is_file:
        settings |= {"type": _FILE, "metavar": "FILE"}
    elif declared.is_text:
        settings["metavar"] = declared.metavar
    else:
        values = click.Choice(declared.values)
        settings |= {"default": declared.default, "show_default": True, "type": values}
    return click.option(f"--{name}", cls=GroupedOption, **settings)


@dataclass(frozen=True)
class Options:
    """The options of one call. Options that a command does not have keep their defaults.
    All commands have `quiet`, see `_screen_options`.

    `target_options` has the options that targets declare, by name, as far as they have other
    values than their defaults. `deploy` and `for_` are the targets of `to_`, which are known
    once the model is open; their own options are older words for it.
    """

    quant_mode: str = option(
        "Run the float model, calibrate it, or test the calibrated network.",
        type=click.Choice(QUANT_MODES),
    )
    config_file: str | None = _file("The JSON config.", "--config", type=WrittenPath())
    model: str | None = _file(
        f"The model: {joined([*_PYTHON, *_FOLDERS, 'a .pt2 file'], 'or')}.",
        group="Model",
        metavar="MODEL",
    )
    weights: str | None = _file(
        "Weights of the model: a .safetensors file, or a .pth file with only tensors.",
        group="Model",
    )
    trust: bool = option(
        f"Allow code of the model to run: {', or Python of '.join(_WITH_CODE)}.",
        default=False,
        group="Model",
    )
    dynamic: str | None = option(
        "Leave sizes of images or sounds open: height and width (the default), one of them, or "
        "the length.",
        is_flag=False,
        flag_value=SIZE_CHOICES[0],
        type=click.Choice(SIZE_CHOICES),
        group="Model",
    )
    device: str = option(
        "Where the model runs: cpu, cuda, cuda:1, or auto (cuda if available, else cpu).",
        default="cpu",
        metavar="DEVICE",
        group="Model",
    )
    data: str | None = _file(
        f"Calibration data: {joined(dict.fromkeys(_DATA_FORMS), 'or')}.  "
        "[default: calibration_data() in the model's file]",
        group="Data",
        metavar="DATA",
    )
    eval_data: str | None = _file(
        "Data for float and test mode.  [default: evaluation_data() in the model's file, or "
        "the calibration data]",
        group="Data",
        metavar="DATA",
    )
    evaluate: str | None = _file(
        "A function evaluate(model, data) that returns metrics.  [default: evaluate() in the "
        "model's file, if any]",
        group="Data",
        metavar="FACTORY",
    )
    preprocess: str | None = _of_plugins("preprocess", group="Data", type=_FILE, metavar="JSON")
    max_unpacked: int | None = option(
        "Largest size to which a compressed file of data or weights may unpack, such as 8GB.  "
        "[default: 1GB]",
        type=memory_size,
        metavar="SIZE",
        group="Data",
    )
    subset_len: int | None = _count("Use (or make) only N samples of the data.", group="Data")
    skip_len: int | None = _count("Test without the first N samples of the data.", group="Data")
    batch_size: int | None = _count(
        f"Samples per batch.  [default: 32{''.join(_SIZES)}]", group="Data"
    )
    tokenizer: str | None = _of_plugins("tokenizer", group="Data", type=_FILE, metavar="PATH")
    seq_len: int | None = _of_plugins(
        "seq_len", group="Data", type=click.IntRange(2), metavar="N"
    )
    stride: int | None = _of_plugins(
        "stride", group="Data", type=click.IntRange(1), metavar="N"
    )
    shuffle: bool = _of_plugins("shuffle", default=False, group="Data")
    fast_finetune: str | None = _of_plugins(
        "fast_finetune",
        is_flag=False,
        flag_value=FINETUNE_MODES[0],
        type=click.Choice(FINETUNE_MODES),
        group="Algorithm",
    )
    dpu_accuracy: str | None = option(
        "For the DPU: high also equalizes layers, corrects biases and finetunes. It takes "
        "about four times as long.",
        type=click.Choice(LEVELS),
        group="Algorithm",
    )
    memory: int | None = option(
        "Memory for activations during calibration, such as 8GB. The rest is written to "
        "files.  [default: half of the free memory]",
        type=memory_size,
        metavar="SIZE",
        group="Algorithm",
    )
    seed: int = _count(
        "Random seed.", default=0, type=click.IntRange(0, MAX_SEED), group="Algorithm"
    )
    resume: bool = option(
        "Continue an interrupted calibration from its checkpoint.",
        default=False,
        group="Algorithm",
    )
    output_dir: str = _file(
        "The result folder.", "-o", default="quantize_result", group="Output", metavar="DIR"
    )
    report_dir: str | None = _file(
        "Where test mode writes its report, log and exports.  [default: the result folder]",
        group="Output",
        metavar="DIR",
    )
    overwrite: bool = option(
        "Replace results of another model, results that were changed by hand, and files that "
        "exist already.",
        default=False,
        group="Output",
    )
    to_: tuple[str, ...] = option(
        "Where the network goes: calibration checks that it can, and test mode writes it.",
        default=(),
        type=DestinationWord(),
        metavar="NAME",
    )
    deploy: tuple[str, ...] = _targets("The target that test mode writes; use --to.")
    target_options: Mapping[str, str | None] = field(default_factory=dict)
    for_: tuple[str, ...] = _targets(
        "The target that calibration checks; use --to.", type=PluginWord(list(CHECKED_TARGETS))
    )
    gate: tuple[str, ...] = option(
        "Exit with code 1 unless TEST holds, e.g. 'sqnr_db>=20'. May be repeated.",
        default=(),
        metavar="TEST",
        group="Output",
    )
    names: str | None = option(
        "Names of layers in tables: module paths, or exact names.  [default: path]",
        type=click.Choice(["path", "exact"]),
        group="Output",
    )
    top: int | str | None = option(
        "Number of layers in a table.  [default: 15]",
        type=rows_shown,
        metavar="N|all",
        group="Output",
    )
    filter: str | None = option(
        "Show only some layers: a pattern, a module path or a name.",
        metavar="GLOB",
        group="Output",
        shell_complete=layers_of_results,
    )
    output: str | None = _file("Write the result to FILE.", "-o", group="Output", type=_OUTPUT)
    json: bool = option("Print the result as JSON.", default=False, group="Output")
    inspect: bool = option(
        "Print the table of layers before the run.", default=False, group="Debugging"
    )
    rank_timeout: int = _count(
        "Under torchrun: stop if a rank does not respond for N seconds.",
        default=60,
        group="Debugging",
    )
    exact: bool = option(
        "In test mode, also run the integer arithmetic of the DPU, and compare each code.",
        default=False,
        group="Debugging",
    )
    debug: bool = option(
        "Print the traceback of an internal error.", default=False, group="Debugging"
    )
    quiet: bool = False

    @property
    def target_choices(self) -> dict[str, str]:
        """Return the settings of all targets."""
        settings: dict[str, str] = {}
        for name, choice in CHOICES.items():
            value = self.value_of(name) or choice.default
            if choice.is_file and value:
                value = str(unmoved(value))
            settings[name] = value
        return settings

    def value_of(self, name: str) -> Any:
        """Return the value of an option of `each_option`."""
        if name in CHOICES:
            return self.target_options.get(name, _default_of_target(name))
        return getattr(self, name)

    @property
    def file(self) -> str | None:
        """Return the file of `--output`; None if it is standard output."""
        return self.output if self.output != "-" else None


RUN = tuple(
    entry.name for entry in fields(Options) if entry.name not in ("filter", "output", "quiet")
)
"""The options of a run, except those of all commands."""


def each_option(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the default of each option of some fields of `Options`."""
    by_name = {entry.name: entry for entry in fields(Options)}
    for name in names:
        if name != TARGET_OPTIONS:
            yield name, by_name[name].default
            continue
        for target_option in CHOICES:
            yield target_option, _default_of_target(target_option)


def _default_of_target(name: str) -> str | None:
    return CHOICES[name].default or None


MODEL = (
    "model",
    "weights",
    "trust",
    "dynamic",
    "data",
    "preprocess",
    "batch_size",
    "tokenizer",
    "seq_len",
    "max_unpacked",
)
LOOK = ("config_file", *MODEL, "shuffle", "output", "overwrite", "json")
"""The options of a command that examines a model."""
TABLE = ("names", "top")
"""The options of a table of layers."""


def takes(
    *names: str, kind: type[Options] = Options, **helps: str
) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that adds options to a command, which gets them as the argument
    `options`.

    Args:
        names: the options, in the order of the help.
        kind: the class of `options`.
        helps: texts that replace the help of single options.
    """
    by_name: dict[str, Field[Any]] = {entry.name: entry for entry in fields(kind)}
    decorators: list[Callable[..., Any]] = []
    for name in names:
        if name == TARGET_OPTIONS:
            decorators += map(_option_of_target, CHOICES)
            continue
        metadata = by_name[name].metadata
        settings = {**metadata["settings"]}
        if name in helps:
            settings["help"] = helps[name]
        spellings = (f"--{word_of(name)}", *metadata["names"])
        decorators.append(click.option(*spellings, cls=GroupedOption, **settings))

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        """Add the options to a command, which gets them as one object."""

        @functools.wraps(command)
        def with_options(*args: Any, **values: Any) -> Any:
            settings: dict[str, Any] = {}
            for name in names:
                if name == TARGET_OPTIONS:
                    settings[name] = _given_of_targets(values)
                else:
                    settings[name] = values.pop(word_of(name))
            return command(*args, options=kind(**settings, quiet=screen().quiet), **values)

        changed: Callable[..., Any] = with_options
        for decorate in reversed(decorators):
            changed = decorate(changed)
        return changed

    return add


def _given_of_targets(values: dict[str, Any]) -> dict[str, Any]:
    """Take the options of targets out of the values of all options. Return those that have not
    their defaults.
    """
    of_targets: dict[str, Any] = {}
    for name in CHOICES:
        value = values.pop(name)
        if value != _default_of_target(name):
            of_targets[name] = value
    return of_targets
