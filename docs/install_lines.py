"""Write the lines of README and documentation that install the package.

Until an index has a release, they work in a clone of this repository.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

PUBLISHED = False
"""Whether an index has a release. It is set before the first one (docs/releasing.md)."""

ROOT = Path(__file__).parents[1]
NO_ADDRESS = "ADDRESS_OF_YOUR_CLONE"
WIDEST_COMMAND = 96
"""So many characters of a command fit on a page of the site."""

_COMMAND = re.compile(
    r"(?P<tick>`?)(?P<pip>[\w/]*pip install )(?P<pinned>-c constraints\.txt )?"
    r"'(?:\.|quantizer-torch)(?P<extras>\[[a-z,]+\])'(?P<index> --extra-index-url [^\s`]+)?"
    r"(?P=tick)(?:  # in a clone of .*| in a clone\b)?"
)
"""A command in a block, which may end in a comment, or in a sentence."""
_FROM_AN_ADDRESS = re.compile(r"(quantizer-torch(?:\[[a-z,]+\])?) @ git\+[^\s'\"]+")
_GIT_CLONE = re.compile(r"git clone \S+ && cd")
_PASSAGE = re.compile(
    r"<!-- until there is (a release|an address) -->(.*?)<!-- end -->", re.DOTALL
)
_CLONE = re.compile(r"a clone of (?:this repository|https://\S+[^\s.,])")


def repository() -> str:
    """Return the address that others can clone, or nothing while there is none.

    It is `Repository` in `[project.urls]` of pyproject.toml.
    """
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    found = re.search(r'^Repository = "(.+)"$', project, re.MULTILINE)
    if found is None:
        return ""
    return found[1]


def with_install_lines(page: str, *, published: bool, address: str) -> str:
    """Return a page with the lines that work now.

    Args:
        page: its Markdown.
        published: whether an index has a release.
        address: of the repository, or nothing.

    >>> print(with_install_lines("pip install '.[llm]'", published=False, address=""))
    pip install -c constraints.txt '.[llm]'  # in a clone of this repository
    >>> print(with_install_lines("pip install '.[llm]'", published=True, address=""))
    pip install 'quantizer-torch[llm]'
    """
    clone = f"a clone of {address or 'this repository'}"
    page = _COMMAND.sub(partial(_command, published=published, clone=clone), page)
    page = _GIT_CLONE.sub(f"git clone {address or 'URL'} && cd", page)
    if published:
        page = _FROM_AN_ADDRESS.sub(r"\1", page)
    else:
        page = _FROM_AN_ADDRESS.sub(rf"\1 @ git+{address or NO_ADDRESS}", page)
    ended = {"a release": published, "an address": published or bool(address)}
    return _PASSAGE.sub(lambda passage: _passage(passage, ended, clone), page)


def _command(found: re.Match[str], *, published: bool, clone: str) -> str:
    tick, pip, extras = found["tick"], found["pip"], found["extras"]
    index = found["index"] or ""
    if published:
        return f"{tick}{pip}'quantizer-torch{extras}'{index}{tick}"
    pinned = found["pinned"] or ""
    if "llm" in extras:
        # Other versions of transformers do not read each checkpoint
        pinned = "-c constraints.txt "
    command = f"{tick}{pip}{pinned}'.{extras}'{index}{tick}"
    if tick:
        return f"{command} in a clone"
    commented = f"{command}  # in {clone}"
    if len(commented) > WIDEST_COMMAND:
        return command
    return commented


def _passage(found: re.Match[str], ended: dict[str, bool], clone: str) -> str:
    until, text = found.groups()
    if ended[until]:
        return ""
    text = _CLONE.sub(clone, text)
    return f"<!-- until there is {until} -->{text}<!-- end -->"
