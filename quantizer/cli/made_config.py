"""Writes the config of `quantizer run` into its folder, or checks the one that is there."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from quantizer.cli.options import Options, write_output
from quantizer.cli.session import OpenedRun
from quantizer.config.document.document import Text
from quantizer.config.document.read import parse_document, read_text
from quantizer.config.forms.compared import compared
from quantizer.config.load import load_text
from quantizer.config.resources import preset_text
from quantizer.config.wording import first_names
from quantizer.errors import UsageError

CONFIG = "quantize_config.json"
"""The name of the config in the folder of a run."""
_KEY = "// quantizer run"
"""The comment that says what a config was made for."""
_MADE_FOR = re.compile(r"--to (\S+) for (.+)")
_MAX_DIFFERENCES = 4


@dataclass(frozen=True)
class MadeConfig:
    """What a config is made for.

    Attributes:
        to: the destination.
        model: the class of the model.
    """

    to: str
    model: str

    @property
    def comment(self) -> str:
        """Return the comment in the config."""
        return f"--to {self.to} for {self.model}"


def config_file(options: Options, made: MadeConfig, preset: str, opened: OpenedRun) -> str:
    """Return the path of the config of a run; write it if there is none.

    Args:
        options: of the run. With `--overwrite`, a config in the folder is written anew.
        made: what the config is for.
        preset: the preset to start from.
        opened: the model, which the config is fitted to.

    Raises:
        ConfigError: the config that is there cannot be read.
        UsageError: it was made for another destination or model, or cannot be written.
    """
    if options.config_file is not None:
        return options.config_file
    path = Path(options.output_dir) / CONFIG
    text = _text(preset, made)
    if path.exists() and not options.overwrite:
        _require_same(path, made, text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(str(path), text)
    return str(path)


def _text(preset: str, made: MadeConfig) -> str:
    """Return the text of a config: the preset with the comment below its own."""
    text = preset_text(preset)
    own_comment = re.search(r'^  "//": .*\n', text, re.MULTILINE)
    start = own_comment.end() if own_comment else text.index("{\n") + 2
    line = f"  {json.dumps(_KEY)}: {json.dumps(made.comment)},\n"
    return text[:start] + line + text[start:]


def _require_same(path: Path, made: MadeConfig, text: str) -> None:
    """Raise `UsageError` if a config was made for another destination or model.

    A config without the comment was written by the user, and is taken.
    """
    source = read_text(path)
    comment = parse_document(source).value.get(_KEY)
    match = _MADE_FOR.fullmatch(str(comment))
    if match is None or comment == made.comment:
        return
    to, model = match.groups()
    if model != made.model:
        message = f"{path} was made for {model}, and this model is {made.model}"
    else:
        message = f"{path} was made for --to {to}, not for --to {made.to}"
        message += _differences(source, text)
    raise UsageError(
        message, help="choose another folder with -o, or write a new config with --overwrite"
    )


def _differences(source: Text, text: str) -> str:
    """Return the end of a sentence with the values that differ from a new config."""
    before = load_text(source).config
    after = load_text(Text("new", text)).config
    if before is None or after is None:
        return ""
    if before.form != after.form:
        return f", which has the {after.form} form"
    values = []
    for key, (old, new) in compared(before, after).items():
        values.append(f"{key} is {json.dumps(old)} instead of {json.dumps(new)}")
    return f": {first_names(values, _MAX_DIFFERENCES)}" if values else ""
