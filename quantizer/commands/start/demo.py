"""`quantizer demo`: writes a small trained example, and says what to try. Imports no torch."""

from pathlib import Path

import click

from quantizer.cli.arguments.grouped_command import command
from quantizer.cli.arguments.places import PathType
from quantizer.config.resources import resource
from quantizer.errors import UsageError
from quantizer.export.destinations import DESTINATIONS
from quantizer.storage.replacing import replace_file

_MODEL = "digits.py"
_FILES = (_MODEL, "resnet.py", "digits.safetensors", "digits_data.safetensors")
"""The example: the model's file, the module it imports, its weights and its data."""


@command()
@click.argument("folder", type=PathType(), default="quantizer_demo")
def demo(folder: str) -> None:
    """Write a small trained network with its data to FOLDER (by default quantizer_demo), and
    print commands to try on it.

    \b
    quantizer demo
    """
    place = Path(folder)
    missing: dict[Path, bytes] = {}
    for name in _FILES:
        content = resource("examples", name).read_bytes()
        path = place / name
        if not path.exists():
            missing[path] = content
        elif not path.is_file() or path.read_bytes() != content:
            # A demo that was stopped has left complete files only
            raise UsageError(
                f"{path} already exists", help="give another folder: `quantizer demo FOLDER`"
            )
    try:
        place.mkdir(parents=True, exist_ok=True)
        for path, content in missing.items():
            replace_file(path, content)
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror or error}") from None
    click.echo(
        f"wrote {place}: {_MODEL} is a network that reads 8x8 digits; its weights and its data "
        f"are next to it. Try:\n\n  cd {place}"
    )
    for name, destination in DESTINATIONS.items():
        if destination.stands_for == "network":
            click.echo(f"  quantizer run {_MODEL} --to {name}")
    for destination in DESTINATIONS.values():
        if destination.wider:
            click.echo(f"  quantizer run {_MODEL} --to {destination.wider} -o small")
