"""The part of `quantizer diff` about layers: two result folders, or what two configs do to a
model.
"""

from collections.abc import Mapping
from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.options import Options
from quantizer.cli.render import say
from quantizer.cli.table_view import view_of
from quantizer.cli.traced_model import traced_model
from quantizer.errors import UsageError
from quantizer.graph.module_names import path_names
from quantizer.printable import json_text
from quantizer.report.difference import (
    Difference,
    Side,
    difference,
    difference_table,
    figure_lines,
    of_folder,
    of_plan,
)


def of_folders(first: str, second: str, options: Options) -> Difference:
    """What two calibrations of one model have that differs, shown.

    Raises:
        ResultError: one is incomplete, or was changed.
        UsageError: they are of different models.
    """
    return _shown(of_folder(Path(first)), of_folder(Path(second)), options)


def of_configs(first: str, second: str, options: Options) -> Difference:
    """What two configs do to a model that differs, shown.

    Raises:
        ConfigError: one is not valid, or does not fit the model.
    """
    reads = [session.read_config(place) for place in (first, second)]
    with session.notes_on_stderr(True):
        original = traced_model(options).graph
    plans = [session.make_plan(read, original, quiet=True) for read in reads]
    paths = {name: path for plan in plans for name, path in path_names(plan.graph).items()}
    before, after = (of_plan(plan, paths) for plan in plans)
    return _shown(before, after, options)


def _shown(first: Side, second: Side, options: Options) -> Difference:
    if first.model != second.model:
        said = f"the first is of {first.model}, the second of {second.model}"
        raise UsageError(said, help="give results of one model")
    found = difference(first, second)
    if options.json:
        click.echo(json_text(found.to_json()))
        return found
    paths: Mapping[str, str] = {**second.paths, **first.paths}
    if found.rows:
        session.console().print(difference_table(found, view_of(options, paths)))
    for line in figure_lines(found):
        say(line)
    click.echo(f"{len(found.rows)} tensors differ" if found.rows else "no tensor differs")
    return found
