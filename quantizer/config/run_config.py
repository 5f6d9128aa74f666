"""Writes the config of a run in one call into its folder, or checks the one that is there."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Text, pointer_to
from quantizer.config.document.read import parse_document, read_text
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.json_types import JsonPath
from quantizer.config.load import load_text
from quantizer.config.model import ResolvedConfig
from quantizer.config.wording import first_names
from quantizer.errors import QuantizerError, UsageError
from quantizer.storage.ownership import unmark
from quantizer.storage.replacing import cannot_use, remove_file, replace_file

RUN_CONFIG = "quantize_config.json"
"""The name of the config in the folder of a run."""
_KEY = "// quantizer run"
"""The comment that says what a config was made for."""
_MADE_FOR = re.compile(r"--to (.+?) for (.+), from (\S+)")
_MAX_DIFFERENCES = 4


@dataclass(frozen=True)
class MadeFor:
    """What a config is made for.

    Attributes:
        destination: as `--to` names it.
        model: the class of the model.
        preset: that it starts from. It depends on whether there is calibration data.
        max_mb: the limit of the size, if there is one.
        keep_float: names of layers that it excludes, also if it is there already.
    """

    destination: str
    model: str
    preset: str
    max_mb: float | None = None
    keep_float: Sequence[str] = ()

    @property
    def to(self) -> str:
        """Return the destination with the options that change the config."""
        if self.max_mb is None:
            return self.destination
        return f"{self.destination} --max_mb {self.max_mb:g}"

    @property
    def comment(self) -> str:
        """Return the comment in the config."""
        return f"--to {self.to} for {self.model}, from {self.preset}"


def run_config(
    folder: Path,
    made_for: MadeFor,
    new_text: Callable[[], str],
    *,
    finish: Callable[[str], str] = str,
    overwrite: bool,
) -> Path:
    """Return the path of the config in a folder; write it if there is none.

    Args:
        folder: of the run.
        made_for: what the config is for.
        new_text: returns the text of a new config.
        finish: changes that text before it is written.
        overwrite: whether a config that is there is replaced.

    Raises:
        ConfigError: the config that is there cannot be read.
        UsageError: it was made for another destination or model or from another preset.
        ResultError: it cannot be written.
    """
    path = folder / RUN_CONFIG
    if path.exists() and not overwrite:
        _require_same(path, made_for, new_text)
        return path
    write_config(path, _with_comment(finish(new_text()), made_for))
    return path


def write_config(path: Path, text: str, encoding: str = "utf-8") -> None:
    """Write a config into the folder of a run.

    Raises:
        ResultError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode(encoding))
    except OSError as error:
        raise cannot_use(path.parent, error) from None


@contextmanager
def restored_if_refused(folder: Path) -> Iterator[None]:
    """Undo what the code inside has written as the config of a folder, if it fails.

    A new config would stop a run for another destination. A config that the error is about
    stays.
    """
    path = folder / RUN_CONFIG
    is_new = not folder.exists()
    before: bytes | None = None
    if path.is_file():
        before = path.read_bytes()
    try:
        yield
    except ConfigError:
        raise
    except QuantizerError as error:
        is_about_config = str(path) in str(error)
        if path.is_file() and not is_about_config:
            if before is None:
                remove_file(path)
            elif path.read_bytes() != before:
                replace_file(path, before)
        unmark(folder, remove_folder=is_new)
        raise


def _with_comment(text: str, made_for: MadeFor) -> str:
    """Return a config with the comment below its own first one."""
    own_comment = re.search(r'^  "//": .*\n', text, re.MULTILINE)
    start = own_comment.end() if own_comment else text.index("{\n") + 2
    line = f"  {json.dumps(_KEY)}: {json.dumps(made_for.comment)},\n"
    return text[:start] + line + text[start:]


def _require_same(path: Path, made_for: MadeFor, new_text: Callable[[], str]) -> None:
    """Raise `UsageError` if a config was made for another destination or model, or from another
    preset.

    A config without the comment was written by the user, and is taken.
    """
    source = read_text(path)
    comment = parse_document(source).value.get(_KEY)
    match = _MADE_FOR.fullmatch(str(comment))
    if match is None or comment == made_for.comment:
        return
    to, model, preset = match.groups()
    if model != made_for.model:
        message = f"{path} was made for {model}, and this model is {made_for.model}"
    elif to != made_for.to:
        message = f"{path} was made for <--to {to}>, not for <--to {made_for.to}>"
        # Widths that were measured differ in too many layers to list them
        if to.split()[0] != made_for.to.split()[0]:
            message += _differences(source, new_text())
    else:
        message = (
            f"{path} was made from the preset {preset}, and this run starts from "
            f"{made_for.preset}"
        )
        message += _differences(source, new_text())
    raise UsageError(
        message,
        help=f"choose another <--output_dir>, write a new config with <--overwrite>, or keep "
        f"this one with <--config_file {path}>",
    )


def _differences(source: Text, new: str) -> str:
    """Return the end of a sentence with the values that differ from a new config."""
    before = load_text(source).config
    after = load_text(Text("new", new)).config
    if before is None or after is None:
        return ""
    if before.form != after.form:
        return f", which has the {after.form} form"
    values = []
    for key, (old, new_value) in compare_configs(before, after).items():
        values.append(f"{key} is {json.dumps(old)} instead of {json.dumps(new_value)}")
    return f": {first_names(values, _MAX_DIFFERENCES)}" if values else ""


_SELECTOR_KEYS = ("layer_name", "layer_type")
"""The keys that identify an entry of a list: entries are compared by them, not by place."""


def compare_configs(
    first: ResolvedConfig, second: ResolvedConfig
) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ once both files are complete, by JSON pointer; a
    missing value is None.

    Raises:
        ValueError: the configs are of different forms.
    """
    if first.form != second.form:
        raise ValueError(
            f"one is of the {first.form} form, the other of the {second.form} form"
        )
    before = dict(_leaves(resolved_document(first)))
    after = dict(_leaves(resolved_document(second)))
    both = {pointer: (before.get(pointer), after.get(pointer)) for pointer in before | after}
    return {pointer: values for pointer, values in both.items() if values[0] != values[1]}


def _leaves(value: Any, path: JsonPath = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            names = (
                [item.get(key) for key in _SELECTOR_KEYS] if isinstance(item, Mapping) else []
            )
            name = next(filter(None, names), index)
            yield from _leaves(item, (*path, name))
    else:
        yield pointer_to(*path), value
