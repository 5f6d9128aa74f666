"""How long `quantizer --help`, `quantizer validate` and importing the API take, as ratios to
`import torch`, each in a fresh process.

`python benchmarks/bench_startup.py [rounds]`
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

from measure import Part, ratios, report

CONFIG = Path(__file__).parents[1] / "configs" / "example.json"
TARGETS = {"--help": 1 / 3, "validate": 1 / 3, "import": 1.1}
API = "from quantizer import Config, ModelQuantizer"


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    python = (sys.executable, "-m", "quantizer")
    parts: dict[str, Part] = {
        "--help": run(*python, "--help"),
        "validate": run(*python, "validate", str(CONFIG)),
        "import": run(sys.executable, "-c", API),
    }
    found = ratios(run(sys.executable, "-c", "import torch"), parts, rounds)
    report("start-up, ratio to python -c 'import torch'", found, TARGETS, {})


def run(*command: str) -> functools.partial[object]:
    """A call that runs the command and throws its output away."""
    return functools.partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
