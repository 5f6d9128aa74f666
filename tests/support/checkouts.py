"""Copies the files of the checkout, in which a build may write."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from support.runs import ROOT

_FILES = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")


def copied_checkout(folder: Path) -> list[str]:
    """Copy what belongs to the checkout, and return its paths."""
    listed = subprocess.run(_FILES, cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return names
