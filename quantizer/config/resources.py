"""Find the schemas and presets, in a checkout and in an installed wheel alike."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from quantizer.config.wording import closest_word
from quantizer.errors import QuantizerError
from quantizer.plugins import if_command
from quantizer.tables import HAS_FOREIGN_ROWS

_PACKAGE = Path(__file__).parents[1]


def resource(folder: str, name: str) -> Path:
    """Return the path of a shipped file; folders are "schemas", "configs" and "examples".

    A wheel has them inside the package; in a checkout they are next to it, where editors and
    readers look for them.

    Raises:
        QuantizerError: the installation lacks the file.
    """
    for root in (_PACKAGE, _PACKAGE.parent):
        path = root / folder / name
        if path.is_file():
            return path
    # Only a damaged installation needs it
    from quantizer.installation import pip_line

    raise QuantizerError(
        f"the file {folder}/{name} is missing from this installation",
        help=f"`{pip_line()} --force-reinstall --no-deps` repairs it",
    )


def presets() -> tuple[str, ...]:
    """Return the names of the shipped configs."""
    folder = resource("configs", "default.json").parent
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


def help_for_missing(path: Path) -> str:
    """Return the remedy for a missing config file: a similar name next to it, or a preset."""
    if path.stem in presets():
        words = f"`quantizer init --preset {path.stem} -o {path.stem}.json` writes this preset"
        return if_command("init", words)
    try:
        neighbours = [entry.name for entry in path.parent.glob("*.json") if entry.is_file()]
    except (OSError, ValueError):
        neighbours = []
    name = closest_word(path.name, neighbours)
    if name:
        return f'did you mean "{path.parent / name}"?'
    return if_command("init", "`quantizer init` writes a config to start from")


@cache
def load_resource(folder: str, name: str) -> Any:
    """Return the parsed JSON of a shipped file, a schema with the words of plug-ins; shared, so
    never to be changed.
    """
    content = json.loads(resource(folder, name).read_text("utf-8"))
    if not HAS_FOREIGN_ROWS:
        return content
    # The shipped schemas have all other words
    from quantizer.config.schema_words import with_words

    return with_words(name, content)


def preset_text(name: str) -> str:
    """Return the text of a preset, with the URL of its schema instead of the path."""
    text = resource("configs", f"{name}.json").read_text("utf-8")
    path = load_resource("configs", f"{name}.json").get("$schema")
    if path is None:
        return text
    address = load_resource("schemas", Path(path).name)["$id"]
    return text.replace(path, address)
