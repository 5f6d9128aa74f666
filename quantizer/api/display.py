"""What users of Python see of a run: sentences that name arguments instead of options, and
tables and progress in notebooks. Elsewhere progress is logged.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

from quantizer.calibration.events import Events, ForkedEvents, LoggedEvents, RunStage
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.wording import a_kind
from quantizer.errors import ModelError, QuantizerError, UsageError
from quantizer.export.targets import CHOICES
from quantizer.option_words import Option, in_shell, worded
from quantizer.printable import Markup, element
from quantizer.report.view import Listing
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
    "keep_float",
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
    "gate": "gates",
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


_SECONDS_BETWEEN_DRAWINGS = 0.1


def follower(events: Events | None = None) -> Events:
    """Return what shows a run: the user's `events`, bars and log records in a notebook, or log
    records. Messages name arguments of Python.
    """
    if events is not None and hasattr(events, "started"):
        return PythonEvents(events)
    if events is not None:
        raise UsageError(
            f"events is {a_kind(events)}, not a quantizer.calibration.events.Events",
            help="write a subclass of it, with its method `message` for example",
        )
    if in_notebook():
        return PythonEvents(NotebookBars(), LoggedEvents())
    return PythonEvents(LoggedEvents())


class NotebookBars(Events):
    """Shows a bar for each stage of a run while it lasts. It needs only IPython."""

    def __init__(self) -> None:
        self._stages: list[RunStage] = []
        self._display: Any = None
        self._drawn = 0.0

    def started(self, stage: RunStage) -> None:
        """Show a bar."""
        self._stages.append(stage)
        self._draw()

    def advanced(self, stage: RunStage) -> None:
        """Update the bar, at most every tenth of a second."""
        if time.monotonic() - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
            self._draw()

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Remove the bar."""
        self._stages.remove(stage)
        self._draw()

    def _draw(self) -> None:
        ipython = sys.modules["IPython.display"]
        bars = "".join(map(_bar, self._stages))
        content = ipython.HTML(bars)
        if self._display is None:
            self._display = ipython.display(content, display_id=True)
        else:
            self._display.update(content)
        self._drawn = time.monotonic()


def _bar(stage: RunStage) -> Markup:
    count = str(stage.done)
    bar = element("progress", value=None, max=None)
    if stage.total:
        count += f"/{stage.total}"
        bar = element("progress", value=stage.done, max=stage.total)
    return element("div", f"{stage.name} ", bar, f" {count} {stage.unit}")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    module: Any = sys.modules.get("IPython")
    if module is None:
        return False
    shell = module.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def html_table(listing: Listing) -> Markup:
    """Return an HTML table with all columns."""
    head = element("thead", _row("th", listing.widest, listing))
    rows = []
    for row in listing.rows_of(listing.widest):
        rows.append(_row("td", row, listing))
    return element("table", head, element("tbody", rows))


def _row(tag: str, values: tuple[str, ...], listing: Listing) -> Markup:
    cells = []
    for text, title in zip(values, listing.widest, strict=True):
        side = "right" if title in listing.numbers else "left"
        cells.append(element(tag, text, style=f"text-align:{side}"))
    return element("tr", cells)
