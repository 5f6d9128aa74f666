"""Commands of a docs page, run as they are written: perhaps pip install, then quantizer …, and
python -c ….
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from quantizer.cli.main import run_command
from support.pages import commands_of
from support.runs import ROOT


@dataclass(frozen=True)
class Commands:
    """At most five: what is installed, the calls of quantizer, and the Python that ends
    them.
    """

    extra: str | None
    quantizing: list[list[str]]
    code: str

    @classmethod
    def under(cls, page: str, heading: str) -> Commands:
        """The first block of commands under a heading."""
        text = (ROOT / "docs" / page).read_text("utf-8").partition(f"\n{heading}\n")[2]
        lines = commands_of(re.findall(r"```\n(.*?)```", text, re.DOTALL)[0])
        assert len(lines) <= 5
        *quantizing, ending = (shlex.split(line, comments=True) for line in lines)
        extra = None
        if quantizing[0][:2] == ["pip", "install"]:
            extra = quantizing.pop(0)[-1]
        assert ending[:2] == ["python", "-c"]
        assert all(words[0] == "quantizer" for words in quantizing)
        return cls(extra, [words[1:] for words in quantizing], ending[2])

    def quantize(self) -> None:
        """Run the calls of quantizer in this process, in the current folder."""
        for words in self.quantizing:
            assert run_command(words) == 0

    def end(self) -> None:
        """Run the Python code."""
        exec(self.code, {})
