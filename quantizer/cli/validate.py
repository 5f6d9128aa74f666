"""`quantizer validate`: checks config files and says all that is wrong with them. Imports no torch."""

from __future__ import annotations

import click

from quantizer.cli.options import SETTINGS
from quantizer.cli.render import RENDERERS
from quantizer.cli.write_text import write_text
from quantizer.config.completion import completed
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.load import LoadResult, load_config


@click.command(context_settings=SETTINGS)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option(
    "--format", type=click.Choice(list(RENDERERS)), default="text", show_default=True, help="How findings are printed."
)
@click.option("--fix", is_flag=True, help="Write missing keys into the files; nothing else in them changes.")
@click.option("--strict", is_flag=True, help="Count warnings as errors.")
def validate(files: tuple[str, ...], format: str, fix: bool, strict: bool) -> int:  # noqa: A002 - the option
    """Check config files; show all errors at once.

    Exit code 0: all are valid; 1: some are not; 2: some are not readable JSON.

    \b
    quantizer validate net.json
    quantizer validate --format sarif net.json > net.sarif
    """
    results = {name: _load(name, fix=fix) for name in dict.fromkeys(files)}
    diagnostics = [found for result in results.values() for found in result.diagnostics]
    sources = {name: text for result in results.values() for name, text in result.sources.items()}
    if diagnostics or format in ("json", "sarif"):
        click.echo(RENDERERS[format](diagnostics, sources))
    if format == "text":
        for name, result in results.items():
            click.echo(f"{name}: {_verdict(result.diagnostics)}")
    return max(_exit_code(result.diagnostics, strict) for result in results.values())


def _load(name: str, *, fix: bool) -> LoadResult:
    result = load_config(name)
    if not fix or result.document is None:
        return result
    source = result.document.source
    text = completed(result.document)
    if text == source.text:
        return result
    write_text(name, text, encoding=source.encoding)
    return load_config(name)


def _verdict(diagnostics: tuple[Diagnostic, ...]) -> str:
    counts = {kind: sum(found.severity == kind for found in diagnostics) for kind in ("error", "warning")}
    told = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count]
    return ", ".join(told if counts["error"] else ["valid", *told])


def _exit_code(diagnostics: tuple[Diagnostic, ...], strict: bool) -> int:
    if any(found.code.startswith("QZ0") for found in diagnostics):
        return 2
    return int(any(found.severity == "error" or strict for found in diagnostics))
