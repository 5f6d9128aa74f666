"""Say what to do about a config file that is not there."""

from pathlib import Path

from quantizer.config.resources import presets
from quantizer.config.wording import closest_word
from quantizer.plugins import if_command


def help_for_missing(path: Path) -> str:
    """Return the name of a neighbour that may be meant, or how to write a preset."""
    if path.stem in presets():
        words = f"`quantizer init --preset {path.stem} -o {path.stem}.json` writes this preset"
        return if_command("init", words)
    try:
        neighbours = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".json"]
    except (OSError, ValueError):
        neighbours = []
    name = closest_word(path.name, neighbours)
    if name:
        return f'did you mean "{path.parent / name}"?'
    return if_command("init", "`quantizer init` writes a config to start from")
