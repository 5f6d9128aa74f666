"""The options of the targets of `--deploy`, by name. Imports no torch."""

import os
from collections.abc import Collection, Mapping
from typing import Any

from quantizer.config.wording import a_kind, listed
from quantizer.errors import UsageError
from quantizer.export.targets import EXPORTERS, TargetOption

CHOICES: dict[str, TargetOption] = {}
for _target in EXPORTERS.values():
    CHOICES |= {option.name: option for option in _target.options}


def checked_choices(options: Mapping[str, Any], target: str) -> dict[str, str]:
    """Return the options of a target, which are texts or paths, as texts.

    Raises:
        UsageError: one is something else, or is refused by `require_choices`.
    """
    texts: dict[str, str] = {}
    for name, value in options.items():
        _require_known(name)
        if not isinstance(value, (str, os.PathLike)):
            raise UsageError(f"{name} is {a_kind(value)}, not a text")
        texts[name] = os.fspath(value)
    require_choices(texts, [target])
    return texts


def _require_known(name: str) -> None:
    if name not in CHOICES:
        raise UsageError(
            f"no target has the option {name}", help=f"known are {', '.join(CHOICES)}"
        )


def require_choices(choices: Mapping[str, str], targets: Collection[str]) -> None:
    """Check the names and values of options, and that their targets are written.

    Raises:
        UsageError: there is no such option, its value is unknown, its target is not written, or
            it does not go with the others.
    """
    for name, value in choices.items():
        _require_known(name)
        option = CHOICES[name]
        if value not in option.values and not (option.is_file or option.is_text):
            raise UsageError(
                f"{name} is {value!r}", help=f"known are {', '.join(option.values)}"
            )
        if value != option.default and option.target not in targets:
            raise UsageError(f"--{name} is only for --deploy {option.target}")
        if value in option.alone and set(targets) != {option.target}:
            raise UsageError(
                f"--{name} {value} changes which layers are quantized, so that the figures of "
                "the run hold for no other file",
                help="write the other targets in a run of their own",
            )
        if value == option.default or option.goes_with is None:
            continue
        other, needed = option.goes_with
        if choices.get(other, CHOICES[other].default) not in needed:
            raise UsageError(f"--{name} is only for --{other} {listed(needed)}")


def chooses_layers(choices: Mapping[str, str]) -> bool:
    """Return whether a target chooses which layers are quantized.

    >>> chooses_layers({"onnx_profile": "tuned"}), chooses_layers({"onnx_profile": "fast"})
    (True, False)
    """
    return any(value in CHOICES[name].alone for name, value in choices.items())
