"""Which deployment files there are. Imports no torch, so that the command line can list them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from quantizer.engine.events import NOBODY, Events, Stage
from quantizer.errors import ModelError, UsageError, VerificationError, pip_line

if TYPE_CHECKING:
    from pathlib import Path

    from quantizer.engine.solution import Solution
    from quantizer.export.agreement import Verification
    from quantizer.export.deployment import Deployment
    from quantizer.graph.ir import Graph

FOLDER = "export"
ACTIVATIONS = ("uint8", "int8")
"""The integers that a .pt2 can have for activations; the first by default."""


@dataclass(frozen=True)
class Exporter:
    """One kind of file: `function` ("module:name") writes it, `needs` are packages that the extra `extra` installs."""

    function: str
    suffix: str
    needs: tuple[str, ...] = ()
    extra: str = ""


EXPORTERS: dict[str, Exporter] = {
    "onnx": Exporter("quantizer.export.onnx_qdq:export", ".onnx", ("onnx", "onnxruntime", "onnxscript"), "onnx"),
    "pt2": Exporter("quantizer.export.torch_pt2:export", ".pt2"),
    "pt2_float": Exporter("quantizer.export.torch_pt2_float:export", ".float.pt2"),
    "safetensors": Exporter("quantizer.export.safetensors:export", ".safetensors"),
}


def require_extras(targets: Iterable[str]) -> None:
    """Refuse targets whose packages are not installed.

    Raises:
        UsageError: naming the packages and how to install them.
    """
    for target in targets:
        missing = [name for name in EXPORTERS[target].needs if find_spec(name) is None]
        if missing:
            raise UsageError(
                f"--deploy {target} needs {', '.join(missing)}, which this Python does not have",
                help=pip_line(EXPORTERS[target].extra),
            )


def check(target: str, graph: Graph, solution: Solution, opset: int) -> None:
    """Refuse a network that a target cannot express, as far as can be told without running it.

    Raises:
        UsageError: why, with the first tensors it holds for.
    """
    module = importlib.import_module(EXPORTERS[target].function.partition(":")[0])
    if hasattr(module, "check"):
        module.check(graph, solution, opset)


def export(
    target: str, deployment: Deployment, path: Path, events: Events = NOBODY, total: int | None = None
) -> Verification:
    """Write one file, read it back, and say how far it is from test mode; a file that fails is not left there.

    Args:
        events: who follows; the units are batches, of which there are `total`.

    Raises:
        UsageError: the target cannot express what the config asks of a layer; nothing is written then.
        ModelError: the target cannot translate a layer.
        VerificationError: the file does not compute what test mode does.
        ResultError: the file cannot be written.
    """
    module, _, name = EXPORTERS[target].function.partition(":")
    write = getattr(importlib.import_module(module), name)
    try:
        with Stage(events, f"verify {target}", total) as stage:
            if deployment.batches:
                batches = stage.counted(batch.to("cpu") for batch in deployment.batches)
                deployment = replace(deployment, batches=batches)
            verification: Verification = write(deployment, path)
    except (UsageError, ModelError, VerificationError):
        path.unlink(missing_ok=True)
        raise
    return verification
