"""What a plain `pip install` gives, without torch: run by `make test-wheel` with the Python it
was installed for.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

WITHOUT_TORCH = (
    "init --strategy weight_only -o net.json",
    "validate net.json",
    "convert net.json -o other.json",
    "validate other.json",
    "explain QZ301",
    "explain round_mode",
    "schema hierarchical",
    "--help",
)
PAGES = """
from quantizer.config.pages import key_names, key_page, rules_page
print(len(rules_page()), sum(len(key_page(key)) for key in key_names()))
"""
"""What `quantizer explain` prints for each key and code, which the wheel has no files of."""
NEEDS_TORCH = (
    "plan --config_file net.json --model my_model.py",
    "--quant_mode calib --model my_model.py",
)


def main() -> None:
    """Run each command in an empty folder; the first surprise ends it."""
    folder = Path(sys.executable).parent
    size = sum(
        path.stat().st_size
        for path in folder.parent.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    print(f"the environment: {size / 1e6:.0f} MB")
    pages = [sys.executable, "-c", PAGES]
    subprocess.run(pages, check=True)
    with tempfile.TemporaryDirectory() as empty:
        for line, expected in [
            *((line, 0) for line in WITHOUT_TORCH),
            *((line, 2) for line in NEEDS_TORCH),
        ]:
            done = subprocess.run(
                [folder / "quantizer", *line.split()],
                cwd=empty,
                capture_output=True,
                text=True,
                check=False,
            )
            print(f"quantizer {line}: exit code {done.returncode}")
            assert done.returncode == expected, done.stderr
            if expected:
                print(done.stderr, end="")
                assert ".whl[torch]'" in done.stderr, done.stderr


if __name__ == "__main__":
    main()
