"""Commands and their options: `--help` in groups, below options without one, and those about a
model as one value.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantizer.cli.completion import layers_of_results
from quantizer.cli.places import Place
from quantizer.cli.values import memory_size, rows_shown
from quantizer.config.dpu_accuracy import LEVELS
from quantizer.errors import UsageError
from quantizer.export import EXPORTERS
from quantizer.export.choices import CHOICES
from quantizer.storage.atomic_write import replace_file

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

QUANT_MODES = ("float", "calib", "test")
FINETUNE_MODES = ("adaround", "adaquant")
RAISING = ("fast_finetune", "dpu_accuracy")
"""Options of calibration that test mode takes as well, to say that the results were made with
them.
"""
GROUPS = ("", "Model", "Data", "Algorithm", "Output", "Debugging")
NAMES_WIDTH = 20  # longer names have a line of their own, with the description below
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda word: word.replace("-", "_"),
}
"""For every command: `-h`, and options spelled with hyphens or underscores alike."""


class GroupedOption(click.Option):
    """An option under a heading of the help."""

    def __init__(self, *names: Any, group: str = "", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """The default, but not that N is at least 1."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class GroupedCommand(click.Command):
    """A command whose help has a section for each group of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", "")].append(record)
        for group, rows in filter(operator.itemgetter(1), groups.items()):
            with formatter.section(group or "Options"):
                # The width of a column is that of its longest name, so one name as wide as
                # allowed aligns all sections.
                (name, text), *rest = rows
                formatter.write_dl(
                    [(name.ljust(NAMES_WIDTH), text), *rest], col_max=NAMES_WIDTH
                )


command = functools.partial(click.command, cls=GroupedCommand, context_settings=SETTINGS)
"""A decorator that makes a command."""


def write_text(path: str, text: str, *, encoding: str = "utf-8") -> None:
    """Write `text` where `--output` says, whole or not at all; newlines are written as they
    are.

    Raises:
        UsageError: the place cannot be written.
    """
    try:
        replace_file(Path(path), text.encode(encoding))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def word_of(name: str) -> str:
    """How a field's option is spelled: `for` is no name in Python.

    >>> word_of("for_"), word_of("gate")
    ('for', 'gate')
    """
    return name.rstrip("_")


def option(
    help: str,  # noqa: A002
    *others: str,
    default: Any = None,
    group: str = "",
    **settings: Any,
) -> Any:
    """A field that is an option of its name, under the heading `group`; `others` are more
    spellings.

    A field that is False by default is a flag, one that is () may be repeated; any other
    default is shown.
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


_FILE = Place()
output_option = functools.partial(click.option, "--output", "-o", type=_FILE, metavar="FILE")
_file = functools.partial(option, type=_FILE, metavar="FILE")
_count = functools.partial(option, type=click.IntRange(1), metavar="N")


@dataclass(frozen=True)
class Options:
    """What a command is asked to do; options that it does not have keep their defaults."""

    quant_mode: str = option(
        "Run the float model, calibrate it, or test what was calibrated.",
        type=click.Choice(QUANT_MODES),
    )
    config_file: str | None = _file("The JSON config.", "--config", type=click.Path())
    model: str | None = _file(
        "file.py with model(), file.py:factory, package.module:factory, a Hugging Face folder "
        "or a .pt2.",
        group="Model",
        metavar="MODEL",
    )
    weights: str | None = _file(
        "Weights: .safetensors, or a .pth that holds only tensors.", group="Model"
    )
    trust: bool = option(
        "Load a .pt2 file, or run the Python of a Hugging Face folder.",
        default=False,
        group="Model",
    )
    device: str = option(
        "Where the model runs: cpu, cuda, cuda:1, or auto: cuda where there is one.",
        default="cpu",
        metavar="DEVICE",
        group="Model",
    )
    data: str | None = _file(
        "Calibration data: a factory, a folder, files, texts or random:NxCxHxW.  "
        "[default: calibration_data() in the model's file]",
        group="Data",
        metavar="DATA",
    )
    eval_data: str | None = _file(
        "Data for float and test mode, if not the calibration data.",
        group="Data",
        metavar="DATA",
    )
    evaluate: str | None = _file(
        "evaluate(model, data), if it is not in the model's file.",
        group="Data",
        metavar="FACTORY",
    )
    preprocess: str | None = _file(
        "How images are read: JSON text or a file.", group="Data", metavar="JSON"
    )
    max_unpacked: int | None = option(
        "What a smaller file of data or weights may unpack to, such as 8GB.  [default: 1GB]",
        type=memory_size,
        metavar="SIZE",
        group="Data",
    )
    subset_len: int | None = _count("Use only the first N samples.", group="Data")
    batch_size: int | None = _count(
        "Samples per batch.  [default: 32; for texts 1]", group="Data"
    )
    tokenizer: str | None = _file(
        "For texts: a tokenizer.json or its folder, if MODEL has none.",
        group="Data",
        metavar="PATH",
    )
    seq_len: int | None = _count(
        "For texts: tokens per sample.  [default: as calibrated, or 512]",
        group="Data",
        type=click.IntRange(2),
    )
    stride: int | None = _count(
        "For texts: tokens between the starts of samples.  [default: --seq_len]", group="Data"
    )
    fast_finetune: str | None = option(
        "Calibration also learns how to round the weights (adaround, if none is named), and "
        "their scales (adaquant).",
        is_flag=False,
        flag_value=FINETUNE_MODES[0],
        type=click.Choice(FINETUNE_MODES),
        group="Algorithm",
    )
    dpu_accuracy: str | None = option(
        "On the DPU, high equalizes layers, corrects biases and finetunes, in about four "
        "times the time.",
        type=click.Choice(LEVELS),
        group="Algorithm",
    )
    memory: int | None = option(
        "Activations that calibration keeps in memory, such as 8GB; more go to files.  "
        "[default: half of what is free]",
        type=memory_size,
        metavar="SIZE",
        group="Algorithm",
    )
    seed: int = _count(
        "Seed of all randomness.", default=0, type=click.IntRange(0), group="Algorithm"
    )
    resume: bool = option(
        "Continue a stopped calibration from its checkpoint.", default=False, group="Algorithm"
    )
    output_dir: str = _file(
        "The result folder.", default="quantize_result", group="Output", metavar="DIR"
    )
    report_dir: str | None = _file(
        "Test mode writes its report, log and exports here, and leaves the result folder as "
        "it is.",
        group="Output",
        metavar="DIR",
    )
    overwrite: bool = option(
        "Replace results of another model in it.", default=False, group="Output"
    )
    deploy: tuple[str, ...] = option(
        "Test mode also writes the network for another runtime, to DIR/export; may be "
        "repeated.",
        default=(),
        type=click.Choice(list(EXPORTERS)),
        group="Output",
    )
    pt2_activations: str = option(
        "Integers of activations in a .pt2: uint8 for torch's compiler, int8 for ExecuTorch.",
        default=CHOICES["pt2_activations"].values[0],
        type=click.Choice(CHOICES["pt2_activations"].values),
        group="Output",
    )
    onnx_profile: str = option(
        "An .onnx rounds as the config says, or as ONNX Runtime's fastest kernels do.",
        default=CHOICES["onnx_profile"].values[0],
        type=click.Choice(CHOICES["onnx_profile"].values),
        group="Output",
    )
    onnx_weights: str = option(
        "8-bit weights in an .onnx: uint8 for any CPU, int8 for those with VNNI, faster.",
        default=CHOICES["onnx_weights"].values[0],
        type=click.Choice(CHOICES["onnx_weights"].values),
        group="Output",
    )
    gguf_template: str | None = _file(
        "A .gguf of the same model: --deploy gguf keeps its keys and tokenizer.", group="Output"
    )
    for_: tuple[str, ...] = option(
        "Refuse what --deploy TARGET cannot hold before anything is calibrated; may be "
        "repeated.",
        default=(),
        type=click.Choice(list(EXPORTERS)),
        group="Output",
    )
    gate: tuple[str, ...] = option(
        "Exit with 1 unless TEST holds, e.g. 'sqnr_db>=20'.",
        default=(),
        metavar="TEST",
        group="Output",
    )
    names: str | None = option(
        "Name layers in tables by module path or exactly.  [default: path on a terminal, else "
        "exact]",
        type=click.Choice(["path", "exact"]),
        group="Output",
    )
    top: int | str | None = option(
        "Rows of a table of layers.  [default: 15 on a terminal, else all]",
        type=rows_shown,
        metavar="N|all",
        group="Output",
    )
    filter: str | None = option(
        "Show only these layers: a pattern, a module path or a name.",
        metavar="GLOB",
        group="Output",
        shell_complete=layers_of_results,
    )
    output: str | None = _file("Write the result to FILE.", "-o", group="Output")
    json: bool = option("Print the result as JSON.", default=False, group="Output")
    quiet: bool = option("No progress and no notes.", "-q", default=False, group="Output")
    inspect: bool = option(
        "Print the table of layers before the run.", default=False, group="Debugging"
    )
    rank_timeout: int = _count(
        "Under torchrun: a rank without a sign of life for N seconds is lost.",
        default=60,
        group="Debugging",
    )
    exact: bool = option(
        "Test mode also runs the DPU's integers and compares every code.",
        default=False,
        group="Debugging",
    )
    debug: bool = option(
        "Print the traceback of an internal error.", default=False, group="Debugging"
    )

    @property
    def target_choices(self) -> dict[str, str]:
        """What targets of --deploy leave open."""
        return {
            name: getattr(self, name) or choice.values[0] for name, choice in CHOICES.items()
        }

    @property
    def file(self) -> str | None:
        """The file of `--output`; None where that is standard output."""
        return self.output if self.output != "-" else None


RUN = tuple(each.name for each in fields(Options) if each.name not in ("filter", "output"))
"""The options of a run."""
MODEL = (
    "model",
    "weights",
    "trust",
    "data",
    "batch_size",
    "tokenizer",
    "seq_len",
    "max_unpacked",
)
LOOK = ("config_file", *MODEL, "output", "json")
"""Those of a command that looks at a model, which `MODEL` say; `TABLE` are those of a table of
layers.
"""
TABLE = ("names", "top")


def takes(
    *names: str, kind: type[Options] = Options, **helps: str
) -> Callable[[Callable[..., Any]], Any]:
    """A decorator that adds options, in this order; the command gets them as one argument,
    `options`.

    `helps` are texts that replace those of single options.
    """
    by_name: dict[str, Field[Any]] = {each.name: each for each in fields(kind)}

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def collected(*args: Any, **given: Any) -> Any:
            options = kind(**{name: given.pop(word_of(name)) for name in names})
            return command(*args, options=options, **given)

        for name in reversed(names):
            said = by_name[name].metadata
            settings = {**said["settings"], "help": helps.get(name, said["settings"]["help"])}
            collected = click.option(
                f"--{word_of(name)}", *said["names"], cls=GroupedOption, **settings
            )(collected)
        return collected

    return add
