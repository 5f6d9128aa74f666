"""`quantizer convert`: converts a config to the other form. Imports no torch."""

import json

import click

from quantizer.cli.arguments.options import command, output_option, overwrite_option
from quantizer.cli.arguments.places import PathType, write_output
from quantizer.cli.terminal.render import print_diagnostics
from quantizer.commands.convert.convert import WRITERS, convert_config
from quantizer.config.diagnostics import by_place
from quantizer.config.forms.form import Form
from quantizer.config.load import load_config
from quantizer.errors import UsageError


@command()
@click.argument("file", type=PathType())
@click.option(
    "--to",
    type=click.Choice(list(WRITERS)),
    help="The form to write.  [default: the other one]",
)
@output_option(default="-", help="Write to FILE.  [default: standard output]")
@overwrite_option()
def convert(file: str, to: Form | None, output: str, overwrite: bool) -> int:
    """Convert a config to the other form. If that form cannot express the config, print why and
    write nothing.

    Exit codes: 0 written, 1 the other form cannot express it, 2 the file is not valid.

    \b
    quantizer convert net.json
    quantizer convert net.json --to hierarchical -o other.json
    """
    result = load_config(file)
    config = result.require()
    other_form: Form = "hierarchical" if config.form == "layered" else "layered"
    wanted = to or other_form
    if wanted == config.form:
        raise UsageError(
            f"{file} already has the {wanted} form",
            help="leave out --to to write the other form",
        )
    other = convert_config(config, wanted)
    findings = [one for one in result.diagnostics if one.severity != "note"]
    findings += other.findings
    print_diagnostics(by_place(findings), result.sources)
    if any(finding.severity == "error" for finding in other.findings):
        return 1
    text = json.dumps(other.document, indent=2, ensure_ascii=False) + "\n"
    if output == "-":
        click.echo(text, nl=False)
    else:
        write_output(output, text)
    return 0
