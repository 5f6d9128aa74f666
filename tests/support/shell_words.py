"""Options of the shell that a text names."""

import re


def options_in(text: str) -> list[str]:
    """Return the options in a text. Those of commands, which are in backticks, do not count."""
    return re.findall(r"(?<![\w-])--[a-z]\w*", re.sub(r"`[^`]*`", "", text))
