"""The options of the command line as frozen values, and the click options that fill them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import click

from quantizer.export import EXPORTERS

Command = TypeVar("Command", bound=Callable[..., Any])

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


_MODEL = click.option(
    "--model", metavar="MODEL", help="file.py, file.py:factory, package.module:factory or a Hugging Face folder."
)
_WEIGHTS = click.option("--weights", metavar="FILE", help="Weights: .safetensors, or .pth that holds tensors only.")
_DATA = click.option(
    "--data", metavar="DATA", help="Calibration data: a factory, a folder, files, texts or random:NxCxHxW."
)
_TOKENIZER = click.option(
    "--tokenizer", metavar="PATH", help="For texts: a tokenizer.json or a folder, if not the model's own."
)
_SEQ_LEN = click.option(
    "--seq_len",
    type=click.IntRange(2),
    metavar="N",
    help="For texts: tokens per sample.  [default: as calibrated, else 512]",
)
_BATCH_SIZE = click.option(
    "--batch_size", type=click.IntRange(1), metavar="N", help="Samples per batch.  [default: 32, of texts 1]"
)
_TRUST = click.option("--trust", is_flag=True, help="Load files that can execute code (.pt2).")
_CONFIG = click.option("--config_file", "--config", "config_file", metavar="FILE", help="The JSON config.")
_JSON = click.option("--json", "json", is_flag=True, help="Print the result as JSON.")

_RUN = (
    click.option(
        "--quant_mode",
        type=click.Choice(["float", "calib", "test"]),
        help="Run the float model, calibrate, or test the calibrated model.",
    ),
    click.option("--config_file", metavar="FILE", help="The JSON config; without it the built-in DPU default holds."),
    _MODEL,
    _WEIGHTS,
    _DATA,
    click.option("--eval_data", metavar="DATA", help="Data for test mode, if not the calibration data."),
    click.option("--evaluate", metavar="FACTORY", help="evaluate(model, data), if it is not in the model's file."),
    click.option("--preprocess", metavar="JSON", help="How an image folder is read: JSON text or a file."),
    click.option("--subset_len", type=click.IntRange(1), metavar="N", help="Use the first N samples."),
    _TOKENIZER,
    _SEQ_LEN,
    click.option(
        "--stride", type=click.IntRange(1), metavar="N", help="For texts: tokens between samples.  [default: --seq_len]"
    ),
    _BATCH_SIZE,
    click.option("--output_dir", default="quantize_result", show_default=True, help="The result folder."),
    click.option("--device", default="cpu", show_default=True, help="Where the model runs now: cpu or cuda."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all randomness."),
    click.option(
        "--fast_finetune",
        is_flag=False,
        flag_value=FINETUNE_MODES[0],
        type=click.Choice(FINETUNE_MODES),
        help="Calibration also learns how to round the weights (adaround), or their scales too (adaquant).",
    ),
    click.option("--resume", is_flag=True, help="Go on from the checkpoint in the result folder."),
    click.option("--inspect", is_flag=True, help="Print the table of layers before the run."),
    _TRUST,
    click.option("--gate", multiple=True, metavar="TEST", help="Exit 1 unless it holds, e.g. 'sqnr_db>=20'."),
    click.option(
        "--deploy",
        multiple=True,
        type=click.Choice(list(EXPORTERS)),
        help="Write the tested network for another runtime, to OUTPUT_DIR/export; may be repeated.",
    ),
    click.option("--exact", is_flag=True, help="Test mode for the DPU: also run its integers, compare code for code."),
    click.option("--overwrite", is_flag=True, help="Replace the results of another model in the result folder."),
    _JSON,
    click.option("--quiet", "-q", is_flag=True, help="No progress, no notes."),
    click.option("--debug", is_flag=True, help="Print the traceback of an internal error."),
)

_LOOK = (
    _MODEL,
    _WEIGHTS,
    _DATA,
    _TOKENIZER,
    _SEQ_LEN,
    _BATCH_SIZE,
    _TRUST,
    _CONFIG,
    click.option("--output", "-o", metavar="FILE", help="Write the result to FILE."),
    _JSON,
)


def run_options(command: Command) -> Command:
    """Add the options of a run to a command that takes them as keyword arguments."""
    for option in reversed(_RUN):
        command = option(command)
    return command


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that look at a model; the command gets them as one argument, `options: ModelOptions`."""
    names = [field.name for field in fields(ModelOptions)]

    @functools.wraps(command)
    def collected(*args: Any, **kwargs: Any) -> Any:
        options = ModelOptions(**{name: kwargs.pop(name) for name in names})
        return command(*args, options=options, **kwargs)

    for option in reversed(_LOOK):
        collected = option(collected)
    return collected
