"""The options of the command line as frozen values, and the click options that fill them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from quantizer.cli.help import option
from quantizer.export import EXPORTERS

Command = TypeVar("Command", bound=Callable[..., Any])

QUANT_MODES = ("float", "calib", "test")
FINETUNE_MODES = ("adaround", "adaquant")
SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": lambda word: word.replace("-", "_")}
"""For every command: `-h`, and options spelled with hyphens or underscores alike."""


@dataclass(frozen=True)
class RunOptions:
    """What `quantizer --quant_mode …` is asked to do. `--json` is `json`; `model` is None if it was not given."""

    quant_mode: str
    config_file: str | None = None
    model: str | None = None
    weights: str | None = None
    data: str | None = None
    eval_data: str | None = None
    evaluate: str | None = None
    preprocess: str | None = None
    subset_len: int | None = None
    tokenizer: str | None = None
    seq_len: int | None = None
    stride: int | None = None
    batch_size: int | None = None
    output_dir: str = "quantize_result"
    device: str = "cpu"
    seed: int = 0
    fast_finetune: str | None = None
    resume: bool = False
    inspect: bool = False
    trust: bool = False
    gate: tuple[str, ...] = ()
    deploy: tuple[str, ...] = ()
    exact: bool = False
    overwrite: bool = False
    names: str | None = None
    top: int | str | None = None
    json: bool = False
    quiet: bool = False
    debug: bool = False


@dataclass(frozen=True)
class ModelOptions:
    """What a command that looks at a model needs. `output` is a file; None or "-" is standard output."""

    model: str | None = None
    weights: str | None = None
    data: str | None = None
    tokenizer: str | None = None
    seq_len: int | None = None
    batch_size: int | None = None
    trust: bool = False
    config_file: str | None = None
    output: str | None = None
    json: bool = False
    names: str | None = None
    top: int | str | None = None
    filter: str | None = None


def rows_shown(text: str) -> int | str:
    """The value of `--top`: a whole number, or "all".

    Raises:
        BadParameter: it is neither.
    """
    if text != "all" and not (text.isdecimal() and int(text)):
        raise click.BadParameter(f"{text!r} is neither a number of rows nor 'all'.")
    return text if text == "all" else int(text)


_FILE = click.Path(readable=False)  # shells complete it; nothing is checked before it is used
_model, _data, _algorithm, _output, _debugging = (
    functools.partial(option, group) for group in ("Model", "Data", "Algorithm", "Output", "Debugging")
)

_config = functools.partial(click.option, "--config_file", "--config", type=_FILE, metavar="FILE")
_MODEL = (
    _model(
        "--model",
        type=_FILE,
        metavar="MODEL",
        help="file.py with model(), file.py:factory, package.module:factory, a Hugging Face folder or a .pt2.",
    ),
    _model("--weights", type=_FILE, metavar="FILE", help="Weights: .safetensors, or a .pth that holds only tensors."),
    _model("--trust", is_flag=True, help="Load a .pt2 file, which can run code."),
)
_DATA = _data(
    "--data",
    type=_FILE,
    metavar="DATA",
    help="Calibration data: a factory, a folder, files, texts or random:NxCxHxW.  "
    "[default: calibration_data() in the model's file]",
)
SUBSET_LEN = _data("--subset_len", type=click.IntRange(1), metavar="N", help="Use only the first N samples.")
SEED = _algorithm(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of all randomness."
)
DEVICE = _model(
    "--device", default="cpu", show_default=True, metavar="DEVICE", help="Where the model runs: cpu or cuda."
)
_TEXTS = (
    _data(
        "--tokenizer", type=_FILE, metavar="PATH", help="For texts: a tokenizer.json or its folder, if MODEL has none."
    ),
    _data(
        "--seq_len",
        type=click.IntRange(2),
        metavar="N",
        help="For texts: tokens per sample.  [default: as calibrated, or 512]",
    ),
)
_BATCH_SIZE = _data(
    "--batch_size", type=click.IntRange(1), metavar="N", help="Samples per batch.  [default: 32; for texts 1]"
)
_NAMES = _output(
    "--names",
    type=click.Choice(["path", "exact"]),
    help="Name layers in tables by module path or exactly.  [default: path on a terminal, else exact]",
)
_TOP = _output(
    "--top", type=rows_shown, metavar="N|all", help="Rows of a table of layers.  [default: 15 on a terminal, else all]"
)
_FILTER = _output("--filter", metavar="GLOB", help="Show only these layers: a pattern, a module path or a name.")
_JSON = _output("--json", is_flag=True, help="Print the result as JSON.")

_RUN = (
    click.option(
        "--quant_mode",
        type=click.Choice(QUANT_MODES),
        help="Run the float model, calibrate it, or test what was calibrated.",
    ),
    _config(help="The JSON config.  [default: built in, for the DPU]"),
    *_MODEL,
    DEVICE,
    _DATA,
    _data("--eval_data", type=_FILE, metavar="DATA", help="Data for float and test mode, if not the calibration data."),
    _data("--evaluate", type=_FILE, metavar="FACTORY", help="evaluate(model, data), if it is not in the model's file."),
    _data("--preprocess", type=_FILE, metavar="JSON", help="How images are read: JSON text or a file."),
    SUBSET_LEN,
    _BATCH_SIZE,
    *_TEXTS,
    _data(
        "--stride",
        type=click.IntRange(1),
        metavar="N",
        help="For texts: tokens between the starts of samples.  [default: --seq_len]",
    ),
    _algorithm(
        "--fast_finetune",
        is_flag=False,
        flag_value=FINETUNE_MODES[0],
        type=click.Choice(FINETUNE_MODES),
        help="Calibration also learns how to round the weights (adaround, if none is named), and their scales "
        "(adaquant).",
    ),
    SEED,
    _algorithm("--resume", is_flag=True, help="Continue a stopped calibration from its checkpoint."),
    _output(
        "--output_dir",
        type=_FILE,
        default="quantize_result",
        show_default=True,
        metavar="DIR",
        help="The result folder.",
    ),
    _output("--overwrite", is_flag=True, help="Replace results of another model in it."),
    _output(
        "--deploy",
        multiple=True,
        type=click.Choice(list(EXPORTERS)),
        help="Test mode also writes the network for another runtime, to DIR/export; may be repeated.",
    ),
    _output("--gate", multiple=True, metavar="TEST", help="Exit with 1 unless TEST holds, e.g. 'sqnr_db>=20'."),
    _NAMES,
    _TOP,
    _JSON,
    _output("--quiet", "-q", is_flag=True, help="No progress and no notes."),
    _debugging("--inspect", is_flag=True, help="Print the table of layers before the run."),
    _debugging("--exact", is_flag=True, help="Test mode also runs the DPU's integers and compares every code."),
    _debugging("--debug", is_flag=True, help="Print the traceback of an internal error."),
)

_LOOK = (
    _config(help="The JSON config."),
    *_MODEL,
    _DATA,
    _BATCH_SIZE,
    *_TEXTS,
    _output("--output", "-o", type=_FILE, metavar="FILE", help="Write the result to FILE."),
    _JSON,
)


def run_options(command: Command) -> Command:
    """Add the options of a run to a command that takes them as keyword arguments."""
    for add in reversed(_RUN):
        command = add(command)
    return command


def table_options(command: Command) -> Command:
    """Add the options of a table of layers, above `model_options`."""
    for add in (_TOP, _NAMES):
        command = add(command)
    return command


def filter_option(command: Command) -> Command:
    """Add `--filter`, above `model_options`."""
    return _FILTER(command)  # type: ignore[no-any-return]


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that look at a model; the command gets them as one argument, `options: ModelOptions`."""
    names = [field.name for field in fields(ModelOptions)]

    @functools.wraps(command)
    def collected(*args: Any, **kwargs: Any) -> Any:
        options = ModelOptions(**{name: kwargs.pop(name) for name in names if name in kwargs})
        return command(*args, options=options, **kwargs)

    for add in reversed(_LOOK):
        collected = add(collected)
    return collected
