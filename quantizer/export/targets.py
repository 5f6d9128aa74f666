"""The targets of `--deploy`, their options and the values of `--for`, as plug-ins declare them.

Imports no torch.
"""

import os
from collections.abc import Callable, Collection, Mapping
from inspect import signature
from typing import Any

from quantizer.config.wording import a_kind, did_you_mean, listed
from quantizer.declarations import CheckedTarget, ExportTarget, TargetOption
from quantizer.errors import UsageError
from quantizer.option_words import Option, marked
from quantizer.plugins import plugins

FOLDER = "export"
"""Of the files, in a result folder."""
EXPORTERS: dict[str, ExportTarget] = {}
"""By their names."""
CHOICES: dict[str, TargetOption] = {}
"""The options of all targets, by name."""
_PROFILES: dict[str, CheckedTarget] = {}
for _plugin in plugins():
    EXPORTERS.update(_plugin.targets)
    _PROFILES.update(_plugin.profiles)
for _target in EXPORTERS.values():
    CHOICES.update({option.name: option for option in _target.options})

CHECKED_TARGETS = {name: CheckedTarget(name) for name in EXPORTERS} | _PROFILES
"""By the values of `--for`: the targets, and profiles that are named in messages. Those for
other engines hold less than their target does.
"""


def offered(*kinds: str) -> str:
    """Return the option that writes other files, for remedies.

    Args:
        kinds: values of `ExportTarget.offered_for`, the best first.
    """
    names: list[str] = []
    for kind in kinds:
        names += [name for name, row in EXPORTERS.items() if row.offered_for == kind]
    if not names:
        return "another kind of file"
    return marked(Option("deploy", tuple(names)))


def checked_target(name: str, choices: Mapping[str, str]) -> CheckedTarget:
    """Return what a value of `--for` stands for if options have these values, too."""
    checked = CHECKED_TARGETS[name]
    if checked.choices:
        return checked
    for other in CHECKED_TARGETS.values():
        is_chosen = other.choices and other.choices.items() <= choices.items()
        if other.target == name and is_chosen:
            return other
    return checked


def checked_choices(
    options: Mapping[str, Any], target: str, function: Callable[..., Any]
) -> dict[str, str]:
    """Return the options of a target, which are texts or paths, as texts.

    Args:
        options: by name.
        target: the target.
        function: the function that they were given to. The name of one of its own arguments
            may be misspelt.

    Raises:
        UsageError: there is no such option, one is something else, or is refused by
            `require_choices`.
    """
    texts: dict[str, str] = {}
    for name, value in options.items():
        if name not in CHOICES:
            arguments = signature(function).parameters
            known = ", ".join(CHOICES)
            names = (*arguments, *CHOICES)
            remedy = f"known are {known}"
            remedy = did_you_mean(name, names, remedy)
            raise UsageError(f"no target has the option {name}", help=remedy)
        if not isinstance(value, (str, os.PathLike)):
            raise UsageError(f"{name} is {a_kind(value)}, not a text")
        texts[name] = os.fspath(value)
    require_choices(texts, [target])
    return texts


def require_choices(choices: Mapping[str, str], targets: Collection[str]) -> None:
    """Check the names and values of options, and that their targets are written.

    Raises:
        UsageError: a value is unknown, its target is not written, or it does not go with the
            others.
    """
    for name, value in choices.items():
        option = CHOICES[name]
        is_free = option.is_file or option.is_text
        if value not in option.values and not is_free:
            known = ", ".join(option.values)
            remedy = f"known are {known}"
            raise UsageError(f"{name} is {value!r}", help=remedy)
        if value != option.default and option.target not in targets:
            raise UsageError(f"<--{name}> is only for <--deploy {option.target}>")
        if value in option.alone and set(targets) != {option.target}:
            raise UsageError(
                f"<--{name} {value}> changes which layers are quantized, so that the figures "
                "of the run hold for no other file",
                help="write the other targets in a run of their own",
            )
        if value == option.default or option.goes_with is None:
            continue
        other, needed = option.goes_with
        default = CHOICES[other].default
        if choices.get(other, default) not in needed:
            raise UsageError(f"<--{name}> is only for <--{other} {listed(needed)}>")


def layer_choosing_option(choices: Mapping[str, str]) -> str:
    """Return the option with which a target chooses which layers are quantized; empty if none
    does.
    """
    for name, value in choices.items():
        if value in CHOICES[name].alone:
            return marked(Option(name, (value,)))
    return ""
