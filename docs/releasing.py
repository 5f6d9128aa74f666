"""Check that a tag can be released: `python docs/releasing.py v0.20.0`, with Python alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# This file is run as a program and loaded by a test.
sys.path.append(str(Path(__file__).parent))

from install_lines import PUBLISHED, ROOT, repository


def faults(tag: str, *, published: bool, address: str) -> Iterator[str]:
    """Yield what has to be changed before a tag is released.

    Args:
        tag: its name.
        published: whether the documentation installs from an index.
        address: of the repository, or nothing.
    """
    source = (ROOT / "quantizer" / "__init__.py").read_text("utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if tag != f"v{version}":
        yield f"the tag is {tag}, and the version in quantizer/__init__.py is {version}"
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        yield f"CHANGELOG.md has no section {version} with a date"
    if not published:
        yield "set PUBLISHED in docs/install_lines.py, and run docs/generate.py"
    if not address:
        yield "write Repository into pyproject.toml, and run docs/generate.py"


def main() -> None:
    """Print the faults of a tag; with one of them, exit with code 1."""
    (tag,) = sys.argv[1:]
    found = list(faults(tag, published=PUBLISHED, address=repository()))
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
