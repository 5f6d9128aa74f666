"""What a mode found, and how it is shown: the same content as tables for people or as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from quantizer.cli import session
from quantizer.cli.options import Options


@dataclass(frozen=True)
class Outcome:
    """`metrics` are what gates may ask for, `content` is what --json prints, `shown` what people see instead."""

    metrics: Mapping[str, float]
    content: Mapping[str, Any]
    shown: Sequence[RenderableType] = field(default=())


def show(outcome: Outcome, options: Options) -> None:
    """Print the result on stdout."""
    if options.json:
        print(session.as_json(outcome.content))
        return
    console = session.console()
    for item in outcome.shown:
        # Paths and layer names are not markup, and a path is one line however long.
        console.print(Text(item) if isinstance(item, str) else item, soft_wrap=isinstance(item, str))
