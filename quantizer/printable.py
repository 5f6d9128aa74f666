"""Makes texts from elsewhere safe to show: names of files, weights and layers steer no terminal
and no CI log.
"""

import json
import re
from typing import Any

_COMMAND = re.compile(r"^(\s*):(?=:)")
"""How a workflow command of GitHub begins; it takes none that stands behind something else."""
_OLD_COMMAND = re.compile(r"#(?=#\w*\[)")
"""How a command begins that is looked for anywhere in a line: `##[error]`, `##vso[...]`,
`##teamcity[...]`.
"""


def one_line(text: str) -> str:
    r"""Return the text as one line that is only shown, whatever is in it.

    Line ends, control characters and those that change the direction of writing become escapes
    of Python's.

    >>> print(one_line("conv\n::error::all is well\x1b[2J"))
    conv\n::error::all is well\x1b[2J
    >>> print(one_line("::error::all is well"))
    \x3a:error::all is well
    """
    if not text.isprintable():
        text = "".join(
            character if character.isprintable() else _escape(character) for character in text
        )
    text = _COMMAND.sub(r"\1\\x3a", text)
    return _OLD_COMMAND.sub(r"\\x23", text)


def lines(text: str) -> str:
    """Return a text whose line ends are meant, such as a traceback, line by line as `one_line`
    does.
    """
    return "\n".join(map(one_line, text.split("\n")))


def json_text(value: Any) -> str:
    r"""Return sorted, readable JSON that is safe to show: escapes of JSON's stand for the same
    characters.

    >>> print(json_text("a\u202eb"))
    "a\u202eb"
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    # Outside of its texts JSON has line ends and spaces alone.
    parts = (line if line.isprintable() else _as_json(line) for line in text.split("\n"))
    return _OLD_COMMAND.sub(r"\\u0023", "\n".join(parts))


def _as_json(line: str) -> str:
    texts = []
    for character in line:
        if character.isprintable():
            texts.append(character)
        elif ord(character) <= 0xFFFF:
            texts.append(f"\\u{ord(character):04x}")
        else:
            texts.append(json.dumps(character)[1:-1])
    return "".join(texts)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
