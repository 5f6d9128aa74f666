"""Write cli.md of the site: every command with its options, from what `--help` prints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click

from quantizer.cli.config_commands import TOPICS
from quantizer.cli.main import cli, subcommands

_TITLE = """# All commands

This page is written from the program. `quantizer COMMAND --help` prints the same. Hyphens may
stand for underscores (`--config-file`). Options of `--quant_mode` link to an example.

"""
_DEFAULT = re.compile(r"\s*\[default: (.*)\]$")
_ROOT_NAME = "quantizer --quant_mode"
OPTION_PAGES = ("run.md", "run_output.md")
"""The pages with a section for each option of a run."""


def commands_page() -> str:
    """Return the text of cli.md."""
    context = click.Context(cli, info_name="quantizer")
    parts = [_TITLE, _section(cli, _ROOT_NAME)]
    for name in subcommands():
        command = cli.get_command(context, name)
        assert command is not None
        parts.append(_section(command, f"quantizer {name}"))
    parts.append(_ending())
    return "".join(parts)


def _section(command: click.Command, title: str) -> str:
    """Return the section of one command: what it does, an example, its options."""
    context = click.Context(command, info_name=title)
    text = f"## `{title}`\n\n{_description(command)}"
    arguments = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            arguments.append(parameter.make_metavar(context))
    if arguments:
        text += f"Usage: `{title} {' '.join(arguments)}`\n\n"
    examples = _examples() if command is cli else {}
    rows = []
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            rows.append(_row(parameter, context, examples))
    if rows:
        text += "| option | values | default | meaning |\n|---|---|---|---|\n"
        text += "".join(rows) + "\n"
    return text


def _examples() -> dict[str, str]:
    """Return the place of a section with an example, by option."""
    places = {}
    for page in OPTION_PAGES:
        text = Path(__file__).with_name(page).read_text("utf-8")
        for heading in re.findall(r"^##+ (`--.*)$", text, re.MULTILINE):
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for name in re.findall(r"`(--\w+)`", heading):
                places[name] = f"{page}#{anchor}"
    return places


def _description(command: click.Command) -> str:
    """Return a command's help as Markdown; its blocks of commands stay as they are."""
    text = ""
    for paragraph in re.split(r"\n\s*\n", command.help or ""):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        if lines[0] != "\b":
            text += " ".join(lines) + "\n\n"
            continue
        text += "".join(f"    {line}\n" for line in lines[1:]) + "\n"
    return text


def _row(option: click.Option, context: click.Context, examples: Mapping[str, str]) -> str:
    """Return an option's row: spellings, values, default and meaning."""
    record = option.get_help_record(context)
    assert record is not None
    meaning = " ".join(record[1].split())
    default = ""
    found = _DEFAULT.search(meaning)
    if found is not None:
        default = _cell(found[1])
        meaning = meaning[: found.start()]
    names = []
    for name in (*option.opts, *option.secondary_opts):
        shown = f"`{name}`"
        if name in examples:
            shown = f"[{shown}]({examples[name]})"
        names.append(shown)
    cells = [", ".join(names), _values(option, context), default, _cell(meaning)]
    return f"| {' | '.join(cells)} |\n"


def _values(option: click.Option, context: click.Context) -> str:
    """Return the values that an option takes; nothing for a switch."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f"`{', '.join(option.type.choices)}`"
    return f"`{_cell(option.make_metavar(context))}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _ending() -> str:
    """Return the sections on exit codes and environment variables."""
    codes, variables = TOPICS.values()
    rows = []
    for line in codes.splitlines()[1:]:
        code, meaning = line.split(None, 1)
        rows.append(f"| {code} | {meaning} |\n")
    table = "## Exit codes\n\n| code | meaning |\n|---|---|\n" + "".join(rows)
    return f"{table}\n## Environment variables\n\n{' '.join(variables.split())}\n"
