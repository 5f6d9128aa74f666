"""Runs the worked examples of schemas/worked_examples.json, each with its config as it was and
as it is changed.

Run `python docs/worked_examples.py [KEY …]` from the checkout to write down what they print
now, then docs/generate.py. Tests compare with what was written down.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.cli.main import run_command

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "schemas" / "worked_examples.json"


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the changed keys in it, block by block; lists are replaced."""
    inner = {
        key: merged(base[key], value)
        for key, value in change.items()
        if isinstance(value, dict) and key in base
    }
    return {**base, **change, **inner}


def configs(example: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The config before and after the change."""
    start = json.loads((ROOT / example["config"]).read_text("utf-8"))
    start = {key: value for key, value in start.items() if key != "$schema"}
    before = merged(start, example.get("both", {}))
    return {"before": before, "after": merged(before, example["change"])}


def arguments(command: str, folder: Path) -> list[str]:
    """The words after `quantizer`, with files of this checkout and results in the folder."""
    words = [
        str(ROOT / word) if word.startswith("examples/") else word
        for word in shlex.split(command)[1:]
    ]
    words = [str(folder / word) if word == "changed.json" else word for word in words]
    return (
        [*words, "--output_dir", str(folder / "result")] if "--quant_mode" in words else words
    )


def printed(example: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The lines of both streams that the example is about, in the order of printing, columns
    two spaces apart.
    """
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "changed.json").write_text(json.dumps(config, indent=2), "utf-8")
        for command in example["commands"]:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                run_command(arguments(command, folder))
    text = re.sub(r" {2,}", "  ", output.getvalue().replace("█", "")).replace(f"{name}/", "")
    lines = [line.strip() for line in text.splitlines()]
    return [
        line for line in lines if any(re.search(pattern, line) for pattern in example["lines"])
    ]


def main(*keys: str) -> None:
    """Write down what the examples of these keys print; of all without a key."""
    examples = json.loads(EXAMPLES.read_text("utf-8"))
    for key in keys or examples:
        for when, config in configs(examples[key]).items():
            examples[key][when] = printed(examples[key], config)
    EXAMPLES.write_text(json.dumps(examples, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
