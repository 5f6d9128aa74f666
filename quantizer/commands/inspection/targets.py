"""`quantizer targets`: what `run --to` can make. Imports no torch."""

from importlib.util import find_spec
from typing import Any

import click

from quantizer.cli.arguments.grouped_command import command
from quantizer.cli.arguments.options import Options, takes
from quantizer.cli.arguments.places import as_typed
from quantizer.config.wording import joined, listed
from quantizer.declarations import Destination
from quantizer.export.destinations import DESTINATIONS
from quantizer.export.targets import EXPORTERS
from quantizer.printable import json_text


@command("targets")
@takes("json", kind=Options)
def targets(options: Options) -> None:
    """List what `quantizer run --to NAME` can make, with all names. For each it says where the
    file is checked, which preset the run starts from, and what is missing here.

    \b
    quantizer targets
    quantizer targets --json
    """
    rows = {name: _facts(row) for name, row in DESTINATIONS.items()}
    if options.json:
        click.echo(as_typed(json_text(rows)))
        return
    formatter = click.HelpFormatter()
    for name, row in rows.items():
        names = ", ".join([name, *row["also"]])
        formatter.write_text(names)
        formatter.indent()
        for line in _lines(row):
            formatter.write_text(line)
        formatter.dedent()
    click.echo(formatter.getvalue().rstrip())


def _facts(destination: Destination) -> dict[str, Any]:
    """Return what a destination makes, needs and is read by."""
    names = dict.fromkeys([destination.target, destination.transformers_target])
    targets = [EXPORTERS[name] for name in names if name is not None]
    needed: dict[str, None] = {}
    for target in targets:
        needed.update(dict.fromkeys(target.needs))
    return {
        "also": list(destination.also),
        "makes": destination.made,
        "checked_in": [target.reader for target in targets],
        "preset": destination.preset,
        "preset_without_data": destination.without_data,
        "for_transformers": all(target.for_transformers for target in targets),
        "needs": list(needed),
        "missing": [package for package in needed if find_spec(package) is None],
    }


def _lines(row: dict[str, Any]) -> list[str]:
    """Return the sentences about a destination."""
    start = f"starts from the preset {row['preset']}"
    without_data = row["preset_without_data"]
    if without_data is None:
        start += ", with calibration data"
    elif without_data != row["preset"]:
        start += f", or {without_data} without data"
    readers = joined(row["checked_in"], "or")
    lines = [f"{row['makes']}, checked in {readers}", start]
    if row["for_transformers"]:
        lines.append("for models of transformers")
    if row["missing"]:
        lines.append(f"needs {listed(row['missing'])}, which this Python does not have")
    return lines
