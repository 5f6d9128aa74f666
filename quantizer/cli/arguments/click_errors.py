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
    ('got unexpected extra argument (net.json)', '`quantizer --help` lists all options')
    """
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption):
        return _unknown_option(error, context)
    if isinstance(error, click.MissingParameter):
        return _missing_value(error, context)
    if isinstance(error, click.BadOptionUsage):
        return _misused_option(error, context)
    if isinstance(error, click.BadParameter):
        return _refused_value(error, context)
    return _sentence(error.format_message()), _form(context)


def _unknown_option(
    error: click.NoSuchOption, context: click.Context | None
) -> tuple[str, str]:
    written = error.option_name
    message = f"there is no option {written}"
    if context is None:
        return message, _usage(context)
    if context.parent is not None:
        message = f"{context.command_path} has no option {written}"
    spellings: list[str] = []
    for option in _options(context):
        spellings += option.opts + option.secondary_opts
    near = closest_word(written, spellings)
    remedy = _usage(context)
    if near is not None:
        remedy = f"did you mean {near}? {remedy}"
    return message, remedy


def _missing_value(
    error: click.MissingParameter, context: click.Context | None
) -> tuple[str, str]:
    parameter = error.param
    if parameter is None or context is None:
        return _sentence(error.format_message()), _usage(context)
    return f"missing {_name_of(parameter)}", _form(context)


def _misused_option(
    error: click.BadOptionUsage, context: click.Context | None
) -> tuple[str, str]:
    option = _option_called(error.option_name, context)
    if option is None:
        return _sentence(error.format_message()), _usage(context)
    name = option.opts[0]
    if option.is_flag:
        return f"{name} takes no value", f"write {name} alone: {option.help}"
    return f"{name} needs a value", _example(option, context)


def _refused_value(error: click.BadParameter, context: click.Context | None) -> tuple[str, str]:
    """Return the sentence and the remedy for a value that an option or argument refuses."""
    parameter = error.param
    reason = error.message.rstrip(".")
    if parameter is None:
        return _sentence(error.format_message()), _usage(context)
    for words, plain_words in _NUMBERS.items():
        if reason.endswith(f"is not {words}"):
            reason = reason.removesuffix(words) + plain_words
    remedy = _usage(context)
    if isinstance(parameter, click.Option):
        remedy = _example(parameter, context)
    if isinstance(parameter.type, click.Choice):
        choices = [str(choice) for choice in parameter.type.choices]
        written = _REFUSED_CHOICE.match(reason)
        if written:
            reason = f"{written[1]!r} is not one of its values"
            near = closest_word(written[1], choices)
            remedy = f"known are {listed(choices)}" if choices else "there is none"
            if near is not None:
                remedy = f"did you mean {near}? {remedy}"
            elif isinstance(parameter.type, PluginWord):
                remedy += f"; {remedy_for_absent(written[1])}"
    return f"{_name_of(parameter)}: {reason}", remedy


def _options(context: click.Context) -> list[click.Option]:
    parameters = context.command.get_params(context)
    return [parameter for parameter in parameters if isinstance(parameter, click.Option)]


def _option_called(name: str, context: click.Context | None) -> click.Option | None:
    if context is None:
        return None
    for option in _options(context):
        if name in option.opts or name == option.name:
            return option
    return None


def _sentence(text: str) -> str:
    """Return click's message in the form of ours: no capital, no full stop."""
    text = text.rstrip(".")
    return text[:1].lower() + text[1:]


def _name_of(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Option):
        return parameter.opts[0]
    return parameter.human_readable_name


def _example(option: click.Option, context: click.Context | None) -> str:
    """Return how an option is written, and what it is for."""
    written = option.opts[0]
    if context is not None:
        written += f" {option.make_metavar(context)}"
    return f"write {written}: {option.help}"


def _form(context: click.Context | None) -> str:
    """Return how a command is written."""
    if context is None:
        return _usage(context)
    usage = " ".join(context.get_usage().removeprefix("Usage:").split())
    return f"write {usage}"


def _usage(context: click.Context | None) -> str:
    path = "quantizer"
    if context is not None:
        path = context.command_path
    return f"`{path} --help` lists all options"
