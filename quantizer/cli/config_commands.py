"""The commands about configs that are always there and import no torch: `quantizer explain`,
`quantizer help`, `quantizer validate` and `quantizer schema`.
"""

import importlib
import json
import re
from collections import Counter
from difflib import unified_diff
from typing import cast, get_args

import click

from quantizer.cli.arguments.grouped_command import command, refuse_typed
from quantizer.cli.arguments.options import LOOK, Options, takes
from quantizer.cli.arguments.places import WrittenPath, layers_of_results, write_output
from quantizer.cli.terminal.render import RENDERERS, say
from quantizer.cli.terminal.screen import screen
from quantizer.config.diagnostics import ConfigError, Diagnostic
from quantizer.config.document.read import read_text
from quantizer.config.forms.form import Form
from quantizer.config.load import LoadResult, fix_text, load_config
from quantizer.config.pages import (
    code_page,
    contents,
    key_names,
    key_page,
    setting_names,
    setting_page,
)
from quantizer.config.resources import load_resource, resource
from quantizer.config.rules.check_structure import form_schema
from quantizer.config.rules.spec_rules import all_codes
from quantizer.config.wording import closest_word, counted, listed, quoted
from quantizer.errors import UsageError

_LINK = re.compile(r"\[([^][]+)\]\([^()]+\)")
"""A link in Markdown, of which a terminal shows only the text."""


def _completed(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return completions for a shell: layers with --model, otherwise codes and keys."""
    if ctx.params.get("model"):
        return layers_of_results(ctx, parameter, incomplete)
    return [word for word in _words() if word.startswith(incomplete)]


def _words() -> list[str]:
    return [*key_names(), *setting_names(), *all_codes()]


@command()
@click.argument("name", metavar="[CODE|KEY|LAYER]", required=False, shell_complete=_completed)
@takes(*(name for name in LOOK if name not in ("output", "overwrite")))
def explain(name: str | None, options: Options) -> int | None:
    """Explain a code such as QZ301, a config key such as round_mode, or with --model the
    settings of one layer.

    Without a name, list all codes and keys.

    \b
    quantizer explain
    quantizer explain QZ301
    quantizer explain round_mode
    quantizer explain --config_file net.json --model my_model.py layer1.conv1
    """
    if name is None:
        click.echo(contents(), nl=False)
        return None
    if options.model is not None:
        layers = importlib.import_module("quantizer.cli.explain_layer")
        code: int | None = layers.explain_layer(name, options)
        return code
    refuse_typed(LOOK, "it needs --model, which shows the settings of a layer")
    words = {word.lower(): word for word in setting_names()}
    if name.upper() in all_codes():
        page = code_page(name.upper())
    elif name.lower() in key_names():
        page = key_page(name.lower())
    elif name.lower() in words:
        page = setting_page(words[name.lower()])
    else:
        raise UsageError(f"there is no code or config key {quoted(name)}", help=_help_for(name))
    click.echo(_LINK.sub(r"\1", page), nl=False)
    return None


def _help_for(name: str) -> str:
    near = closest_word(name, _words())
    codes = [code for code in all_codes() if code.startswith(name.upper())]
    if codes and len(name) > 2:
        near = listed(codes)
    overview = "`quantizer explain` lists all codes and keys, and --model M explains a layer"
    return f"did you mean {near}? {overview}" if near else overview


_EXIT_CODES = """\
Exit codes:
  0    success
  1    a check failed: a config has errors, or a --gate does not hold
  2    wrong usage, or a config that cannot be used
  3    an error of the model
  4    an error of the data
  5    an error of the result folder
  6    out of memory
  40   another process of torchrun was lost
  70   an internal error of quantizer
  130  interrupted (Ctrl-C)
  143  terminated"""
_VARIABLES = """\
Environment variables set options. QUANTIZER_SEED=1 stands for --seed 1 of calib, test, float
and --quant_mode, QUANTIZER_EXPLAIN_MODEL=my_model.py for --model of `quantizer explain`."""
TOPICS = {"exit-codes": _EXIT_CODES, "variables": _VARIABLES}
"""The texts of `quantizer help`, besides those of commands."""


@command()
@click.argument("name", metavar="[COMMAND]", required=False)
@click.pass_context
def help_command(ctx: click.Context, name: str | None) -> None:
    """Show the help of a command, or of all of them; or a topic, exit-codes or variables.

    \b
    quantizer help
    quantizer help plan
    quantizer help exit-codes
    """
    root = ctx.find_root()
    if name is None:
        click.echo(root.get_help())
        return
    topic = TOPICS.get(name.replace("_", "-"))
    if topic is not None:
        click.echo(topic)
        return
    group = root.command
    assert isinstance(group, click.Group)
    shown = group.get_command(root, name)
    if shown is None:
        near = closest_word(name, [*group.list_commands(root), *TOPICS])
        remedy = "`quantizer help` lists all commands, `quantizer explain` all config keys"
        if near is not None:
            remedy = f"did you mean `quantizer help {near}`? {remedy}"
        raise UsageError(f"there is no command {quoted(name)}", help=remedy)
    with click.Context(shown, info_name=name, parent=root) as context:
        click.echo(shown.get_help(context))


_SCHEMA_NAMES = ("layered", "hierarchical", "quantization_spec")


@command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=WrittenPath())
@click.option(
    "--format",
    type=click.Choice(list(RENDERERS)),
    default="text",
    show_default=True,
    help="How findings are printed.",
)
@click.option(
    "--fix", is_flag=True, help="Fix the errors that have a unique fix, in the files."
)
@click.option("--diff", is_flag=True, help="Show what --fix would change, without writing.")
@click.option("--strict", is_flag=True, help="Count warnings as errors.")
def validate(
    files: tuple[str, ...],
    *,
    format: str,  # noqa: A002 - the option
    fix: bool,
    diff: bool,
    strict: bool,
) -> int:
    """Check config files and list all their errors.

    Exit codes: 0 all are valid, 1 some have errors, 2 some are not readable JSON.

    \b
    quantizer validate net.json
    quantizer validate --fix --diff net.json
    quantizer validate --format sarif net.json > net.sarif
    """
    if diff and format != "text":
        raise UsageError(
            f"--diff cannot be combined with --format {format}", help="leave out --format"
        )
    names = tuple(dict.fromkeys(files))
    if diff:
        click.echo("".join(map(_difference, names)), nl=False)
    fix_counts: dict[str, int] = {}
    results: dict[str, LoadResult] = {}
    diagnostics: list[Diagnostic] = []
    sources: dict[str, str] = {}
    for name in names:
        fix_counts[name] = _fix(name) if fix and not diff else 0
        results[name] = load_config(name)
        diagnostics += results[name].diagnostics
        sources |= results[name].sources
    if format == "text" and screen().quiet:
        diagnostics = [finding for finding in diagnostics if _decides(finding, strict)]
    if diagnostics or format in ("json", "sarif"):
        click.echo(RENDERERS[format](diagnostics, sources))
    if format == "text" and not screen().quiet:
        for name, result in results.items():
            say(f"{name}: {_verdict(result.diagnostics, fix_counts[name])}")
    return max(_exit_code(result.diagnostics, strict) for result in results.values())


def _fix(name: str) -> int:
    """Write all known fixes into the file, and return their number."""
    try:
        text, count = fix_text(read_text(name))
    except ConfigError:
        # The check reports that the file is not readable.
        return 0
    if count:
        write_output(name, text.text, encoding=text.encoding, in_place=True)
    return count


def _difference(name: str) -> str:
    """Return a unified diff of what the fixes would change."""
    try:
        source = read_text(name)
    except ConfigError:
        return ""
    before = source.text.split("\n")
    after = fix_text(source)[0].text.split("\n")
    lines = unified_diff(before, after, name, name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _verdict(diagnostics: tuple[Diagnostic, ...], fixes: int) -> str:
    """Return the result in a few words: fixes, validity, errors, warnings, what --fix can
    fix.
    """
    severities = Counter(finding.severity for finding in diagnostics)
    words = []
    if fixes:
        words.append(f"{fixes} fixed")
    if not severities["error"]:
        words.append("valid")
    for severity in ("error", "warning"):
        if severities[severity]:
            words.append(counted(severities[severity], severity))
    fixable = sum(bool(finding.fixes) for finding in diagnostics)
    if fixable:
        words.append(f"{fixable} fixable with --fix")
    return ", ".join(words)


def _decides(finding: Diagnostic, strict: bool) -> bool:
    """Return whether a finding makes the exit code other than 0."""
    return strict or finding.severity == "error"


def _exit_code(diagnostics: tuple[Diagnostic, ...], strict: bool) -> int:
    if any(finding.code.startswith("QZ0") for finding in diagnostics):
        return 2
    return int(any(_decides(finding, strict) for finding in diagnostics))


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
    if not as_text:
        click.echo(str(path))
        return
    text = path.read_text("utf-8")
    content = load_resource("schemas", path.name)
    if name in get_args(Form):
        content = form_schema(cast("Form", name))
    if content != json.loads(text):
        # Plug-ins of other packages add words
        text = f"{json.dumps(content, indent=2, ensure_ascii=False)}\n"
    click.echo(text, nl=False)
