"""Say what installs more of this package, which depends on how it was installed."""

import json
import re
from importlib import metadata
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "quantizer-torch"
"""The name that pip knows. The `quantizer` of PyPI is another project."""


def pip_line(extra: str = "") -> str:
    """Return the command that installs an extra into this installation, or the package again.

    A package that runs in its clone, or that came from a clone, a file or an address, is
    installed from there again. If that is gone, the command installs the packages of the extra.

    Source: PEP 610 (direct_url.json), which pip and uv write except for what an index has.
    """
    checkout = Path(__file__).resolve().parents[1]
    if _is_clone(checkout):
        # pip would replace an editable installation by a copy
        return f"pip install -e {quote(_with_extra(_place(checkout), extra))}"
    distribution = metadata.distribution(DISTRIBUTION)
    origin = distribution.read_text("direct_url.json")
    if origin is None:
        return f"pip install {quote(_with_extra(DISTRIBUTION, extra))}"
    written = json.loads(origin)
    address = written["url"]
    if urlsplit(address).scheme != "file":
        source = written.get("vcs_info")
        if source is not None:
            address = f"{source['vcs']}+{address}@{source['commit_id']}"
        return f"pip install {quote(f'{_with_extra(DISTRIBUTION, extra)} @ {address}')}"
    path = Path(url2pathname(urlsplit(address).path))
    if path.exists() or not extra:
        return f"pip install {quote(_with_extra(_place(path), extra))}"
    packages = _packages(extra, distribution.requires or [])
    return f"pip install {' '.join(map(quote, packages))}"


def _is_clone(folder: Path) -> bool:
    project = folder / "pyproject.toml"
    return project.is_file() and f'name = "{DISTRIBUTION}"' in project.read_text("utf-8")


def _place(path: Path) -> str:
    """Return a folder or file as pip takes it in the current folder."""
    if path == Path.cwd():
        return "."
    return str(path)


def _with_extra(source: str, extra: str) -> str:
    if extra:
        return f"{source}[{extra}]"
    return source


def _packages(extra: str, requirements: list[str]) -> list[str]:
    """Return the packages of an extra, and those of the extras that it names.

    >>> _packages("b", ['x>=1; extra == "a"', 'me[a]; extra == "b"', 'y; extra == "b"'])
    ['x>=1', 'y']
    """
    found = []
    for requirement in requirements:
        package, _, condition = requirement.partition(";")
        if not re.search(rf"""extra == ['"]{extra}['"]""", condition):
            continue
        part = re.fullmatch(r"[\w-]+\[(\w+)\]", package.strip())
        if part is None:
            found.append(package.strip())
        else:
            found += _packages(part[1], requirements)
    return found
