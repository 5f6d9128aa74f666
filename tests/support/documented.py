"""Commands of a docs page, run as they are written: pip install, quantizer …, python -c …."""

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

    extra: str
    quantizing: list[list[str]]
    code: str

    @classmethod
    def under(cls, page: str, heading: str) -> Commands:
        """The first block of commands under a heading."""
        text = (ROOT / "docs" / page).read_text("utf-8").partition(f"\n{heading}\n")[2]
        lines = commands_of(re.findall(r"```\n(.*?)```", text, re.DOTALL)[0])
        assert len(lines) <= 5
        install, *quantizing, ending = map(shlex.split, lines)
        assert (install[:2], ending[:2]) == (["pip", "install"], ["python", "-c"])
        assert all(words[0] == "quantizer" for words in quantizing)
        return cls(install[2], [words[1:] for words in quantizing], ending[2])

    def quantize(self) -> None:
        """Run the calls of quantizer in this process, in the current folder."""
        for words in self.quantizing:
            assert run_command(words) == 0

    def end(self) -> None:
        """Run the Python code."""
        exec(self.code, {})
