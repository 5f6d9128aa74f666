"""Compares two result folders, or two configs on a model, for `quantizer diff`."""

from pathlib import Path

import click

from quantizer.cli import session
from quantizer.cli.arguments.options import Options
from quantizer.cli.terminal import output
from quantizer.cli.terminal.output import view_of
from quantizer.cli.terminal.render import say, say_note
from quantizer.cli.terminal.screen import notes_on_stderr
from quantizer.cli.traced_model import traced_model
from quantizer.commands.diff.difference import (
    Difference,
    Side,
    compare_sides,
    difference_table,
    figure_lines,
    side_of_folder,
    side_of_plan,
)
from quantizer.errors import UsageError
from quantizer.graph.names import path_names
from quantizer.printable import json_text


def of_folders(
    first: str, second: str, options: Options, *, is_judged: bool = False
) -> Difference:
    """Print and return the differences of two calibrations of one model.

    Args:
        first, second: the result folders.
        options: how the table looks.
        is_judged: whether a worse figure fails the command.

    Raises:
        ResultError: one is incomplete, or was changed.
        UsageError: they are of different models, or one is judged that was not tested.
    """
    before = side_of_folder(Path(first))
    after = side_of_folder(Path(second))
    if not (before.is_tested and after.is_tested):
        untested = second if before.is_tested else first
        _report_untested(untested, is_judged=is_judged)
        before = before.without_test()
        after = after.without_test()
    return _show(before, after, options)


def _report_untested(folder: str, *, is_judged: bool) -> None:
    """Say that only what calibration has written is compared.

    Raises:
        UsageError: the figures that test mode measures are judged.
    """
    fault = f"{folder} was not tested"
    if is_judged:
        raise UsageError(
            f"{fault}, so --fail-on cannot judge it",
            help=f"run `quantizer --quant_mode test --output_dir {folder} --model FILE` first",
        )
    say_note(f"note: {fault}, so no SQNR and no metric is compared")


def of_configs(first: str, second: str, options: Options) -> Difference:
    """Print and return the differences of what two configs do to a model.

    Raises:
        ConfigError: one is not valid, or does not fit the model.
    """
    reads = [session.read_config_file(place) for place in (first, second)]
    with notes_on_stderr(True):
        original = traced_model(options).graph
    plans = [session.resolved_plan(read, original, quiet=True) for read in reads]
    paths: dict[str, str] = {}
    for plan in plans:
        paths |= path_names(plan.graph)
    before, after = (side_of_plan(plan, paths) for plan in plans)
    return _show(before, after, options)


def _show(first: Side, second: Side, options: Options) -> Difference:
    """Print how the layers of two results differ, and return the difference."""
    if first.model != second.model:
        raise UsageError(
            f"the first is of {first.model}, the second of {second.model}",
            help="give results of one model",
        )
    result = compare_sides(first, second)
    if options.json:
        click.echo(json_text(result.to_json()))
        return result
    view = view_of(options, {**second.paths, **first.paths})
    if result.rows:
        output.console(exact=view.is_exact).print(difference_table(result, view))
    for line in figure_lines(result):
        say(line)
    count = len(result.rows)
    if count > 1:
        click.echo(f"{count} tensors differ")
    else:
        click.echo(f"{count or 'no'} tensor differs")
    return result
