"""Says the options that sentences name as arguments of Python."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

from quantizer.calibration.events import ForkedEvents
from quantizer.config.diagnostics import Diagnostic
from quantizer.errors import ModelError, QuantizerError
from quantizer.export.targets import CHOICES
from quantizer.option_words import Option, in_shell, worded
from quantizer.sources.user_code import user_exits
from quantizer.torch_state import default_device_kept

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


def in_python(value: Any) -> Any:
    """Return a text with arguments for the options that it names, or a value with all its texts
    changed.

    >>> in_python("leave <--dynamic> out, or use <--onnx_profile fast or tuned>")
    'leave `dynamic` out, or use onnx_profile="fast" or "tuned"'
    >>> in_python({"help": "run <--quant_mode calib> again"})
    {'help': 'run `calibrate` and `Result.save` again'}
    """
    if isinstance(value, str):
        return worded(value, _arguments, "python")
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_python, value))
    if isinstance(value, Mapping):
        return {name: in_python(item) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        texts = {place.name: in_python(getattr(value, place.name)) for place in fields(value)}
        return replace(value, **texts)
    return value


def _arguments(options: tuple[Option, ...]) -> str:
    return " ".join(map(_argument, options))


def _argument(option: Option) -> str:
    """Return the argument for an option, with its values, if there are some."""
    phrase = _PHRASES.get(in_shell((option,)))
    if phrase is not None:
        return phrase
    values = option.values
    if option.name not in ARGUMENTS:
        return f"the shell's `{option.name}` {option.listed(values)}".rstrip()
    name = ARGUMENTS[option.name]
    if not values:
        return f"`{name}`"
    # The values of a target's options are texts
    are_numbers = "".join(values).replace(".", "").isdecimal()
    if name in CHOICES or not are_numbers:
        values = tuple(f'"{value}"' for value in values)
    return f"{name}={option.listed(values)}"


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
