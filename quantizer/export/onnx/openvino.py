"""Asks OpenVINO, where it is installed, whether it reads an .onnx as test mode computes it.
Refuses nothing.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantizer.comparison.output_comparison import Recorder
from quantizer.errors import VerificationError
from quantizer.export.acceptance import with_float_figures, worst_of
from quantizer.export.agreement import Agreement, EngineCheck, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.float32 import HALF, widened
from quantizer.export.onnx.layers import LayerCheck
from quantizer.export.onnx.verify import OnnxFile, named_inputs

Settings = Mapping[str, str | int]
"""How OpenVINO is to compile a model."""
logger = logging.getLogger(__name__)
SECONDS = 600
"""After which OpenVINO is given up."""
APART = 3
"""Steps between two codes of a layer that rounding does not explain."""
EXACT: Settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""It is asked how the file is read, and not how coarsely it is computed: without these settings
OpenVINO computes in bfloat16 where a processor can, and otherwise rounds what meets uint8
weights in float to 8 bits, in groups.
"""
DEFAULTS: Settings = {}
"""Those of OpenVINO itself."""
_PROCESS = Path(__file__).with_name("openvino_process.py")
Arrays = dict[str, NDArray[Any]]


def installed() -> str | None:
    """Return OpenVINO's name with its version; None if it is not installed."""
    try:
        return f"OpenVINO {version('openvino')}"
    except PackageNotFoundError:
        return None


@contextmanager
def started(file: OnnxFile, deployment: Deployment) -> Iterator[OpenVinoCheck | None]:
    """Begin to run a file on the deployment's call, beside whatever runs meanwhile.

    Yields None where OpenVINO is not installed, or the file is too large to be held twice.
    """
    engine = installed()
    if engine is None or not isinstance(file.source, bytes):
        yield None
        return
    with TemporaryDirectory() as folder:
        run = _Run.started(
            Path(folder) / "file", file.source, _inputs(file, deployment), EXACT, DEFAULTS
        )
        with run.process:
            try:
                yield OpenVinoCheck(engine, file, deployment, run)
            finally:
                run.process.kill()  # where nobody waited for it


@dataclass(frozen=True)
class OpenVinoCheck:
    """A file that OpenVINO is running on the deployment's call."""

    engine: str
    file: OnnxFile
    deployment: Deployment
    run: _Run

    def result(self) -> EngineCheck:
        """Wait for the outputs and return how far they are from test mode's, with a warning
        where that is too far.
        """
        try:
            in_float32, by_default = map(self._tensors, self.run.outputs())
            figures, defaults = self._compared(in_float32, by_default)
        except VerificationError as error:
            checked = EngineCheck(self.engine, agrees=False, failure=error.message)
            logger.warning("%s: %s", self.file.name, checked.line)
            return checked
        figures = self._with_float_figures(figures, in_float32)
        defaults = self._with_float_figures(defaults, by_default)
        reads = worst_of(figures, self.deployment) is None
        agrees = reads and worst_of(defaults, self.deployment) is None
        layer = "" if reads else self._first_layer()
        checked = EngineCheck(
            self.engine, agrees, figures, layer=layer, defaults=defaults, reads=reads
        )
        if not agrees:
            logger.warning("%s: %s", self.file.name, checked.line)
        return checked

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
    def _compared(self, *runs: list[Tensor]) -> list[Verification]:
        """Return how far the outputs of each run, and their parts, are from test mode's.

        Raises:
            VerificationError: an output has another shape.
        """
        deployment = self.deployment
        recorder = Recorder(deployment.outputs)
        network = deployment.network()
        made = network.observe(deployment.args, deployment.kwargs, recorder.watchers)
        expected = widened(tensor_leaves(made))
        verifications: list[Verification] = []
        for outputs in runs:
            self._require_same_shapes(expected, outputs)
            agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
            agreement.add(expected, outputs, recorder)
            verifications.append(agreement.result())
        return verifications

    def _require_same_shapes(self, expected: list[Tensor], outputs: list[Tensor]) -> None:
        for value, ours, theirs in zip(
            self.file.model.graph.output, expected, outputs, strict=True
        ):
            if ours.shape != theirs.shape:
                text = (
                    f"output {value.name} has the shape {list(theirs.shape)}, and "
                    f"{list(ours.shape)} in test mode"
                )
                raise VerificationError(text)

    def _first_layer(self) -> str:
        """Return the first layer whose codes differ by more than rounding, each made of the
        codes that it reads.
        """
        if any(node.dtype in HALF for node in self.deployment.graph.nodes):
            return ""
        layers = LayerCheck(self.file.model, self.deployment)
        inputs = _inputs(self.file, self.deployment)
        try:
            folder = self.run.folder.with_name("watched")
            watched = _Run.started(folder, layers.model.SerializeToString(), inputs, EXACT)
            (codes,) = watched.outputs()
            layers.add(self.deployment.args, self.deployment.kwargs, codes)
        except VerificationError:
            return ""
        return next((row.layer for row in layers.rows.values() if row.most_steps > APART), "")


@dataclass(frozen=True)
class _Run:
    """A process that runs a model, with its files in `folder`."""

    folder: Path
    process: subprocess.Popen[bytes]
    stored: tuple[str, ...]
    """The files of outputs that the process writes, one for each way to run the model."""

    @classmethod
    def started(cls, folder: Path, model: bytes, inputs: Arrays, *settings: Settings) -> _Run:
        """Begin to run a serialized model with each of the settings in a folder, which is
        made.
        """
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
        """Wait for the outputs, by name, of each way that it was to run the model in.

        Raises:
            VerificationError: OpenVINO cannot load the model or run it.
        """
        try:
            _, errors = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            raise VerificationError(f"it does not end within {SECONDS} s") from error
        if self.process.returncode < 0:
            raise VerificationError(f"it crashes with signal {-self.process.returncode}")
        if self.process.returncode:
            lines = [
                line.strip()
                for line in errors.decode(errors="replace").splitlines()
                if line.strip()
            ]
            raise VerificationError(lines[-1] if lines else "it fails without a message")
        every: list[Arrays] = []
        for path in self.stored:
            with np.load(self.folder / path) as arrays:
                every.append(dict(arrays))
        return every


def _inputs(file: OnnxFile, deployment: Deployment) -> Arrays:
    names = {value.name for value in file.model.graph.input}
    return named_inputs(names, deployment.args, deployment.kwargs)
