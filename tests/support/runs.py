"""Runs the command line in this process, for tests that look at its results."""

from __future__ import annotations

import filecmp
import re
from pathlib import Path

from quantizer.cli.main import run_command

ROOT = Path(__file__).parents[2]
DIGITS = str(ROOT / "examples" / "digits.py")
EXAMPLE = str(ROOT / "configs" / "example.json")


def calibrate(
    folder: Path,
    *more: str,
    model: str = DIGITS,
    config: str | None = EXAMPLE,
    quiet: bool = True,
) -> int:
    """Calibrate on a few samples, other models than the digits without a config; returns the
    exit code.
    """
    given = (
        ["--config_file", config] if config and (model == DIGITS or config != EXAMPLE) else []
    )
    return run_command(
        [
            "--quant_mode",
            "calib",
            "--model",
            model,
            "--output_dir",
            str(folder),
            *(["-q"] if quiet else []),
            *given,
            "--subset_len",
            "64",
            *more,
        ]
    )


def page_without_place(page: Path) -> bytes:
    """Return a report.html whose commands do not say where the results and other files are."""
    content = re.sub(rb" --(output|output_dir|report_dir) [^\s<]+", b"", page.read_bytes())
    return re.sub(rb"(?<= )/[\w./-]+/", b"", content)


def differing(one: Path, other: Path) -> set[str]:
    """Return the files of two result folders that are not the same, but for those that say how
    a run was, and for the folder in the commands of the pages.
    """
    names = {
        path.name for folder in (one, other) for path in folder.iterdir() if path.is_file()
    }
    _, mismatch, missing = filecmp.cmpfiles(one, other, names, shallow=False)
    found = {*mismatch, *missing} - {"run.json", "run.log", ".quantizer.json"}
    page = "report.html"
    if page in mismatch and page_without_place(one / page) == page_without_place(other / page):
        found.remove(page)
    return found


def check(folder: Path, *more: str, model: str = DIGITS, quiet: bool = True) -> int:
    """Run test mode on a few images; returns the exit code."""
    return run_command(
        [
            "--quant_mode",
            "test",
            "--model",
            model,
            "--output_dir",
            str(folder),
            *(["-q"] if quiet else []),
            "--subset_len",
            "64",
            *more,
        ]
    )
