"""`quantizer help`: shows the help of a command. Imports no torch."""

import click

from quantizer.cli.options import QUANT_MODES, command
from quantizer.config.wording import closest_word, quoted
from quantizer.errors import UsageError


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
