"""The environment of each engine: `.venv-engine-NAME` with the packages of the engine's row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engines.families.consumers import Consumer
from engines.table import Engine

STAMP = "packages.txt"
"""Has the packages that were installed, so that an environment with others is made again."""


def python_of(engine: Engine | Consumer, folder: Path) -> Path:
    """Return the Python of an engine; its environment in `folder` is made if it is not there.

    Raises:
        RuntimeError: pip cannot install the packages.
    """
    if not engine.packages:
        return Path(sys.executable)
    place = folder / f".venv-engine-{engine.environment or engine.name}"
    python = place / "bin" / "python"
    stamp = place / STAMP
    wanted = "\n".join(engine.packages) + "\n"
    if stamp.exists() and stamp.read_text("utf-8") == wanted:
        return python
    print(f"installing {', '.join(engine.packages)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    done = subprocess.run([*install, *engine.packages], capture_output=True, text=True)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise RuntimeError(f"pip cannot install the engine: {last_line}")
    if engine.removed:
        remove = [str(python), "-m", "pip", "uninstall", "-y", "-q", *engine.removed]
        subprocess.run(remove, capture_output=True, check=True)
    # An interrupted install leaves no stamp, so the next call repeats it.
    stamp.write_text(wanted, "utf-8")
    return python
