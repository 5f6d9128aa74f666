"""`quantizer demo`: writes a small trained example, and says what to try. Imports no torch."""

import shutil
from pathlib import Path

import click

from quantizer.cli.options import command
from quantizer.cli.places import PathType
from quantizer.config.resources import resource
from quantizer.errors import UsageError

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
    present = [name for name in _FILES if (place / name).exists()]
    if present:
        raise UsageError(
            f"{place / present[0]} already exists",
            help="give another folder: `quantizer demo FOLDER`",
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(resource("examples", name), place / name)
    except OSError as error:
        raise UsageError(f"{place} cannot be written: {error.strerror or error}") from None
    click.echo(
        f"wrote {place}: {_MODEL} is a network that reads 8x8 digits; its weights and its data "
        "are next to it. Try:\n\n"
        f"  cd {place}\n"
        f"  quantizer run {_MODEL} --to onnx\n"
        f"  quantizer run {_MODEL} --to w8 -o small"
    )
