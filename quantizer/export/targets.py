"""The targets of `--deploy` and the values of `--for`, from plug-ins. Imports no torch."""

from collections.abc import Mapping

from quantizer.plugins import CheckedTarget, ExportTarget, TargetOption, plugins

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
    *first, last = names
    if not first:
        return f"--deploy {last}"
    return f"--deploy {', '.join(first)} or {last}"


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
