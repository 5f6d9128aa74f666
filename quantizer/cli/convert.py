"""`quantizer convert`: a config file in the other form, if that form can say it. Imports no
torch.
"""

import json

import click

from quantizer.cli.options import command, output_option, write_output
from quantizer.cli.places import Place
from quantizer.cli.render import print_diagnostics
from quantizer.config.conversion.convert import WRITERS, converted
from quantizer.config.diagnostics import by_place
from quantizer.config.forms.form import Form
from quantizer.config.load import load_config
from quantizer.errors import UsageError


@command()
@click.argument("file", type=Place())
@click.option(
    "--to",
    type=click.Choice(list(WRITERS)),
    help="The form to write.  [default: the other one]",
)
@output_option(default="-", help="Write to FILE, not to the screen.")
def convert(file: str, to: Form | None, output: str) -> int:
    """Write a config in the other form. If that form cannot express it, print why and write
    nothing.

    Exit code 0: written; 1: the other form cannot express it; 2: the file is not valid.

    \b
    quantizer convert net.json
    quantizer convert net.json --to hierarchical -o other.json
    """
    result = load_config(file)
    config = result.require()
    wanted: Form = to or ("hierarchical" if config.form == "layered" else "layered")
    if wanted == config.form:
        raise UsageError(
            f"{file} is of the {wanted} form already",
            help="leave --to out to write the other form",
        )
    other = converted(config, wanted)
    told = [found for found in result.diagnostics if found.severity != "note"]
    print_diagnostics(by_place([*told, *other.findings]), result.sources)
    if any(found.severity == "error" for found in other.findings):
        return 1
    text = json.dumps(other.document, indent=2, ensure_ascii=False) + "\n"
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_output(output, text)
    return 0
