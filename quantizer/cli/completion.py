"""What shells offer for options that are names of layers. Imports no torch, as people wait for
it.
"""

import contextlib
import json
from pathlib import Path

import click

from quantizer.cli.trace_cache import known_layers
from quantizer.errors import ResultError
from quantizer.storage.opened_files import SetKind, open_files

_PLAN = SetKind("plan.json", changed="", missing="", again="")
"""The file with the names of layers; what a shell offers needs no more of a calibration."""


def layers_of_model(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Layers of `--model`, once a command has traced it; without one, of the model traced last
    in this folder.
    """
    return [
        name for name in known_layers(ctx.params.get("model")) if name.startswith(incomplete)
    ]


def layers_of_results(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Layers in the result folder, if there is one."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, ResultError):
        folder = Path(ctx.params.get("folder") or "quantize_result")
        opened = open_files(folder, _PLAN, lambda index: {})
        paths = json.loads(opened[_PLAN.index].content())["paths"]
        return [path for path in paths.values() if path.startswith(incomplete)]
    return []
