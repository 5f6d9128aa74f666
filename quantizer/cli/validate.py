"""`quantizer validate`: checks config files and says all that is wrong with them. Imports no
torch.
"""

from difflib import unified_diff

import click

from quantizer.cli.options import command, write_output
from quantizer.cli.render import RENDERERS, say
from quantizer.config.diagnostics import ConfigError, Diagnostic
from quantizer.config.document.read import read_text
from quantizer.config.load import fixed, load_config
from quantizer.errors import UsageError


@command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option(
    "--format",
    type=click.Choice(list(RENDERERS)),
    default="text",
    show_default=True,
    help="How findings are printed.",
)
@click.option(
    "--fix",
    is_flag=True,
    help="Write into the files what has one known answer; the rest stays as it is.",
)
@click.option("--diff", is_flag=True, help="Show what --fix would write, and write nothing.")
@click.option("--strict", is_flag=True, help="Count warnings as errors.")
def validate(files: tuple[str, ...], format: str, fix: bool, diff: bool, strict: bool) -> int:  # noqa: A002 - the option
    """Check config files and list all their errors.

    Exit code 0: all are valid; 1: some are not; 2: some are not readable JSON.

    \b
    quantizer validate net.json
    quantizer validate --fix --diff net.json
    quantizer validate --format sarif net.json > net.sarif
    """
    if diff and format != "text":
        raise UsageError(f"--diff is not written as {format}", help="leave --format out")
    names = tuple(dict.fromkeys(files))
    if diff:
        click.echo("".join(map(_difference, names)), nl=False)
    counts = {name: _fix(name) if fix and not diff else 0 for name in names}
    results = {name: load_config(name) for name in names}
    diagnostics = [found for result in results.values() for found in result.diagnostics]
    sources = {
        name: text for result in results.values() for name, text in result.sources.items()
    }
    if diagnostics or format in ("json", "sarif"):
        click.echo(RENDERERS[format](diagnostics, sources))
    if format == "text":
        for name, result in results.items():
            say(f"{name}: {_verdict(result.diagnostics, counts[name])}")
    return max(_exit_code(result.diagnostics, strict) for result in results.values())


def _fix(name: str) -> int:
    """Write every known fix into the file; how many there were."""
    try:
        text, count = fixed(read_text(name))
    except ConfigError:  # it cannot be read, which the check says
        return 0
    if count:
        write_output(name, text.text, encoding=text.encoding)
    return count


def _difference(name: str) -> str:
    """What the fixes would change, as a unified diff."""
    try:
        source = read_text(name)
    except ConfigError:
        return ""
    before, after = (text.split("\n") for text in (source.text, fixed(source)[0].text))
    return "".join(f"{line}\n" for line in unified_diff(before, after, name, name, lineterm=""))


def _verdict(diagnostics: tuple[Diagnostic, ...], fixes: int) -> str:
    """In a few words: what was fixed, whether the file is valid, what is left, and how much of
    it --fix would fix.
    """
    counts = {
        kind: sum(found.severity == kind for found in diagnostics)
        for kind in ("error", "warning")
    }
    found = [f"{count} {kind}{'s' * (count > 1)}" for kind, count in counts.items() if count]
    words = [f"{fixes} fixed"] if fixes else []
    words += found if counts["error"] else ["valid", *found]
    fixable = sum(bool(finding.fixes) for finding in diagnostics)
    return ", ".join([*words, *([f"{fixable} fixable with --fix"] if fixable else [])])


def _exit_code(diagnostics: tuple[Diagnostic, ...], strict: bool) -> int:
    if any(found.code.startswith("QZ0") for found in diagnostics):
        return 2
    return int(any(found.severity == "error" or strict for found in diagnostics))
