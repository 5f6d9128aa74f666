"""Reads an ONNX file with its encodings back and compares what they mean with test mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
import torch
from onnx import ModelProto

from quantizer.export.acceptance import accept_file
from quantizer.export.agreement import Agreement, Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.encodings.evaluation import evaluated_model
from quantizer.export.float32 import to_float32
from quantizer.export.onnx.verify import UNOPTIMIZED, OnnxFile, SessionOfFile, open_session

_REMEDY = "<--deploy onnx> writes the roundings into the network itself"


@dataclass(frozen=True)
class EncodedFile:
    """A network and its encodings that were written, and what they are compared with.

    Attributes:
        name: stands for the file of encodings in messages.
        source: the serialized network, or the path of its file.
        text: the content of the file of encodings.
        remarks: notes for the user.
    """

    name: str
    source: bytes | str
    text: str
    tested: Deployment
    remarks: tuple[str, ...] = ()


def verify_encodings(written: EncodedFile) -> Verification:
    """Compare the outputs of the network, quantized by its encodings, with test mode's.

    Raises:
        VerificationError: ONNX Runtime cannot run the network, or its outputs differ.
    """
    deployment = written.tested
    with _evaluated_file(written) as file:
        session = SessionOfFile(open_session(file, UNOPTIMIZED), file, deployment)
        agreement = Agreement("outputs", deployment.outputs, deployment.part_steps)
        network = deployment.reference
        for args, kwargs in deployment.calls():
            recorder = agreement.recorder()
            with torch.no_grad():
                result = network.observe(args, kwargs, recorder.watchers)
            expected = to_float32(tensor_leaves(result))
            agreement.add(expected, session.outputs(args, kwargs), recorder)
        return accept_file(
            agreement.result(),
            deployment,
            session.outputs,
            refusal=f"{written.name} is not written: the network with its encodings",
            remedy=_REMEDY,
        )


@contextmanager
def _evaluated_file(written: EncodedFile) -> Iterator[OnnxFile]:
    """Yield the network as its encodings quantize it."""
    if isinstance(written.source, bytes):
        model = onnx.load_from_string(written.source)
        evaluated = evaluated_model(model, written.text)
        yield OnnxFile(written.name, evaluated.SerializeToString(), evaluated)
        return
    evaluated = evaluated_model(onnx.load(written.source), written.text)
    with TemporaryDirectory() as folder:
        path = str(Path(folder) / "evaluated.onnx")
        # The tensors go to another file, and the message keeps the rest.
        outline = ModelProto()
        outline.CopyFrom(evaluated)
        onnx.save_model(outline, path, save_as_external_data=True, location="tensors")
        yield OnnxFile(written.name, path, evaluated)
