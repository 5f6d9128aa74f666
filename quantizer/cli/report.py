"""`quantizer report`: the page about a result folder, made again from what lies there."""

from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.options import Options, command, takes
from quantizer.engine import results
from quantizer.engine.result_files import locked
from quantizer.report.files import PAGE, write_report


@command()
@click.argument("folder", default="quantize_result", type=click.Path(), metavar="[DIR]")
@takes("json")
def report(folder: str, options: Options) -> None:
    """Write report.html and report.json into a result folder again; calibration and test mode write them as well.

    The page is one file that loads nothing: what each layer loses, how its values are distributed, whether there was
    enough data. No model and no data are needed.

    \b
    quantizer report
    quantizer report quantize_result --json
    """
    place = Path(folder)
    results.read_info(place)  # it is complete, and nobody has changed it
    with locked(place):
        found = write_report(place)
    click.echo(session.as_json(found) if options.json else place / PAGE)
