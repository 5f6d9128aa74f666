"""Finds the schemas and presets, in a checkout and in an installed wheel alike. Reads nothing
else.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from quantizer.errors import QuantizerError

_PACKAGE = Path(__file__).parents[1]


def resource(folder: str, name: str) -> Path:
    """The shipped file `folder/name`; folders are "schemas" and "configs".

    A wheel has them inside the package; in a checkout they lie beside it, where editors and
    readers look for them.
    """
    for root in (_PACKAGE, _PACKAGE.parent):
        if (root / folder / name).is_file():
            return root / folder / name
    raise QuantizerError(
        f"the file {folder}/{name} is missing from this installation",
        help="pip install --force-reinstall quantizer-torch",
    )


def presets() -> tuple[str, ...]:
    """The names of the shipped configs."""
    return tuple(
        sorted(path.stem for path in resource("configs", "default.json").parent.glob("*.json"))
    )


@cache
def load_resource(folder: str, name: str) -> Any:
    """The parsed JSON of a shipped file; shared, so never to be changed."""
    return json.loads(resource(folder, name).read_text("utf-8"))
