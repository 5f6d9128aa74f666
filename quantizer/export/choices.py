"""The options of the targets of `--deploy`, by name. Imports no torch."""

from collections.abc import Collection, Mapping

from quantizer.errors import UsageError
from quantizer.export.targets import EXPORTERS, TargetOption

CHOICES: dict[str, TargetOption] = {}
for _target in EXPORTERS.values():
    CHOICES |= {option.name: option for option in _target.options}


def require_choices(choices: Mapping[str, str], targets: Collection[str]) -> None:
    """Check the names and values of options, and that their targets are written.

    Raises:
        UsageError: there is no such option, its value is unknown, or its target is not
            written.
    """
    for name, value in choices.items():
        if name not in CHOICES:
            raise UsageError(
                f"no target has the option {name}", help=f"known are {', '.join(CHOICES)}"
            )
        option = CHOICES[name]
        if value not in option.values and not (option.is_file or option.is_text):
            raise UsageError(
                f"{name} is {value!r}", help=f"known are {', '.join(option.values)}"
            )
        if value != option.default and option.target not in targets:
            raise UsageError(f"--{name} is only for --deploy {option.target}")
