"""Layer names that shells offer. This imports no torch, as people wait for the shell."""

import contextlib
import json
from pathlib import Path
from typing import Any

import click

from quantizer.errors import ResultError
from quantizer.storage.opened_files import SetKind, open_files

_PLAN = SetKind("plan.json", changed="", missing="", again="")
"""The file with the names of layers; a shell needs no other file of a calibration."""
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, ResultError)


def layers_of_results(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the module paths of layers in the result folder, if there is one.

    The folder is the one on the command line, else quantize_result in the working directory.
    """
    folder = ctx.params.get("folder") or ctx.params.get("output_dir") or "quantize_result"
    with contextlib.suppress(*_DAMAGE):
        opened = open_files(Path(folder), _PLAN, lambda _: {})
        paths: dict[str, Any] = json.loads(opened[_PLAN.index].content())["paths"]
        known = dict.fromkeys(map(str, paths.values()))
        return [path for path in known if path.startswith(incomplete)]
    return []
