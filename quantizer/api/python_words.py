"""Says the options of the shell, which messages name, as arguments of Python."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

from quantizer.calibration.events import ForkedEvents
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.dpu_accuracy import FINETUNE_MODES, LEVELS
from quantizer.default_device import default_device_kept
from quantizer.errors import ModelError, QuantizerError
from quantizer.export.destinations import DESTINATIONS
from quantizer.export.targets import CHOICES, EXPORTERS
from quantizer.sources.user_code import user_exits

_PHRASES = {
    "--quant_mode calib": "`calibrate` and `Result.save`",
    "--quant_mode test": "`Result.test`",
    "--overwrite": "overwrite=True",
    "--resume": "resume=True",
}
_SAME_NAMES = (
    *CHOICES,
    "batch_size",
    "data",
    "dpu_accuracy",
    "dynamic",
    "evaluate",
    "fast_finetune",
    "max_mb",
    "memory",
    "model",
    "seed",
    "subset_len",
    "to",
)
ARGUMENTS = {
    **{name: name for name in _SAME_NAMES},
    "config_file": "config",
    "deploy": "target",
    "eval_data": "evaluation_data",
    "output_dir": "folder",
}
"""The arguments of Python by option of the shell. Other options have none."""
_words = {"calib", "test", *LEVELS, *FINETUNE_MODES, *EXPORTERS, *DESTINATIONS}
for _choice in CHOICES.values():
    _words.update(filter(None, _choice.values))
_VALUE = "|".join(
    [
        # The longer of two words that begin alike comes first
        *sorted(map(re.escape, _words), reverse=True),
        r"synthetic(?::[\w:]+)?",
        r"\d[\w.]*",
        r"[\w./~-]+\.json",
        "[A-Z]+",
    ]
)
_OPTION = re.compile(
    rf"`[^`]*`|--(?P<name>[a-z]\w*)"
    rf"(?: (?P<values>(?:{_VALUE})\b(?:(?:, | or | and )(?:{_VALUE})\b)*))?"
)
"""Matches a command, which stays, or an option with the values that it may have."""
_IN_THE_FILE = re.compile(r", or add \w+\(\) to the model's file|add \w+\(\) to the .*?, or ")
"""Matches a remedy that only the shell has."""


def in_python(value: Any) -> Any:
    """Return a text with arguments instead of options, or a value with all its texts changed.

    >>> in_python("leave --dynamic out, or use --onnx_profile fast or tuned")
    'leave `dynamic` out, or use onnx_profile="fast" or "tuned"'
    >>> in_python({"help": "`quantizer plan --top 3` shows them; run --quant_mode calib again"})
    {'help': '`quantizer plan --top 3` shows them; run `calibrate` and `Result.save` again'}
    """
    if isinstance(value, str):
        value = value.replace("test mode's --deploy", "`Result.export` with --deploy")
        return _OPTION.sub(_argument, _IN_THE_FILE.sub("", value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_python, value))
    if isinstance(value, Mapping):
        return {name: in_python(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        texts = {place.name: in_python(getattr(value, place.name)) for place in fields(value)}
        return replace(value, **texts)
    return value


def _argument(match: re.Match[str]) -> str:
    """Return the argument for an option, with its values, if there are some."""
    option, values = match["name"], match["values"]
    if option is None:
        return match[0]
    if match[0] in _PHRASES:
        return _PHRASES[match[0]]
    if option not in ARGUMENTS:
        return match[0].replace(f"--{option}", f"the shell's `{option}`")
    name = ARGUMENTS[option]
    if values is None:
        return f"`{name}`"
    # The values of a target's options are texts
    if name in CHOICES or not values.replace(".", "").isdecimal():
        values = re.sub(_VALUE, _quoted, values)
    return f"{name}={values}"


def _quoted(match: re.Match[str]) -> str:
    return f'"{match[0]}"'


@contextmanager
def called_from_python() -> Iterator[None]:
    """Name arguments instead of options in errors of the code inside. Exceptions of the model
    that would end the process become errors, and a default device is that of the user's code.
    """
    try:
        with user_exits("the model", ModelError), default_device_kept():
            yield
    except QuantizerError as error:
        error.reworded(in_python)
        raise


class PythonEvents(ForkedEvents):
    """Passes everything on, with arguments instead of options in messages."""

    def message(self, level: int, text: str, finding: Diagnostic | None = None) -> None:
        """Pass on the message and the finding in words of Python."""
        super().message(level, in_python(text), in_python(finding))
