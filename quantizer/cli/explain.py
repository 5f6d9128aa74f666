"""`quantizer explain`: explains a code, a config key, or the settings of one layer."""

import importlib
import re

import click

from quantizer.cli.arguments.grouped_command import refuse_typed
from quantizer.cli.arguments.options import LOOK, QUANT_MODES, Options, command, takes
from quantizer.cli.arguments.places import layers_of_results
from quantizer.config.pages import (
    code_page,
    contents,
    key_names,
    key_page,
    setting_names,
    setting_page,
)
from quantizer.config.rules.spec_rules import all_codes
from quantizer.config.wording import closest_word, listed, quoted
from quantizer.errors import UsageError

_LINK = re.compile(r"\[([^][]+)\]\([^()]+\)")
"""A link in Markdown, of which a terminal shows only the text."""


def _completed(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return completions for a shell: layers with --model, otherwise codes and keys."""
    if ctx.params.get("model"):
        return layers_of_results(ctx, parameter, incomplete)
    return [word for word in _words() if word.startswith(incomplete)]


def _words() -> list[str]:
    return [*key_names(), *setting_names(), *all_codes()]


@command()
@click.argument("name", metavar="[CODE|KEY|LAYER]", required=False, shell_complete=_completed)
@takes(*(name for name in LOOK if name not in ("output", "overwrite")))
def explain(name: str | None, options: Options) -> int | None:
    """Explain a code such as QZ301, a config key such as round_mode, or with --model the
    settings of one layer.

    Without a name, list all codes and keys.

    \b
    quantizer explain
    quantizer explain QZ301
    quantizer explain round_mode
    quantizer explain --config_file net.json --model my_model.py layer1.conv1
    """
    if name is None:
        click.echo(contents(), nl=False)
        return None
    if options.model is not None:
        layers = importlib.import_module("quantizer.cli.explain_layer")
        code: int | None = layers.explain_layer(name, options)
        return code
    refuse_typed(LOOK, "it needs --model, which shows the settings of a layer")
    words = {word.lower(): word for word in setting_names()}
    if name.upper() in all_codes():
        page = code_page(name.upper())
    elif name.lower() in key_names():
        page = key_page(name.lower())
    elif name.lower() in words:
        page = setting_page(words[name.lower()])
    else:
        raise UsageError(f"there is no code or config key {quoted(name)}", help=_help_for(name))
    click.echo(_LINK.sub(r"\1", page), nl=False)
    return None


def _help_for(name: str) -> str:
    near = closest_word(name, _words())
    codes = [code for code in all_codes() if code.startswith(name.upper())]
    if codes and len(name) > 2:
        near = listed(codes)
    overview = "`quantizer explain` lists all codes and keys, and --model M explains a layer"
    return f"did you mean {near}? {overview}" if near else overview


@command()
@click.argument("name", metavar="[COMMAND]", required=False)
@click.pass_context
def help_command(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or of all of them.

    \b
    quantizer help
    quantizer help plan
    """
    root = ctx.find_root()
    if name is None or name in QUANT_MODES:
        click.echo(root.get_help())
        return
    group = root.command
    assert isinstance(group, click.Group)
    shown = group.get_command(root, name)
    if shown is None:
        near = closest_word(name, group.list_commands(root))
        remedy = "`quantizer help` lists all commands, `quantizer explain` all config keys"
        if near is not None:
            remedy = f"did you mean `quantizer help {near}`? {remedy}"
        raise UsageError(f"there is no command {quoted(name)}", help=remedy)
    with click.Context(shown, info_name=name, parent=root) as context:
        click.echo(shown.get_help(context))
