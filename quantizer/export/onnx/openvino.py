"""Checks whether OpenVINO, if installed, reads an .onnx as test mode computes it.

It refuses nothing.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from torch import Tensor

from quantizer.comparison.output_comparison import Recorder
from quantizer.errors import VerificationError, or_without
from quantizer.export.acceptance import with_float_figures, worst_of
from quantizer.export.agreement import Agreement, EngineCheck, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.float32 import HALF, to_float32
from quantizer.export.onnx.layers import LayerCheck
from quantizer.export.onnx.verify import OnnxFile, named_inputs

EngineSettings = Mapping[str, str | int]
"""How OpenVINO compiles a model."""
logger = logging.getLogger(__name__)
_TIMEOUT_SECONDS = 600
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
_PROCESS = Path(__file__).with_name("openvino_process.py")
Arrays = dict[str, NDArray[Any]]


def installed_openvino() -> str | None:
    """Return OpenVINO's name with its version; None if it is not installed."""
    try:
        return f"OpenVINO {version('openvino')}"
    except PackageNotFoundError:
        return None


@contextmanager
def openvino_started(file: OnnxFile, deployment: Deployment) -> Iterator[OpenVinoCheck | None]:
    """Start to run a file on the deployment's call, in parallel to the `with` statement's body.

    Yields None if OpenVINO is not installed, or the file is too large to be held twice.
    """
    engine = installed_openvino()
    if engine is None or not isinstance(file.source, bytes):
        yield None
        return
    with TemporaryDirectory() as folder:
        inputs = _inputs(file, deployment)
        settings = [EXACT_SETTINGS, DEFAULT_SETTINGS]
        run = _Run.started(Path(folder) / "file", file.source, inputs, settings)
        with run.process:
            try:
                yield OpenVinoCheck(engine, file, deployment, run)
            finally:
                # In case nobody waited for it.
                run.process.kill()


@dataclass(frozen=True)
class OpenVinoCheck:
    """A file that OpenVINO is running on the deployment's call."""

    engine: str
    file: OnnxFile
    deployment: Deployment
    run: _Run

    def result(self) -> EngineCheck:
        """Wait for the outputs and return how far they are from test mode's.

        A warning is logged if that is too far.
        """
        try:
            check = self._check()
        except VerificationError as error:
            check = EngineCheck(self.engine, agrees=False, failure=error.message)
        if not check.agrees:
            logger.warning("%s: %s", self.file.name, check.line)
        return check

    def _check(self) -> EngineCheck:
        """Return the comparison with test mode.

        Raises:
            VerificationError: OpenVINO cannot run the file, or an output has another shape.
        """
        in_float32, by_default = map(self._tensors, self.run.outputs())
        figures, defaults = self._compared([in_float32, by_default])
        figures = self._with_float_figures(figures, in_float32)
        defaults = self._with_float_figures(defaults, by_default)
        reads = worst_of(figures, self.deployment) is None
        agrees = reads and worst_of(defaults, self.deployment) is None
        layer = ""
        if not reads:
            folder = self.run.folder.parent
            find = partial(first_layer_that_differs, self.file.model, self.deployment, folder)
            layer = or_without("the first layer that differs", find, "")
        return EngineCheck(
            self.engine, agrees, figures, layer=layer, defaults=defaults, reads=reads
        )

    def _with_float_figures(
        self, verification: Verification, outputs: list[Tensor]
    ) -> Verification:
        """Return a verification with figures against the float network, where they decide."""
        if worst_of(verification, self.deployment) is None:
            return verification
        one_call = replace(self.deployment, batches=())
        return with_float_figures(verification, lambda *_: outputs, one_call)

    def _tensors(self, arrays: Arrays) -> list[Tensor]:
        """Return the outputs in order."""
        return [torch.from_numpy(arrays[value.name]) for value in self.file.model.graph.output]

    @torch.no_grad()
    def _compared(self, runs: list[list[Tensor]]) -> list[Verification]:
        """Return how far the outputs of each run are from test mode's.

        Raises:
            VerificationError: an output has another shape.
        """
        deployment = self.deployment
        recorder = Recorder(deployment.outputs)
        network = deployment.reference
        result = network.observe(deployment.args, deployment.kwargs, recorder.watchers)
        expected = to_float32(tensor_leaves(result))
        verifications: list[Verification] = []
        for outputs in runs:
            self._require_same_shapes(expected, outputs)
            agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
            agreement.add(expected, outputs, recorder)
            verifications.append(agreement.result())
        return verifications

    def _require_same_shapes(self, expected: list[Tensor], outputs: list[Tensor]) -> None:
        values = self.file.model.graph.output
        for value, ours, theirs in zip(values, expected, outputs, strict=True):
            if ours.shape != theirs.shape:
                text = (
                    f"output {value.name} has the shape {list(theirs.shape)}, and "
                    f"{list(ours.shape)} in test mode"
                )
                raise VerificationError(text)


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
    args, kwargs = deployment.args, deployment.kwargs
    inputs = named_inputs(model, deployment, args, kwargs)
    try:
        content = layers.model.SerializeToString()
        watched = _Run.started(folder / "watched", content, inputs, [EXACT_SETTINGS])
        (codes,) = watched.outputs()
        layers.add(args, kwargs, codes)
    except VerificationError:
        return ""
    for row in layers.rows.values():
        if row.most_steps > _MAX_ROUNDING_STEPS:
            return row.layer
    return ""


@dataclass(frozen=True)
class _Run:
    """A process that runs a model, with its files in `folder`.

    Attributes:
        stored: the files of outputs that the process writes, one for each settings.
    """

    folder: Path
    process: subprocess.Popen[bytes]
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
        # As text, so that no module beside the program stands for one that OpenVINO imports.
        command = [sys.executable, "-c", _PROCESS.read_text("utf-8")]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return cls(folder, subprocess.Popen(command, cwd=folder, **pipes), tuple(runs))

    def outputs(self) -> list[Arrays]:
        """Wait for the outputs, by name, with each of the settings.

        Raises:
            VerificationError: OpenVINO cannot load the model or run it.
        """
        try:
            _, errors = self.process.communicate(timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            raise VerificationError(f"it does not end within {_TIMEOUT_SECONDS} s") from error
        if self.process.returncode < 0:
            raise VerificationError(f"it crashes with signal {-self.process.returncode}")
        if self.process.returncode:
            text = errors.decode(errors="replace").strip()
            last_line = text.rpartition("\n")[2].strip()
            raise VerificationError(last_line or "it fails without a message")
        every: list[Arrays] = []
        for path in self.stored:
            with np.load(self.folder / path) as arrays:
                every.append(dict(arrays))
        return every


def _inputs(file: OnnxFile, deployment: Deployment) -> Arrays:
    return named_inputs(file.model, deployment, deployment.args, deployment.kwargs)
