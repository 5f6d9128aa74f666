"""Runs a model in ONNX Runtime, without optimizations and as its users do, and refuses one that is not test mode's."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime
import torch
from onnx import ModelProto
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.export.agreement import Agreement, Verification, agrees
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.float32 import widened
from quantizer.export.onnx_kernels import kernels

PLAIN, DEFAULT = "ONNX Runtime without optimizations", "a default ONNX Runtime session"
_EXTERNAL = "session.optimized_model_external_initializers_file_name"
_HELP = "--deploy pt2 needs no such runtime; another onnx_opset_version may avoid what this one gets wrong"


def verify_sessions(source: bytes | str, model: ModelProto, deployment: Deployment, name: str) -> Verification:
    """Compare the outputs of a model, serialized or in a file, with test mode's over all calls.

    Raises:
        VerificationError: ONNX Runtime cannot load or run it, or gives other outputs; `name` stands for the file.
    """
    with TemporaryDirectory() as folder:
        optimized = str(Path(folder) / "optimized.onnx")
        sessions = {label: _session(source, label, name, optimized) for label in (PLAIN, DEFAULT)}
        multiplications = kernels(model, optimized, deployment.graph, deployment.solution)
    agreements = {label: Agreement("outputs", deployment.steps) for label in sessions}
    network = deployment.network()
    for args, kwargs in deployment.calls():
        with torch.no_grad():
            expected = widened(tensor_leaves(network(*args, **kwargs)))
        for label, session in sessions.items():
            with _failures_named(label, name):
                found = _outputs(session, args, kwargs)
            agreements[label].add(expected, found)
    verified = {label: agreement.result() for label, agreement in agreements.items()}
    for label, verification in verified.items():
        if not agrees(verification, deployment.sqnr_db):
            other = f"{label} does not compute what test mode does: {verification.figures()}"
            itself = f"test mode itself is {deployment.sqnr_db:.1f} dB from the float network"
            raise VerificationError(f"{name} is not written: {other}; {itself}", help=_HELP)
    return replace(verified[PLAIN], default_session=replace(verified[DEFAULT], kernels=multiplications))


def _session(source: bytes | str, label: str, name: str, optimized: str) -> onnxruntime.InferenceSession:
    """A session; the default one also writes what its optimizer makes of the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is an exception
    if label == PLAIN:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.optimized_model_filepath = optimized
        if isinstance(source, str):
            options.add_session_config_entry(_EXTERNAL, f"{Path(optimized).name}.data")
    with _failures_named(label, name):
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@contextmanager
def _failures_named(label: str, name: str) -> Iterator[None]:
    """ONNX Runtime's own exceptions, which have no class in common, as a sentence about the file."""
    try:
        yield
    except Exception as error:
        why = str(error).strip().partition("\n")[0]
        raise VerificationError(f"{name} is not written: {label} cannot run it: {why}", help=_HELP) from error


def _outputs(session: onnxruntime.InferenceSession, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    used = {value.name for value in session.get_inputs()}
    leaves = widened(tensor_leaves((args, dict(kwargs))))
    tensors = {f"input_{index}": tensor for index, tensor in enumerate(leaves)}
    feed = {name: tensor.numpy() for name, tensor in tensors.items() if name in used}
    return [torch.from_numpy(output) for output in session.run(None, feed)]
