"""`quantizer report`: the page about a result folder, made again from what lies there."""

from dataclasses import dataclass
from pathlib import Path

import click

from quantizer.cli.options import Options, command, option, takes
from quantizer.cli.places import Place
from quantizer.cli.typed import refuse_typed
from quantizer.printable import json_text, one_line
from quantizer.report.files import PAGE, write_report
from quantizer.report.plots import KINDS, write_events, write_plots
from quantizer.results.folder import read_info
from quantizer.results.result_set import locked_as_opened


@dataclass(frozen=True)
class ReportOptions(Options):
    """Those of all commands, and its own."""

    plots: str | None = option(
        "Write each drawing there as a file, too.", type=Place(), metavar="DIR"
    )
    plots_as: str = option(
        "What files they are; png needs the extra plots.",
        default="svg",
        type=click.Choice(list(KINDS)),
    )
    tensorboard: str | None = option(
        "Write figures and histograms for TensorBoard there, too.", type=Place(), metavar="DIR"
    )


@command()
@click.argument("folder", default="quantize_result", type=Place(), metavar="[DIR]")
@takes("json", "plots", "plots_as", "tensorboard", kind=ReportOptions)
def report(folder: str, options: ReportOptions) -> None:
    """Write report.html and report.json into a result folder again; calibration and test mode
    write them as well.

    The page is one file that loads nothing: what each layer loses, how its values are
    distributed, whether there was enough data. No model and no data are needed.

    \b
    quantizer report
    quantizer report quantize_result --plots drawings
    """
    if not options.plots:
        refuse_typed(["plots_as"], "it says what files --plots DIR writes")
    place = Path(folder)
    opened = read_info(place)
    with locked_as_opened(opened.files):
        found = write_report(opened)
    if options.plots:
        write_plots(found, Path(options.plots), options.plots_as)
    if options.tensorboard:
        write_events(found, Path(options.tensorboard))
    click.echo(json_text(found) if options.json else one_line(str(place / PAGE)))
