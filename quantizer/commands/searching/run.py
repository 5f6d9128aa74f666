"""`quantizer run`: its options. What they ask for is imported once they are in order, so that
`--help` and slips do not wait for torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

from quantizer.cli.arguments.grouped_command import command
from quantizer.cli.arguments.options import TARGET_OPTIONS, Options, option, takes
from quantizer.cli.arguments.places import DestinationWord, PathType, minutes
from quantizer.cli.terminal import process
from quantizer.config.resources import presets
from quantizer.errors import ModelError, UsageError
from quantizer.export.destinations import DESTINATIONS, about_destinations, destination_named
from quantizer.sources.user_code import require_file

_STEPS = "quantizer.commands.searching.full_run:full_run"


def minutes_option(text: str) -> Any:
    """Return the field of `--minutes`, whose help is this text."""
    return option(text, default=10.0, type=minutes, metavar="N", group="Algorithm")


@dataclass(frozen=True)
class RunOptions(Options):
    """The options of `quantizer run`."""

    to: str | None = option(
        f"Where the network goes: {', '.join(DESTINATIONS)}; `quantizer targets` has more "
        f"names.{about_destinations()}",
        type=DestinationWord(),
        metavar="TARGET",
    )
    preset: str | None = option(
        "The preset to start from, instead of the one that --to stands for.",
        type=click.Choice(presets()),
        metavar="NAME",
    )
    config_file: str | None = option(
        "The config to use.  [default: quantize_config.json in the result folder, written if "
        "it is not there]",
        "--config",
        type=PathType(),
        metavar="FILE",
    )
    max_mb: float | None = option(
        "The most 10^6 bytes that the file may have. Where a file may mix widths, weights get "
        "4 or 8 bits each.",
        type=float,
        metavar="MB",
    )
    keep_float: tuple[str, ...] = option(
        "Keep a layer in float: a name, a pattern or a kind such as kind:head, as `exclude` of "
        "the config takes it. May be repeated.",
        default=(),
        metavar="LAYER",
    )
    minutes: float = minutes_option(
        "With --gate: if a gate does not hold, look for a better config for so many minutes; "
        "0 looks for none."
    )


@command()
@click.argument("model", type=PathType())
@takes(
    "to",
    "preset",
    "config_file",
    "max_mb",
    "keep_float",
    "weights",
    "trust",
    "dynamic",
    "device",
    "data",
    "eval_data",
    "evaluate",
    "preprocess",
    "max_unpacked",
    "subset_len",
    "skip_len",
    "batch_size",
    "tokenizer",
    "seq_len",
    "stride",
    "shuffle",
    "fast_finetune",
    "memory",
    "seed",
    "output_dir",
    "overwrite",
    TARGET_OPTIONS,
    "gate",
    "minutes",
    "json",
    "debug",
    kind=RunOptions,
    output_dir="The folder of config, results and files.",
)
def run(model: str, options: RunOptions) -> None:
    """Quantize MODEL in one call: write a config for it, calibrate, test, export, check the
    gates, and say what came out.

    MODEL is what --model takes. The config is in the result folder; check it in, and
    `--quant_mode calib` and `--quant_mode test` repeat the run.

    \b
    quantizer run my_model.py
    quantizer run my_model.py --to onnx --gate 'sqnr_db>=20'
    quantizer run my_model.py --to w8 -o small
    quantizer run my_model.py --keep_float kind:head
    """
    if process.is_rank():
        raise UsageError(
            "`quantizer run` works in one process",
            help="use --quant_mode calib and --quant_mode test under torchrun",
        )
    if options.preset and options.config_file:
        raise UsageError(
            "--preset and --config_file exclude each other", help="give one of them"
        )
    require_file(model, ModelError)
    if options.to:
        options = _by_its_name(options, options.to)
    full_run: Callable[[Options], None] = process.load(_STEPS)
    full_run(replace(options, model=model))


def _by_its_name(options: RunOptions, word: str) -> RunOptions:
    """Return the options with the destination of a word, and with the preset of that word.

    Raises:
        UsageError: another preset is given.
    """
    name, preset = destination_named(word)
    if not preset or options.config_file:
        return replace(options, to=name)
    if options.preset not in (None, preset):
        raise UsageError(
            f"--to {word} stands for --preset {preset}, and --preset {options.preset} is given",
            help=f"leave out --preset, or give --to {name}",
        )
    return replace(options, to=name, preset=preset)
