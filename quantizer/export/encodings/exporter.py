"""Writes the encodings target: a float ONNX file, and encodings for AIMET and QNN.

Both are read back, and what they mean is compared with test mode. If aimet-onnx is installed,
it runs them, too.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from inspect import getsource
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, numpy_helper
from torch import Tensor

from quantizer.config.wording import first_names
from quantizer.export.acceptance import engine_check, require_success, started, verified_calls
from quantizer.export.agreement import EngineCheck, Verification
from quantizer.export.arithmetic import quantized_apart
from quantizer.export.deployment import Deployment, in_float32
from quantizer.export.encodings.document import (
    TensorEncoding,
    channel_axes,
    encoding_refusals,
    encodings_document,
    read_document,
    require_axes,
)
from quantizer.export.encodings.lowering import lower_to_encodings
from quantizer.export.exporter import Exporter, Refusal
from quantizer.export.onnx.build import DEFAULT_OPSET, clean_proto, stored_model
from quantizer.export.onnx.lowering import Lowering
from quantizer.export.onnx.passes.products import name_products
from quantizer.export.onnx.refusals import graph_refusals
from quantizer.export.onnx.translation import translate_network
from quantizer.export.onnx.verify import (
    UNOPTIMIZED,
    OnnxFile,
    named_inputs,
    open_session,
    session_outputs,
)
from quantizer.graph.ir import Graph
from quantizer.plan.model import TensorSpecs
from quantizer.storage.files import write_bytes

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


@contextmanager
def _evaluated_file(written: EncodedFile) -> Iterator[OnnxFile]:
    """Yield the network as its encodings quantize it."""
    if isinstance(written.source, bytes):
        model = onnx.load_from_string(written.source)
    else:
        model = onnx.load(written.source)
    evaluated = evaluated_model(model, written.text)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "evaluated.onnx"
        with stored_model(evaluated, path) as source:
            yield OnnxFile(written.name, source, evaluated)


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
    model: ModelProto = onnx.load_from_string(content)

    def outputs() -> list[list[Tensor]]:
        """Return what aimet-onnx gives for the call."""
        inputs: dict[str, Any] = named_inputs(model, deployment, deployment.call)
        with TemporaryDirectory() as place:
            folder = Path(place)
            (folder / "model.onnx").write_bytes(content)
            (folder / "model.encodings").write_text(text, "utf-8")
            np.savez(folder / "inputs.npz", **inputs)
            with started(f"{getsource(_simulate)}\n_simulate()", folder) as process:
                require_success(process)
            with np.load(folder / "outputs.npz") as arrays:
                return [[torch.from_numpy(arrays[value.name]) for value in model.graph.output]]

    return engine_check(engine, name, deployment, outputs)


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


VERSION_OPTION = "encodings_version"
_UNENCODED = (
    "the weights have no encoding, because readers know no axis of channels there. The file "
    "has their rounded values"
)


class EncodingsExporter(Exporter[EncodedFile]):
    """Writes `<Model>.encodings`, and next to it `<Model>.encodings.onnx`, the float network.

    The network's weights are those of test mode, already rounded to their codes. Whoever rounds
    them again, in any way, gets the same codes.
    """

    def refusals(self, graph: Graph, specs: TensorSpecs, opset: int) -> Iterator[Refusal]:
        """Yield what ONNX or encodings cannot hold."""
        opset = DEFAULT_OPSET if opset == -1 else opset
        yield from graph_refusals(graph, opset)
        yield from encoding_refusals(graph, specs)

    def files(self, path: Path) -> tuple[Path, ...]:
        """Return the file of encodings, that of the network, and the latter's tensors."""
        network = _network_path(path)
        return path, network, network.with_name(f"{network.name}.data")

    @contextmanager
    def write(self, deployment: Deployment, path: Path) -> Iterator[EncodedFile]:
        """Write both files; they are verified before they are published.

        Raises:
            UsageError: an encoding does not fit a weight.
            ModelError: torch.onnx does not know an operator of the network.
            ResultError: a file cannot be written.
        """
        solution = deployment.solution.by_rows()
        tested = replace(deployment, solution=solution)
        # Readers quantize the parts of a concatenation, too.
        apart = quantized_apart(deployment.graph, solution, any_rounding=True)
        wide = in_float32(replace(deployment, solution=apart))
        opset = DEFAULT_OPSET if deployment.opset == -1 else deployment.opset
        network = wide.network()
        quantizations = list(wide.encoded.tensors.items())
        model = translate_network(wide, network, quantizations, opset)
        lowering = Lowering(network, quantizations, opset, biases={}, float_layers=())
        name_products(model, lowering)
        encodings, unencoded = lower_to_encodings(model, lowering)
        proto = ir.to_proto(model)
        clean_proto(proto, deployment.graph, deployment.input_names)
        onnx.helper.set_model_props(proto, deployment.origin.texts())
        version = deployment.choice(VERSION_OPTION)
        require_axes(encodings, proto, version)
        document = encodings_document(encodings, version)
        text = json.dumps(document, indent=1) + "\n"
        remarks: tuple[str, ...] = ()
        if unencoded:
            remarks = (f"{first_names(unencoded)}: {_UNENCODED}",)
        with stored_model(proto, _network_path(path)) as source:
            yield EncodedFile(path.name, source, text, tested, remarks)
        write_bytes(path, text.encode())

    def verify(self, deployment: Deployment, written: EncodedFile) -> Verification:
        """Read both files and compute what the encodings mean on all batches.

        aimet-onnx runs them, too, if it is installed. It refuses nothing.
        """
        tested = written.tested
        with _evaluated_file(written) as file:
            verification = verified_calls(
                tested,
                session_outputs(open_session(file, UNOPTIMIZED), file, tested),
                name=written.name,
                remedy=_REMEDY,
                subject="the network with its encodings",
            )
        check: EngineCheck | None = None
        if isinstance(written.source, bytes):
            check = aimet_check(written.name, written.source, written.text, written.tested)
        engines = () if check is None else (check,)
        return replace(verification, remarks=written.remarks, engines=engines)


def _network_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.onnx")
