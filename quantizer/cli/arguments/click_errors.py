"""Turns click's errors about a command line into the form of all other errors: what is wrong,
and what to do.
"""

import re

import click

from quantizer.cli.arguments.places import PluginWord
from quantizer.config.wording import closest_word, listed
from quantizer.plugins import remedy_for_absent

_REFUSED_CHOICE = re.compile(r"'(.*)' is not (?:one of )?(?:'|$)")
"""The beginning of click's message about a value that is not a choice."""
_NUMBERS = {
    "a valid integer range": "a whole number",
    "a valid integer": "a whole number",
    "a valid float": "a number",
}
"""Click's words for numbers, and ours."""


def explained(error: click.ClickException) -> tuple[str, str]:
    """Return the message and the help of an error that click has raised.

    >>> explained(click.UsageError("Got unexpected extra argument (net.json)."))
    ('got unexpected extra argument (net.json)', 'write quantizer [OPTIONS]')
    """
    context: click.Context | None = getattr(error, "ctx", None)
    if context is None:
        context = click.Context(click.Command("quantizer"), info_name="quantizer")
    usage = f"`{context.command_path} --help` lists all options"
    form = f"write {' '.join(context.get_usage().removeprefix('Usage:').split())}"
    parameters = context.command.get_params(context)
    options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error.option_name, context, options, usage)
    if isinstance(error, click.BadOptionUsage):
        for option in options:
            if error.option_name in (*option.opts, option.name):
                return _misused_option(option, context)
    elif isinstance(error, click.MissingParameter) and error.param is not None:
        return f"missing {_name_of(error.param)}", form
    elif isinstance(error, click.BadParameter) and error.param is not None:
        return _refused_value(error.message, error.param, context, usage)
    else:
        usage = form
    # As our messages: no capital, no full stop
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:], usage


def _unknown_option(
    written: str, context: click.Context, options: list[click.Option], remedy: str
) -> tuple[str, str]:
    message = f"there is no option {written}"
    if context.parent is not None:
        message = f"{context.command_path} has no option {written}"
    spellings: list[str] = []
    for option in options:
        spellings += option.opts + option.secondary_opts
    near = closest_word(written, spellings)
    if near is not None:
        remedy = f"did you mean {near}? {remedy}"
    return message, remedy


def _misused_option(option: click.Option, context: click.Context) -> tuple[str, str]:
    name = option.opts[0]
    if option.is_flag:
        return f"{name} takes no value", f"write {name} alone: {option.help}"
    return f"{name} needs a value", _example(option, context)


def _refused_value(
    reason: str, parameter: click.Parameter, context: click.Context, remedy: str
) -> tuple[str, str]:
    """Return the sentence and the remedy for a value that an option or argument refuses."""
    reason = reason.rstrip(".")
    for words, plain_words in _NUMBERS.items():
        if reason.endswith(f"is not {words}"):
            reason = reason.removesuffix(words) + plain_words
    if isinstance(parameter, click.Option):
        remedy = _example(parameter, context)
    written = _REFUSED_CHOICE.match(reason)
    if written and isinstance(parameter.type, click.Choice):
        choices = [str(choice) for choice in parameter.type.choices]
        reason = f"{written[1]!r} is not one of its values"
        others = parameter.type.also if isinstance(parameter.type, PluginWord) else ()
        near = closest_word(written[1], [*choices, *others])
        remedy = f"known are {listed(choices)}" if choices else "there is none"
        if near is not None:
            remedy = f"did you mean {near}? {remedy}"
        elif isinstance(parameter.type, PluginWord):
            remedy += f"; {remedy_for_absent(written[1])}"
    return f"{_name_of(parameter)}: {reason}", remedy


def _name_of(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return parameter.opts[0]
    return parameter.human_readable_name


def _example(option: click.Option, context: click.Context) -> str:
    """Return how an option is written, and what it is for."""
    return f"write {option.opts[0]} {option.make_metavar(context)}: {option.help}"
