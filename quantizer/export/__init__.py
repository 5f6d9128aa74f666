"""Which deployment files there are. Imports no torch, so that the command line can list
them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from quantizer.calibration.events import NOBODY, Events, Stage
from quantizer.config.wording import shortened
from quantizer.errors import ModelError, UsageError, VerificationError, pip_line

if TYPE_CHECKING:
    from pathlib import Path

    from quantizer.calibration.solution import Solution
    from quantizer.config.model import QuantizationSpec
    from quantizer.export.agreement import Verification
    from quantizer.export.deployment import Deployment
    from quantizer.graph.ir import Graph
    from quantizer.plan.model import Key, Plan

FOLDER = "export"


@dataclass(frozen=True)
class Exporter:
    """One kind of file: `function` ("module:name") writes it, `needs` are packages that the
    extra `extra` installs.

    What the target cannot hold, the module's function `refusals(graph, specs, opset)` gives, if
    there is one: from specs alone, so that it is known before calibration; what its runtime
    rounds besides, `as_run(graph, solution)`. `for_transformers` says that it takes models of
    transformers alone; `is_folder` that it writes a folder, which the module's
    `remove(deployment, path)` removes; `by_tensor` that it needs no more than one weight in
    memory at a time.
    """

    function: str
    suffix: str
    needs: tuple[str, ...] = ()
    extra: str = ""
    is_folder: bool = False
    for_transformers: bool = False
    by_tensor: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why a target cannot hold a tensor, the `role` of a `layer`, or a whole layer, or without
    one the network.

    `why` goes on with what stands before it, as in "input of conv1 has a dynamic range"; `help`
    is what to change.
    """

    why: str
    help: str
    layer: str = ""
    role: str = ""


EXPORTERS: dict[str, Exporter] = {
    "onnx": Exporter(
        "quantizer.export.onnx.exporter:export",
        ".onnx",
        ("onnx", "onnxruntime", "onnxscript"),
        "onnx",
    ),
    "pt2": Exporter("quantizer.export.torch_export.pt2:export", ".pt2"),
    "pt2_float": Exporter("quantizer.export.torch_export.pt2_float:export", ".float.pt2"),
    "safetensors": Exporter(
        "quantizer.export.safetensors:export", ".safetensors", by_tensor=True
    ),
    "compressed-tensors": Exporter(
        "quantizer.export.compressed_tensors.exporter:export",
        "-compressed-tensors",
        ("transformers", "compressed_tensors"),
        "llm",
        is_folder=True,
        for_transformers=True,
        by_tensor=True,
    ),
    "gguf": Exporter(
        "quantizer.export.gguf.exporter:export",
        ".gguf",
        ("transformers", "accelerate", "gguf"),
        "llm",
        for_transformers=True,
        by_tensor=True,
    ),
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
                f"--deploy {target} needs {', '.join(missing)}, which this Python does not "
                "have",
                help=pip_line(EXPORTERS[target].extra),
            )


def refusals(
    target: str, graph: Graph, specs: Mapping[Key, QuantizationSpec], opset: int
) -> list[Refusal]:
    """What a target cannot express, as far as can be told without running the network; `opset`
    is for ONNX.
    """
    module = importlib.import_module(EXPORTERS[target].function.partition(":")[0])
    return list(module.refusals(graph, specs, opset)) if hasattr(module, "refusals") else []


def planned_refusals(target: str, plan: Plan) -> list[Refusal]:
    """What a target cannot express of a plan; what algorithms will insert is not known yet."""
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    return refusals(target, plan.graph, specs, plan.settings.onnx_opset_version)


def check(target: str, graph: Graph, specs: Mapping[Key, QuantizationSpec], opset: int) -> None:
    """Refuse a network that a target cannot express.

    Raises:
        UsageError: why, with the first tensors it holds for.
    """
    refuse(target, refusals(target, graph, specs, opset))


def refuse(target: str, found: Iterable[Refusal]) -> None:
    """Say what was found, if anything was: of the whole network first, else of tensors, those
    with one reason together.

    Raises:
        UsageError: there are refusals.
    """
    reasons: dict[str, list[str]] = {}
    helps: dict[str, None] = {}
    for each in found:
        if not each.layer:
            raise UsageError(f"--deploy {target} {each.why}", help=each.help)
        reasons.setdefault(each.why, []).append(
            f"{each.role} of {each.layer}" if each.role else each.layer
        )
        helps[each.help] = None
    if reasons:
        texts = [
            shortened(names) + (": each " if names[1:] else " ") + why
            for why, names in reasons.items()
        ]
        raise UsageError(f"--deploy {target}: {'; '.join(texts)}", help="; ".join(helps))


def as_run(targets: Iterable[str], graph: Graph, solution: Solution) -> Solution:
    """The solution with what the runtimes of these targets round besides, for test mode to
    count it.
    """
    for target in targets:
        module = importlib.import_module(EXPORTERS[target].function.partition(":")[0])
        solution = module.as_run(graph, solution) if hasattr(module, "as_run") else solution
    return solution


def export(
    target: str,
    deployment: Deployment,
    path: Path,
    events: Events = NOBODY,
    total: int | None = None,
) -> Verification:
    """Write one file, read it back, and say how far it is from test mode; a file that fails is
    not left there.

    Args:
        events: who follows; the units are batches, of which there are `total`.

    Raises:
        UsageError: the target cannot express what the config asks of a layer; nothing is
            written then.
        ModelError: the target cannot translate a layer.
        VerificationError: the file does not compute what test mode does.
        ResultError: the file cannot be written.
    """
    module, _, name = EXPORTERS[target].function.partition(":")
    exporter = importlib.import_module(module)
    deployment = deployment if EXPORTERS[target].by_tensor else deployment.in_memory()
    try:
        with Stage(events, f"verify {target}", total) as stage:
            verification: Verification = getattr(exporter, name)(
                deployment.followed(stage), path
            )
    except (UsageError, ModelError, VerificationError):
        if EXPORTERS[target].is_folder:
            exporter.remove(deployment, path)
        else:
            for file in _files_of(path):
                file.unlink(missing_ok=True)
        raise
    lost = tuple(f"in test mode already: {text}" for text in deployment.warnings)
    return replace(verification, remarks=(*verification.remarks, *lost))


def size_of(path: Path) -> int:
    """The bytes of a file, with those of tensors that lie beside it, or of the files in a
    folder.
    """
    files = path.iterdir() if path.is_dir() else _files_of(path)
    return sum(file.stat().st_size for file in files if file.exists())


def _files_of(path: Path) -> tuple[Path, Path]:
    """A file, and where its tensors lie if it cannot hold them."""
    return path, path.with_name(f"{path.name}.data")
