"""Checks whether aimet-onnx, if installed, computes what test mode does. It refuses nothing."""

import logging
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.acceptance import with_float_figures, worst_of
from quantizer.export.agreement import Agreement, EngineCheck
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.float32 import to_float32
from quantizer.export.onnx.verify import named_inputs

logger = logging.getLogger(__name__)
_PACKAGE = "aimet-onnx"
_PROCESS = Path(__file__).with_name("aimet_process.py")
_MAX_SECONDS = 600


def installed_aimet() -> str | None:
    """Return the package with its version; None if it is not installed."""
    try:
        return f"{_PACKAGE} {version(_PACKAGE)}"
    except PackageNotFoundError:
        return None


def aimet_check(
    name: str, content: bytes, text: str, deployment: Deployment
) -> EngineCheck | None:
    """Return how aimet-onnx reads the files on the deployment's call; None without it.

    A warning is logged if it computes something else than test mode.

    Args:
        name: stands for the files in messages.
        content: the serialized network.
        text: the content of the file of encodings.
        deployment: what the outputs are compared with.
    """
    engine = installed_aimet()
    if engine is None:
        return None
    try:
        check = _compared(engine, _outputs(content, text, deployment), deployment)
    except VerificationError as error:
        check = EngineCheck(engine, agrees=False, failure=error.message)
    if not check.agrees:
        logger.warning("%s: %s", name, check.line)
    return check


def _outputs(content: bytes, text: str, deployment: Deployment) -> list[Tensor]:
    """Return what aimet-onnx gives for the call.

    Raises:
        VerificationError: it cannot load or run the files.
    """
    model: ModelProto = onnx.load_from_string(content)
    inputs: dict[str, Any] = named_inputs(model, deployment, deployment.args, deployment.kwargs)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.onnx").write_bytes(content)
        (folder / "model.encodings").write_text(text, "utf-8")
        np.savez(folder / "inputs.npz", **inputs)
        # As text, so that no module beside the program stands for one that AIMET imports.
        command = [sys.executable, "-c", _PROCESS.read_text("utf-8")]
        pipes: dict[str, Any] = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        try:
            ended = subprocess.run(
                command, cwd=folder, text=True, timeout=_MAX_SECONDS, check=False, **pipes
            )
        except subprocess.TimeoutExpired as error:
            raise VerificationError(f"it does not end within {_MAX_SECONDS} s") from error
        if ended.returncode:
            last_line = ended.stderr.strip().rpartition("\n")[2]
            raise VerificationError(last_line.strip() or "it crashes")
        with np.load(folder / "outputs.npz") as arrays:
            return [torch.from_numpy(arrays[value.name]) for value in model.graph.output]


def _compared(engine: str, outputs: list[Tensor], deployment: Deployment) -> EngineCheck:
    agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
    recorder = agreement.recorder()
    network = deployment.network()
    with torch.no_grad():
        result = network.observe(deployment.args, deployment.kwargs, recorder.watchers)
    agreement.add(to_float32(tensor_leaves(result)), outputs, recorder)
    figures = agreement.result()
    if worst_of(figures, deployment) is not None:
        one_call = replace(deployment, batches=())
        figures = with_float_figures(figures, lambda *_: outputs, one_call)
    agrees = worst_of(figures, deployment) is None
    return EngineCheck(engine, agrees, figures, reads=agrees)
