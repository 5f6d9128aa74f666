"""`quantizer diff`: what two configs, or two result folders, have that differs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from quantizer.cli.options import LOOK, TABLE, Options, command, option, takes
from quantizer.cli.places import Place
from quantizer.cli.render import say
from quantizer.cli.typed import refuse_typed
from quantizer.config.forms.compared import compared
from quantizer.config.load import load_config
from quantizer.config.wording import quoted
from quantizer.errors import GateError, UsageError
from quantizer.printable import json_text

_OF_MODELS = tuple(name for name in LOOK if name not in ("config_file", "output", "json"))
"""The options about a model."""


@dataclass(frozen=True)
class DiffOptions(Options):
    """Those of commands about a model, and its own."""

    fail_on: str | None = option(
        "Exit with 1 if a figure of the second is worse by a thousandth or more: of the "
        "outputs and each part, metrics of which it is known whether less or more is better, "
        "the size of the weights.",
        type=click.Choice(["worse"]),
    )


@command()
@click.argument("first", type=Place())
@click.argument("second", type=Place())
@takes("fail_on", *TABLE, *_OF_MODELS, "json", kind=DiffOptions)
def diff(first: str, second: str, options: DiffOptions) -> None:
    """Show what differs between two configs or two result folders, layer by layer: specs,
    scales, SQNR.

    Two configs are compared value by value; with --model, by what they do to each layer of it.

    \b
    quantizer diff net.json other.json
    quantizer diff net.json other.json --model my_model.py
    quantizer diff quantize_result other_result --fail-on worse
    """
    are_folders = [Path(place).is_dir() for place in (first, second)]
    if are_folders[0] or options.model is None:
        tables = () if are_folders[0] else TABLE
        refuse_typed(
            (*_OF_MODELS, *tables),
            "with --model two configs are compared by what they do to its layers",
        )
    if are_folders[0] != are_folders[1]:
        raise UsageError(
            "one is a folder and the other is not",
            help="give two config files or two result folders",
        )
    if not are_folders[0] and options.model is None:
        if options.fail_on:
            raise UsageError(
                "two configs alone do not tell which is worse",
                help="give --model, or two result folders",
            )
        _show_values(first, second, options)
        return
    from quantizer.cli.diff_layers import of_configs, of_folders  # which need torch
    from quantizer.sources.directions import how_to_declare

    found = (of_folders if are_folders[0] else of_configs)(first, second, options)
    if options.fail_on and found.unknown:
        names = ", ".join(map(quoted, found.unknown))
        text = f"note: not judged, as it is not known whether less or more is better: {names}"
        say(f"{text}; {how_to_declare(found.unknown[0])}, and test both again", err=True)
    if options.fail_on and found.worse:
        raise GateError(
            f"worse: {', '.join(found.worse)}",
            help="the table above shows which layers lose most",
        )


def _show_values(first: str, second: str, options: DiffOptions) -> None:
    try:
        found = compared(load_config(first).require(), load_config(second).require())
    except ValueError as error:
        raise UsageError(
            str(error), help="give --model to compare what they do to its layers"
        ) from None
    if options.json:
        click.echo(json_text({"values": found}))
        return
    for key, (before, after) in found.items():
        say(f"{key}: {_word(before)} → {_word(after)}")
    click.echo(f"{len(found)} values differ")


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
