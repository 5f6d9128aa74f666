"""`quantizer convert`: a config file in the other form, if that form can say it. Imports no torch."""

import json

import click

from quantizer.cli.options import command, output_option, write_text
from quantizer.cli.render import print_diagnostics
from quantizer.config.convert import to_hierarchical, to_layered
from quantizer.config.diagnostics import in_order
from quantizer.config.form import Form
from quantizer.config.load import load_config
from quantizer.errors import UsageError

_WRITERS = {"layered": to_layered, "hierarchical": to_hierarchical}


@command()
@click.argument("file", type=click.Path())
@click.option("--to", type=click.Choice(list(_WRITERS)), help="The form to write.  [default: the other one]")
@output_option(default="-", help="Write to FILE, not to the screen.")
def convert(file: str, to: Form | None, output: str) -> int:
    """Write a config in the other form. If that form cannot express it, print why and write nothing.

    Exit code 0: written; 1: the other form cannot express it; 2: the file is not valid.

    \b
    quantizer convert net.json
    quantizer convert net.json --to hierarchical -o other.json
    """
    result = load_config(file)
    config = result.require()
    wanted = to or ("hierarchical" if config.form == "layered" else "layered")
    if wanted == config.form:
        raise UsageError(f"{file} is of the {wanted} form already", help="leave --to out to write the other form")
    document, findings = _WRITERS[wanted](config)
    told = [found for found in result.diagnostics if found.severity != "note"]
    print_diagnostics(in_order([*told, *findings]), result.sources)
    if any(found.severity == "error" for found in findings):
        return 1
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_text(output, text)
    return 0
