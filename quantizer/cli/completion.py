"""Layer names that shells offer. This imports no torch, as people wait for the shell."""

import contextlib
import json
from pathlib import Path

import click

from quantizer.errors import ResultError
from quantizer.storage.opened_files import FileSetKind, open_files

_PLAN = FileSetKind("plan.json", changed="", missing="", again="")
"""The file with the names of layers; a shell needs no other file of a calibration."""
_DAMAGE = (AttributeError, KeyError, OSError, ResultError, TypeError, ValueError)


def layers_of_results(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the module paths of layers in the result folder, if there is one.

    The folder is the one on the command line, else quantize_result in the working directory.
    """
    folder = Path("quantize_result")
    for name in ("output_dir", "folder"):
        if context.params.get(name):
            folder = Path(context.params[name])
    layers: list[str] = []
    with contextlib.suppress(*_DAMAGE):
        opened = open_files(folder, _PLAN, lambda _: {})
        content = opened[_PLAN.index].content()
        plan = json.loads(content)
        for path in plan["paths"].values():
            if path.startswith(incomplete) and path not in layers:
                layers.append(path)
    return layers
