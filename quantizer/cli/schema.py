"""`quantizer schema`: the JSON Schemas, for editors and other tools. Imports no torch."""

import click

from quantizer.cli.options import command
from quantizer.config.resources import resource

NAMES = ("layered", "hierarchical", "quantization_spec")


@command()
@click.argument("name", type=click.Choice(NAMES), default="layered")
@click.option(
    "--print/--path", "as_text", default=True, help="Print the schema, or the path of its file."
)
def schema(name: str, as_text: bool) -> None:
    """Print a JSON Schema, for editors: of a file form, `layered` or `hierarchical`, or of one
    tensor's `quantization_spec`.

    \b
    quantizer schema --path
    """
    path = resource("schemas", f"{name}.schema.json")
    click.echo(path.read_text("utf-8") if as_text else str(path), nl=not as_text)
