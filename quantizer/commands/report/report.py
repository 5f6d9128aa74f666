"""`quantizer report`: writes report.html of a result folder again. `--help` needs no torch."""

from dataclasses import dataclass

import click

from quantizer.cli.arguments.grouped_command import command, refuse_typed
from quantizer.cli.arguments.options import Options, option, takes
from quantizer.cli.arguments.places import PathType, from_start
from quantizer.printable import json_text, one_line

PLOT_TYPES = ("svg", "png")
"""The types of drawings that `--plots` writes."""


@dataclass(frozen=True)
class ReportOptions(Options):
    """The options of `quantizer report`."""

    plots: str | None = option(
        "Also write each drawing as a file to DIR.", type=PathType(), metavar="DIR"
    )
    plots_as: str = option(
        "Type of the files of --plots; png needs the extra plots.",
        default="svg",
        type=click.Choice(PLOT_TYPES),
    )
    tensorboard: str | None = option(
        "Also write figures and histograms for TensorBoard to DIR.",
        type=PathType(),
        metavar="DIR",
    )


@command("report")
@click.argument("folder", default="quantize_result", type=PathType(), metavar="[DIR]")
@takes("json", "plots", "plots_as", "tensorboard", "overwrite", kind=ReportOptions)
def report_command(folder: str, options: ReportOptions) -> None:
    """Write report.html and report.json of a result folder again, without model and data.
    Calibration and test mode write them too.

    The page is a single file. It shows the loss of each layer, the distribution of its values,
    and whether there was enough data.

    \b
    quantizer report
    quantizer report quantize_result --plots drawings
    """
    if not options.plots:
        refuse_typed(["plots_as"], "it is the type of the files of --plots DIR")
    # They import torch
    from quantizer.report.content import REPORT_PAGE, write_report
    from quantizer.report.page.plots import write_events, write_plots
    from quantizer.results.folder import read_info
    from quantizer.results.result_set import locked_as_opened

    place = from_start(folder)
    opened = read_info(place)
    with locked_as_opened(opened.files):
        content = write_report(opened)
    if options.plots:
        write_plots(content, from_start(options.plots), options.plots_as)
    if options.tensorboard:
        write_events(content, from_start(options.tensorboard))
    if options.json:
        click.echo(json_text(content))
    else:
        click.echo(one_line(str(place / REPORT_PAGE)))
