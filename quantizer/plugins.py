"""Finds the plug-ins. Imports no torch.

A plug-in is a package with a file `plugin.py`, which has one value `PLUGIN`. Its folder can be
removed: no other package names it. Packages of others are found by the entry point group
`quantizer.plugins`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from quantizer.declarations import CalibrationStep, Command, Plugin
from quantizer.errors import UsageError, first_line

GROUP = "quantizer.plugins"
"""The group of entry points by which packages of others are found."""
_PACKAGE = Path(__file__).parent
_COMMANDS = "commands"
"""The folder of plug-ins that add only commands, which modes do without."""
_left_out: list[str] = []
"""The names of plug-ins of other packages that are not imported."""
_logger = logging.getLogger(__name__)


@functools.cache
def plugins(*, with_commands: bool = False) -> tuple[Plugin, ...]:
    """Return the plug-ins that can be used, in the order of their ranks.

    Args:
        with_commands: whether those that add only commands are among them.
    """
    found = _plugins_by_name(with_commands=with_commands)
    usable = dict(found)
    # Leaving one out may leave another without what it needs
    for _ in found:
        for name, plugin in list(usable.items()):
            if not usable.keys() >= set(plugin.needs):
                del usable[name]
    return tuple(sorted(usable.values(), key=lambda plugin: (plugin.rank, plugin.name)))


def plugin_steps() -> list[CalibrationStep]:
    """Return the steps that plug-ins add to calibrations."""
    steps: list[CalibrationStep] = []
    for plugin in plugins():
        steps += plugin.steps
    return steps


def loaded(place: str) -> Any:
    """Return what is named by "module:name".

    Raises:
        UsageError: it cannot be imported, and is of another package.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        package = module.partition(".")[0]
        if package == _PACKAGE.name:
            raise
        raise UsageError(
            f"{place}, which a plug-in names, cannot be imported: {type(error).__name__}: "
            f"{first_line(error)}",
            help=f"install {package} again, or remove it",
        ) from error


def absent(name: str) -> bool:
    """Return whether a plug-in is not there, or misses another one."""
    return all(plugin.name != name for plugin in plugins())


def part(does: str) -> Any:
    """Return the function that does something for another plug-in; None if there is none."""
    for plugin in plugins():
        if does in plugin.parts:
            return loaded(plugin.parts[does])
    return None


@functools.cache
def commands() -> Mapping[str, Command]:
    """Return the commands of all plug-ins, by name."""
    found: dict[str, Command] = {}
    for plugin in plugins(with_commands=True):
        found.update(plugin.commands)
    return found


def if_command(name: str, sentence: str) -> str:
    """Return a sentence that names a command; an empty text if no plug-in adds it."""
    return sentence if name in commands() else ""


def leave_out_foreign() -> None:
    """Find no plug-ins of other packages: a check of a file runs no code of theirs.

    It has an effect only before `plugins` is called.
    """
    _left_out.extend(entry.name for entry in entry_points(group=GROUP))


def left_out() -> str:
    """Return the names of plug-ins that `leave_out_foreign` has left out."""
    return ", ".join(_left_out)


def remedy_for_absent(word: str) -> str:
    """Return what to do if a word that a plug-in would add is not there.

    Args:
        word: such as the name of a target.
    """
    usable = {plugin.name for plugin in plugins(with_commands=True)}
    for plugin in _plugins_by_name(with_commands=True).values():
        if plugin.name not in usable and word in plugin.words:
            missing = ", ".join(name for name in plugin.needs if name not in usable)
            return (
                f"{word} is of the plug-in {plugin.name}, which needs the plug-in {missing}: "
                "install that, too"
            )
    return f"install the package whose plug-in adds {word}, if there is one"


@functools.cache
def _plugins_by_name(*, with_commands: bool) -> dict[str, Plugin]:
    """Return all plug-ins, also those that miss others."""
    by_name: dict[str, Plugin] = {}
    found = [*_built_in_plugins(of_commands=with_commands)]
    if with_commands:
        by_name |= _plugins_by_name(with_commands=False)
    else:
        found += _foreign_plugins()
    taken = set(itertools.chain(*(plugin.words for plugin in by_name.values())))
    for plugin in found:
        twice = sorted(taken & plugin.words)
        if twice:
            _logger.warning(
                "the plug-in %s is left out: %s is of another plug-in already",
                plugin.name,
                ", ".join(twice),
            )
            continue
        by_name[plugin.name] = plugin
        taken |= plugin.words
    return by_name


def _built_in_plugins(*, of_commands: bool) -> Iterator[Plugin]:
    """Yield the plug-ins in folders of this package: those of commands, or all others.

    Their packages are not imported. They may need the plug-ins themselves.
    """
    for path in sorted(_PACKAGE.glob("*/*/plugin.py")):
        room, folder = path.parts[-3:-1]
        if (room == _COMMANDS) != of_commands:
            continue
        name = f"{_PACKAGE.name}.{room}.{folder}.plugin"
        if name not in sys.modules:
            spec = spec_from_file_location(name, path)
            assert spec is not None and spec.loader is not None
            module = module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        yield sys.modules[name].PLUGIN


def _foreign_plugins() -> Iterator[Plugin]:
    """Yield the plug-ins of other packages. One that cannot be imported is a warning."""
    for entry in entry_points(group=GROUP):
        if entry.name in _left_out:
            continue
        try:
            plugin = entry.load()
        except Exception as error:  # noqa: BLE001 - code of others may raise anything
            _logger.warning(
                "the plug-in %s is left out, as %s cannot be imported: %s: %s",
                entry.name,
                entry.value,
                type(error).__name__,
                first_line(error),
            )
            continue
        if not isinstance(plugin, Plugin):
            _logger.warning(
                "the plug-in %s is left out: %s is not a Plugin", entry.name, entry.value
            )
            continue
        yield plugin
