"""Reads an ONNX file with its encodings back and compares what they mean with test mode. If
aimet-onnx is installed, it runs them, too.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper
from torch import Tensor

from quantizer.export.acceptance import engine_check, require_success, started, verified_calls
from quantizer.export.agreement import EngineCheck, Verification
from quantizer.export.deployment import Deployment
from quantizer.export.encodings.document import TensorEncoding, channel_axes, read_document
from quantizer.export.onnx.verify import (
    UNOPTIMIZED,
    OnnxFile,
    named_inputs,
    open_session,
    session_outputs,
)

_REMEDY = "<--deploy onnx> writes the roundings into the network itself"
_READ = ".quantized"
_MADE = ".float"
_PACKAGE = "aimet-onnx"


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
        outputs = session_outputs(open_session(file, UNOPTIMIZED), file, deployment)
        return verified_calls(
            deployment,
            outputs,
            name=written.name,
            remedy=_REMEDY,
            subject="the network with its encodings",
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
        outline = deepcopy(evaluated)
        onnx.save_model(outline, path, save_as_external_data=True, location="tensors")
        yield OnnxFile(written.name, path, evaluated)


def evaluated_model(model: ModelProto, text: str) -> ModelProto:
    """Return the model with each tensor quantized as its encoding says.

    Codes are those of aimet-onnx: x / scale is rounded to the nearest integer, ties up.

    Args:
        model: the file's, which is not changed.
        text: of the file of encodings.
    """
    evaluated = deepcopy(model)
    graph = evaluated.graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    encodings = read_document(json.loads(text), shapes, channel_axes(model))
    by_name = {encoding.name: encoding for encoding in encodings}
    for tensor in graph.initializer:
        if tensor.name in by_name:
            values = numpy_helper.to_array(tensor)
            rounded = _quantized(values, by_name[tensor.name])
            tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
    inputs = {value.name for value in graph.input}
    nodes: list[NodeProto] = []
    for name in inputs:
        if name in by_name:
            _rename_readers(graph, name)
            nodes += _nodes(graph, by_name[name], name, name + _READ)
    for node in graph.node:
        nodes.append(node)
        for index, name in enumerate(node.output):
            if name in by_name:
                node.output[index] = name + _MADE
                nodes += _nodes(graph, by_name[name], name + _MADE, name)
    copies = [deepcopy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    return evaluated


def _rename_readers(graph: GraphProto, name: str) -> None:
    """Make all nodes read the quantized value of an input."""
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                node.input[index] = name + _READ


def _quantized(values: NDArray[np.float32], encoding: TensorEncoding) -> NDArray[np.float32]:
    """Return the values of a parameter's codes."""
    scale = _spread(encoding.scale.astype(np.float32), encoding, values.shape)
    zero_point = _spread(encoding.zero_point, encoding, values.shape)
    codes = np.rint(values / scale) + zero_point
    codes = np.clip(codes, encoding.lowest, encoding.highest)
    return np.asarray((codes - zero_point).astype(np.float32) * scale, np.float32)


def _spread(
    values: NDArray[Any], encoding: TensorEncoding, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Return scales or zero points in a shape that broadcasts to the tensor's."""
    axis = encoding.axis
    if axis is None:
        return values
    if encoding.block_size is not None:
        return np.repeat(values, encoding.block_size, axis)
    broadcast = [1] * len(shape)
    broadcast[axis] = -1
    return values.reshape(broadcast)


def _nodes(
    graph: GraphProto, encoding: TensorEncoding, source: str, result: str
) -> list[NodeProto]:
    """Return nodes that quantize an activation, and add their constants to the graph."""
    scale = float(encoding.scale)
    zero_point = int(encoding.zero_point)
    constants = {
        "scale": scale,
        "two": 2.0,
        "half": 0.5,
        "low": float(encoding.lowest - zero_point),
        "high": float(encoding.highest - zero_point),
    }
    names: dict[str, str] = {}
    for word, constant in constants.items():
        names[word] = f"{encoding.name}.{word}"
        array = np.array(constant, np.float32)
        graph.initializer.append(numpy_helper.from_array(array, names[word]))
    # Floor(x + 0.5) would round the float below 0.5 up.
    steps: Iterable[tuple[str, Sequence[str]]] = (
        ("Div", ["scale"]),
        ("Mul", ["two"]),
        ("Floor", []),
        ("Mul", ["half"]),
        ("Ceil", []),
        ("Clip", ["low", "high"]),
        ("Mul", ["scale"]),
    )
    nodes: list[NodeProto] = []
    value = source
    for number, (op_type, words) in enumerate(steps):
        operands = [names[word] for word in words]
        output = f"{encoding.name}.step_{number}"
        nodes.append(onnx.helper.make_node(op_type, [value, *operands], [output], output))
        value = output
    nodes[-1].output[0] = result
    return nodes


def aimet_check(
    name: str, content: bytes, text: str, deployment: Deployment
) -> EngineCheck | None:
    """Return how aimet-onnx reads the files on the deployment's call; None without it.

    Args:
        name: stands for the files in messages.
        content: the serialized network.
        text: the content of the file of encodings.
        deployment: what the outputs are compared with.
    """
    try:
        engine = f"{_PACKAGE} {version(_PACKAGE)}"
    except PackageNotFoundError:
        return None
    run = partial(_outputs, content, text, deployment)
    return engine_check(engine, name, deployment, run)


def _outputs(content: bytes, text: str, deployment: Deployment) -> list[list[Tensor]]:
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
        with started(f"{getsource(_simulate)}\n_simulate()", folder) as process:
            require_success(process)
        with np.load(folder / "outputs.npz") as arrays:
            return [[torch.from_numpy(arrays[value.name]) for value in model.graph.output]]


def _simulate() -> None:
    """Run a network with its encodings in aimet-onnx, as a program of its own: it brings
    another ONNX Runtime and other versions of packages.

    It works in the folder that it is started in. It reads `model.onnx`, `model.encodings` and
    `inputs.npz`, and writes the outputs by name to `outputs.npz`. It has only the names of its
    own imports.
    """
    from pathlib import Path

    import aimet_onnx.common.quantsim_config as configs
    import numpy as np
    import onnx
    from aimet_onnx.quantsim import QuantizationSimModel, load_encodings_to_sim

    model = onnx.load("model.onnx")
    names = [value.name for value in model.graph.output]
    config = Path(str(configs.__file__)).with_name("default_config_per_channel.json")
    simulation = QuantizationSimModel(model, config_file=str(config))
    # Tensors without encodings stay float.
    load_encodings_to_sim(simulation, "model.encodings", strict=False)
    with np.load("inputs.npz") as inputs:
        feed = dict(inputs)
    results = simulation.session.run(None, feed)
    outputs = dict(zip(names, results, strict=True))
    np.savez("outputs.npz", **outputs)
