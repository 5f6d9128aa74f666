"""The commands `quantizer retune` and `merge`: their options. What they do is imported when it
is done, so that `--help` needs no torch.
"""

from dataclasses import dataclass

import click

from quantizer.cli.arguments.grouped_command import command
from quantizer.cli.arguments.options import TABLE, Options, option, takes
from quantizer.cli.arguments.places import PathType, layers_of_results
from quantizer.cli.terminal import process
from quantizer.config.forms.form import block_of
from quantizer.errors import UsageError
from quantizer.tables import RANGE_METHODS

_FOLDER = "quantizer.commands.recalibration"


@dataclass(frozen=True)
class RetuneOptions(Options):
    """The options of `quantizer retune`."""

    output_dir: str = option(
        "The result folder to write.  [default: DIR]",
        default="",
        show_default=False,
        metavar="DIR",
    )
    method: str | None = option(
        "The method that finds ranges.", type=click.Choice(list(RANGE_METHODS))
    )
    percentage: float | None = option(
        "The percentage of the percentile method.",
        type=click.FloatRange(0, 100, min_open=True),
        metavar="P",
    )
    statistic: str | None = option(
        "How the ranges of several batches are combined.",
        type=click.Choice(
            block_of("layered", "parameters")["properties"]["calib_statistic_method"]["enum"]
        ),
    )
    layer: tuple[str, ...] = option(
        "Change only this layer's activations: a name, a module path or a pattern. May be "
        "repeated.",
        default=(),
        metavar="NAME",
        shell_complete=layers_of_results,
    )
    dry_run: bool = option("Show what would change, without writing results.", default=False)


@command()
@click.argument("folder", default="quantize_result", type=PathType(), metavar="[DIR]")
@takes(
    "method",
    "percentage",
    "statistic",
    "layer",
    "dry_run",
    "output_dir",
    "overwrite",
    "output",
    "json",
    *TABLE,
    kind=RetuneOptions,
    output="Write the config with the change to FILE.",
)
def retune(folder: str, options: RetuneOptions) -> None:
    """Recompute scales of activations from the statistics of a calibration, in seconds, without
    model and data.

    The result is bit-identical to a calibration with the changed config. If a statistic that it
    needs was not stored, the error says which.

    \b
    quantizer retune --method maxmin
    quantizer retune --percentage 99 --layer 'layer1.*' -o net.json
    """
    process.load(f"{_FOLDER}.retune:retune_folder")(folder, options)


@dataclass(frozen=True)
class MergeOptions(Options):
    """The options of `quantizer merge`."""

    output: str = option(
        "The result folder to write.",
        "-o",
        default="quantize_result",
        type=PathType(),
        metavar="DIR",
        group="Output",
    )


@command()
@click.argument("folders", nargs=-1, required=True, type=PathType(), metavar="DIR DIR...")
@takes(
    "model",
    "weights",
    "trust",
    "output",
    "overwrite",
    "json",
    model="The model that was calibrated: file.py, file.py:factory or a Hugging Face folder.",
    kind=MergeOptions,
)
def merge(folders: tuple[str, ...], options: MergeOptions) -> None:
    """Merge result folders that were calibrated on different data, with the same model and
    config.

    The result is that of a single run over all batches, in the order of the folders. Give the
    model too: a result folder never makes code run.

    \b
    quantizer merge monday tuesday --model my_model.py -o both
    """
    if len(folders) < 2:
        raise UsageError(
            "there is only one folder to merge", help="give two or more result folders"
        )
    process.load(f"{_FOLDER}.merge:merge_folders")(folders, options)
