"""Prints the versions of quantizer and of torch, without importing torch."""

from importlib.metadata import PackageNotFoundError, version

import click

from quantizer import __version__


def print_versions(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Print the versions for `--version`, and end the command."""
    if not value or ctx.resilient_parsing:
        return
    click.echo(f"quantizer, version {__version__}")
    click.echo(torch_version())
    ctx.exit()


def torch_version() -> str:
    """Return the installed version of torch in words."""
    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return "torch not installed"
