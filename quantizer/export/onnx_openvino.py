"""Asks OpenVINO, where it is installed, whether it reads an .onnx as test mode computes it. Refuses nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
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

from quantizer.errors import VerificationError
from quantizer.export.acceptance import with_float_figures, worst_of
from quantizer.export.agreement import Agreement, EngineCheck, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.float32 import HALF, widened
from quantizer.export.onnx_layers import LayerCheck
from quantizer.export.onnx_verify import OnnxFile, named_inputs

logger = logging.getLogger(__name__)
SECONDS = 600
"""After which OpenVINO is given up."""
APART = 3
"""Steps between two codes of a layer that rounding does not explain."""
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
        run = _Run.started(Path(folder) / "file", file.source, _inputs(file, deployment))
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
        """Wait for the outputs and return how far they are from test mode's, with a warning where that is too far."""
        try:
            arrays = self.run.outputs()
        except VerificationError as error:
            checked = EngineCheck(self.engine, agrees=False, failure=error.message)
            logger.warning("%s: %s", self.file.name, checked.line)
            return checked
        outputs = [torch.from_numpy(arrays[value.name]) for value in self.file.model.graph.output]
        verification = self._compared(outputs)
        if worst_of(verification, self.deployment) is not None:
            one_call = replace(self.deployment, batches=())
            verification = with_float_figures(verification, lambda *_: outputs, one_call)
        if worst_of(verification, self.deployment) is None:
            return EngineCheck(self.engine, agrees=True, figures=verification)
        checked = EngineCheck(self.engine, agrees=False, figures=verification, layer=self._first_layer())
        logger.warning("%s: %s", self.file.name, checked.line)
        return checked

    @torch.no_grad()
    def _compared(self, outputs: list[Tensor]) -> Verification:
        """Return how far outputs and their parts are from test mode's."""
        deployment = self.deployment
        agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
        recorder = agreement.recorder()
        network = deployment.network()
        made = network.observe(deployment.args, deployment.kwargs, recorder.watchers)
        agreement.add(widened(tensor_leaves(made)), outputs, recorder)
        return agreement.result()

    def _first_layer(self) -> str:
        """Return the first layer whose codes differ by more than rounding, each made of the codes that it reads."""
        if any(node.dtype in HALF for node in self.deployment.graph.nodes):
            return ""
        layers = LayerCheck(self.file.model, self.deployment)
        inputs = _inputs(self.file, self.deployment)
        try:
            folder = self.run.folder.with_name("watched")
            watched = _Run.started(folder, layers.model.SerializeToString(), inputs)
            layers.add(self.deployment.args, self.deployment.kwargs, watched.outputs())
        except VerificationError:
            return ""
        return next((row.layer for row in layers.rows.values() if row.most_steps > APART), "")


@dataclass(frozen=True)
class _Run:
    """A process that runs a model, with its files in `folder`."""

    folder: Path
    process: subprocess.Popen[bytes]

    @classmethod
    def started(cls, folder: Path, model: bytes, inputs: Arrays) -> _Run:
        """Begin to run a serialized model in a folder, which is made."""
        folder.mkdir()
        (folder / "model.onnx").write_bytes(model)
        arrays: dict[str, Any] = dict(inputs)
        np.savez(folder / "inputs.npz", **arrays)
        # As text, so that no module beside the program stands for one that OpenVINO imports.
        command = [sys.executable, "-c", _PROCESS.read_text("utf-8")]
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        return cls(folder, subprocess.Popen(command, cwd=folder, **pipes))

    def outputs(self) -> Arrays:
        """Wait for the outputs, by name.

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
            lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
            raise VerificationError(lines[-1] if lines else "it fails without a message")
        with np.load(self.folder / "outputs.npz") as stored:
            return dict(stored)


def _inputs(file: OnnxFile, deployment: Deployment) -> Arrays:
    names = {value.name for value in file.model.graph.input}
    return named_inputs(names, deployment.args, deployment.kwargs)
