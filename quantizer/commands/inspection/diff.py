"""`quantizer diff`: shows the differences of two configs, or of two result folders."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantizer.cli.arguments.grouped_command import command, refuse_typed
from quantizer.cli.arguments.options import LOOK, TABLE, Options, option, takes
from quantizer.cli.arguments.places import PathType
from quantizer.cli.terminal.render import say, say_note
from quantizer.config.load import load_config
from quantizer.config.run_config import compare_configs
from quantizer.config.wording import quoted
from quantizer.errors import GateError, UsageError
from quantizer.printable import json_text

_OF_MODELS = tuple(
    name for name in LOOK if name not in ("config_file", "output", "overwrite", "json")
)
"""The options about a model."""


@dataclass(frozen=True)
class DiffOptions(Options):
    """The options of `quantizer diff`."""

    html: str | None = option(
        "Also write the difference as a page to FILE.", type=PathType(), metavar="FILE"
    )
    fail_on: str | None = option(
        "Exit with code 1 if a figure of the second is worse by more than 0.1 % (SQNR of "
        "outputs and parts, metrics), or its weights by more than 1 %.",
        type=click.Choice(["worse"]),
    )


@command()
@click.argument("first", type=PathType())
@click.argument("second", type=PathType())
@takes("html", "fail_on", *TABLE, *_OF_MODELS, "overwrite", "json", kind=DiffOptions)
def diff(first: str, second: str, options: DiffOptions) -> None:
    """Show what differs between two configs or two result folders, layer by layer: specs,
    scales, SQNR.

    Two configs are compared value by value, or with --model layer by layer.

    \b
    quantizer diff net.json other.json
    quantizer diff net.json other.json --model my_model.py
    quantizer diff quantize_result other_result --fail-on worse
    """
    are_folders = Path(first).is_dir()
    why = "with --model two configs are compared by what they do to its layers"
    if are_folders:
        refuse_typed(_OF_MODELS, why)
    elif options.model is None:
        refuse_typed((*_OF_MODELS, *TABLE, "html", "overwrite"), why)
    for place in (first, second):
        if not Path(place).exists():
            raise UsageError(
                f"there is no file or folder {place}",
                help="give two config files or two result folders",
            )
    if are_folders != Path(second).is_dir():
        raise UsageError(
            "one is a folder and the other is not",
            help="give two config files or two result folders",
        )
    if not are_folders and options.model is None:
        if options.fail_on:
            raise UsageError(
                "--fail-on cannot judge two configs alone",
                help="give --model, or two result folders",
            )
        _show_values(first, second, options)
        return
    # These import torch.
    from quantizer.commands.inspection.difference import of_configs, of_folders
    from quantizer.sources.directions import how_to_declare

    is_judged = options.fail_on is not None
    if are_folders:
        difference = of_folders(first, second, options, html=options.html, is_judged=is_judged)
    else:
        difference = of_configs(first, second, options, html=options.html)
    if not is_judged:
        return
    if difference.unknown:
        names = ", ".join(map(quoted, difference.unknown))
        say_note(
            "note: not judged, because it is not known whether less or more is better: "
            f"{names}; {how_to_declare(difference.unknown[0])}, and test both again"
        )
    if difference.worse:
        raise GateError(
            f"worse: {', '.join(difference.worse)}",
            help="the table of layers shows which lose most",
        )


def _show_values(first: str, second: str, options: DiffOptions) -> None:
    try:
        before = load_config(first).require()
        values = compare_configs(before, load_config(second).require())
    except ValueError as error:
        raise UsageError(
            str(error), help="give --model to compare what they do to its layers"
        ) from None
    if options.json:
        click.echo(json_text({"values": values}))
        return
    for key, (old, new) in values.items():
        say(f"{key}: {_word(old)} → {_word(new)}")
    if len(values) == 1:
        click.echo("1 value differs")
    else:
        click.echo(f"{len(values)} values differ")


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
