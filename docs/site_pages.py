"""Make the pages of the site that follow from the package alone. They are in no checkout: the
site is built with them, and a command prints the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# This file is loaded by a hook of the site, by generate.py and by tests.
sys.path.append(str(Path(__file__).parent))

from command_pages import commands_page
from python_page import python_page

from quantizer.config.pages import key_names, key_page, rules_page
from quantizer.config.rules.spec_rules import all_codes

_COMMAND = re.compile(
    r"(?<!\[)`(quantizer explain(?: (?P<topic>\w+))?|quantizer --help|help\(quantizer\))`"
)
_FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_KEYS = re.compile(r"(?<=^## Keys\n).*?(?=^## )", re.DOTALL | re.MULTILINE)


def site_pages() -> dict[str, str]:
    """Return the text of each page, by its place in docs/.

    `quantizer explain KEY` prints the page of a key, and `quantizer explain QZ301` a section of
    rules.md; `quantizer --help` has the commands, and `help(quantizer)` the names of Python.
    """
    pages = {f"config/{key}.md": key_page(key) for key in key_names()}
    pages["rules.md"] = rules_page()
    pages["cli.md"] = commands_page()
    pages["reference.md"] = python_page()
    return pages


def with_links(page: str, text: str) -> str:
    """Return a page whose commands link to the pages that have what they print.

    The page that lists all keys links to the page of each.

    Args:
        page: its place in docs/.
        text: its Markdown.
    """
    if page == "config/README.md":
        text = _KEYS.sub(_with_keys, text)
    up = "../" * page.count("/")
    parts = _FENCED.split(text)
    for index in range(0, len(parts), 2):
        parts[index] = _COMMAND.sub(lambda command: _linked(command, up), parts[index])
    return "".join(parts)


def _linked(command: re.Match[str], up: str) -> str:
    """Return a command as a link, or as it is if no page has what it prints."""
    topic = command["topic"]
    if command[1] == "quantizer --help":
        target = "cli.md"
    elif command[1] == "help(quantizer)":
        target = "reference.md"
    elif topic is None:
        target = "rules.md"
    elif topic in key_names():
        target = f"config/{topic}.md"
    elif topic in all_codes():
        target = f"rules.md#{topic.lower()}"
    else:
        return command[0]
    return f"[{command[0]}]({up}{target})"


def _with_keys(section: re.Match[str]) -> str:
    keys = "|".join(key_names())
    return re.sub(rf"`({keys})`", r"[`\1`](\1.md)", section[0])
