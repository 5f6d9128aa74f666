"""Checks whether OpenVINO, if installed, reads an .onnx as test mode computes it.

It refuses nothing.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.acceptance import engine_check, require_success, started
from quantizer.export.agreement import EngineCheck
from quantizer.export.deployment import HALF, Deployment
from quantizer.export.onnx.verify import LayerCheck, OnnxFile, named_inputs

EngineSettings = Mapping[str, str | int]
"""How OpenVINO compiles a model."""
# Rounding explains at most so many steps between two codes of a layer.
_MAX_ROUNDING_STEPS = 3
# The check is how the file is read, not how coarsely it is computed. Without these settings
# OpenVINO computes in bfloat16 where a processor can. Otherwise it rounds floats that are
# multiplied by uint8 weights to 8 bits, in groups.
EXACT_SETTINGS: EngineSettings = {
    "INFERENCE_PRECISION_HINT": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
DEFAULT_SETTINGS: EngineSettings = {}
Arrays = dict[str, NDArray[Any]]


def installed_openvino() -> str | None:
    """Return OpenVINO's name with its version; None if it is not installed."""
    try:
        return f"OpenVINO {version('openvino')}"
    except PackageNotFoundError:
        return None


@contextmanager
def openvino_started(
    file: OnnxFile, deployment: Deployment
) -> Iterator[Callable[[], EngineCheck] | None]:
    """Start to run a file on the deployment's call, in parallel to the `with` statement's body.

    Yields what waits for the outputs and returns how far they are from test mode's. None if
    OpenVINO is not installed, or the file is too large to be held twice.
    """
    engine = installed_openvino()
    if engine is None or not isinstance(file.source, bytes):
        yield None
        return
    model = file.model
    with TemporaryDirectory() as name:
        folder = Path(name)
        inputs = named_inputs(model, deployment, deployment.call)
        settings = [EXACT_SETTINGS, DEFAULT_SETTINGS]
        run = _Run.started(folder / "file", file.source, inputs, settings)

        def outputs() -> list[list[Tensor]]:
            """Return the outputs in order, with each of the settings."""
            names = [value.name for value in model.graph.output]
            return [
                [torch.from_numpy(arrays[name]) for name in names] for arrays in run.outputs()
            ]

        with run.process:
            try:
                find = partial(first_layer_that_differs, model, deployment, folder)
                yield partial(engine_check, engine, file.name, deployment, outputs, find)
            finally:
                # In case nobody waited for it.
                run.process.kill()


def first_layer_that_differs(model: ModelProto, deployment: Deployment, folder: Path) -> str:
    """Return the first layer whose codes differ by more than rounding; empty if none is found.

    Each is computed from the codes that it reads.

    Args:
        model: an ONNX model.
        deployment: whose call is run.
        folder: in which a folder for the run is made.
    """
    if any(node.dtype in HALF for node in deployment.graph.nodes):
        return ""
    layers = LayerCheck(model, deployment)
    inputs = named_inputs(model, deployment, deployment.call)
    try:
        content = layers.model.SerializeToString()
        watched = _Run.started(folder / "watched", content, inputs, [EXACT_SETTINGS])
        (codes,) = watched.outputs()
        layers.add(deployment.call, codes)
    except VerificationError:
        return ""
    rows = layers.rows.values()
    return next((row.layer for row in rows if row.most_steps > _MAX_ROUNDING_STEPS), "")


@dataclass(frozen=True)
class _Run:
    """A process that runs a model, with its files in `folder`.

    Attributes:
        stored: the files of outputs that the process writes, one for each settings.
    """

    folder: Path
    process: subprocess.Popen[str]
    stored: tuple[str, ...]

    @classmethod
    def started(
        cls, folder: Path, model: bytes, inputs: Arrays, settings: Sequence[EngineSettings]
    ) -> _Run:
        """Create the folder and start to run a serialized model with each of the settings."""
        folder.mkdir()
        (folder / "model.onnx").write_bytes(model)
        arrays: dict[str, Any] = dict(inputs)
        np.savez(folder / "inputs.npz", **arrays)
        runs = {f"outputs_{index}.npz": dict(chosen) for index, chosen in enumerate(settings)}
        (folder / "runs.json").write_text(json.dumps(runs), "utf-8")
        process = started(_PROGRAM, folder)
        return cls(folder, process, tuple(runs))

    def outputs(self) -> list[Arrays]:
        """Wait for the outputs, by name, with each of the settings.

        Raises:
            VerificationError: OpenVINO cannot load the model or run it.
        """
        require_success(self.process)
        every: list[Arrays] = []
        for path in self.stored:
            with np.load(self.folder / path) as arrays:
                every.append(dict(arrays))
        return every


def _run_openvino() -> None:
    """Run `model.onnx` in OpenVINO, as a program of its own: some files crash its process.

    It works in the folder that it is started in. It reads `inputs.npz`, and `runs.json` with
    the settings of each run by the file to write. That file has the outputs by the names of
    tensors. It has only the names of its own imports, so that it starts at once.
    """
    import json
    from pathlib import Path

    import numpy as np
    import openvino

    core = openvino.Core()
    known = set(core.get_property("CPU", "SUPPORTED_PROPERTIES"))
    for path, settings in json.loads(Path("runs.json").read_text("utf-8")).items():
        known_settings = {name: settings[name] for name in settings if name in known}
        compiled = core.compile_model("model.onnx", "CPU", known_settings)
        names = [value.get_any_name() for value in compiled.inputs]
        with np.load("inputs.npz") as inputs:
            results = compiled({name: inputs[name] for name in names})
        values = compiled.outputs
        arrays = {name: results[value] for value in values for name in value.get_names()}
        np.savez(path, **arrays)


_PROGRAM = f"{getsource(_run_openvino)}\n_run_openvino()"
