"""`quantizer schema`: prints the JSON Schemas, for editors, without importing torch."""

import click

from quantizer.cli.options import command
from quantizer.config.resources import resource

_SCHEMA_NAMES = ("layered", "hierarchical", "quantization_spec")


@command()
@click.argument("name", type=click.Choice(_SCHEMA_NAMES), default="layered")
@click.option(
    "--print/--path", "as_text", default=True, help="Print the schema, or the path of its file."
)
def schema(name: str, as_text: bool) -> None:
    """Print a JSON Schema, for editors: that of a config in the form `layered` or
    `hierarchical`, or that of one tensor's `quantization_spec`.

    \b
    quantizer schema --path
    """
    path = resource("schemas", f"{name}.schema.json")
    if as_text:
        click.echo(path.read_text("utf-8"), nl=False)
    else:
        click.echo(str(path))
