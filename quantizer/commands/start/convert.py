"""`quantizer convert`: converts a config to the other form. Imports no torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import click

from quantizer.cli.arguments.grouped_command import command
from quantizer.cli.arguments.options import output_option, overwrite_option
from quantizer.cli.arguments.places import PathType, write_output
from quantizer.cli.terminal.render import print_diagnostics
from quantizer.commands.start.findings import ConvertedDocument, inexpressible, one_per_reason
from quantizer.commands.start.to_hierarchical import to_hierarchical
from quantizer.commands.start.to_layered import to_layered
from quantizer.config.diagnostics import Diagnostics, Place, by_place
from quantizer.config.document.document import Document
from quantizer.config.forms.form import Form
from quantizer.config.load import check_document, load_config
from quantizer.config.model import ResolvedConfig
from quantizer.errors import UsageError

WRITERS: Mapping[Form, Callable[[ResolvedConfig], ConvertedDocument]] = {
    "layered": to_layered,
    "hierarchical": to_hierarchical,
}
"""The function that writes each form."""


def convert_config(config: ResolvedConfig, form: Form) -> ConvertedDocument:
    """Return the document of `form` that means the same, checked as any file of that form is.
    Errors among its findings are what it cannot express.
    """
    conversion = WRITERS[form](config)
    findings = [*conversion.findings]
    if all(finding.severity != "error" for finding in findings):
        findings += _refused(config, form, conversion)
    return replace(conversion, findings=by_place(one_per_reason(findings)))


def _refused(config: ResolvedConfig, form: Form, conversion: ConvertedDocument) -> Diagnostics:
    """Yield the errors of a file of the form with this document, at the places of the
    source.
    """
    document = Document.of(conversion.document, config.source)
    for error in check_document(document).diagnostics:
        if error.severity == "error":
            yield inexpressible(
                f"the {form} form would refuse it, {error.code}: {error.message}",
                _origin(config, conversion, error.place),
                error.help or "change it",
            )


def _origin(
    config: ResolvedConfig, conversion: ConvertedDocument, place: Place | None
) -> Place | None:
    """Return where in the source the value at a place of the document comes from; the first
    rule, if that is not known.
    """
    pointer = place.pointer if place else ""
    origins: list[Place | None] = []
    for part, origin in conversion.origins.items():
        if pointer == part or pointer.startswith(f"{part}/"):
            origins.append(origin)
    for rule in config.rules:
        origins.append(rule.selector.place or rule.roles_place)
    return next((origin for origin in origins if origin), None)


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
