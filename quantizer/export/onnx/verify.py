"""Runs a model in ONNX Runtime, without optimizations and as its users do, and compares it with
test mode. The codes of all layers are compared, too, each from the same codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper
from torch import Tensor

from quantizer.errors import VerificationError
from quantizer.evaluation.exact import LayerCodes
from quantizer.export.acceptance import Outputs, accept_file, compared_calls, failures_named
from quantizer.export.agreement import Verification
from quantizer.export.deployment import HALF, Deployment, tensor_leaves, to_float32
from quantizer.export.onnx.executed import (
    ExecutedGraph,
    kernels_of_products,
    key_of_node,
    names_of_products,
    products_between_codes,
    profiled,
)
from quantizer.export.onnx.speed import Feed, cpu_session, measured_speed, with_int8_weights
from quantizer.export.performance import Kernels, Speed
from quantizer.graph.ir import Call
from quantizer.nn.network import Execution
from quantizer.option_words import Sentence
from quantizer.plan.model import Key


class LayerCheck:
    """Runs test mode with every quantized value taken from the session.

    So a difference stays where it arose.

    Attributes:
        model: the file's, with the codes among its outputs.
        values: the names of values that hold codes, of layers' outputs and inputs.
        rows: the comparison of each.
    """

    def __init__(self, model: ModelProto, deployment: Deployment) -> None:
        self.network = deployment.reference
        self.tensors = deployment.solution.tensors
        self.values: dict[Key, str] = {}
        self._zeros: dict[Key, NDArray[Any]] = {}
        self._find_codes(model)
        self.rows = {key: LayerCodes(*key) for key in self.values}
        self.model = deepcopy(model)
        for key, name in self.values.items():
            data_type = onnx.helper.np_dtype_to_tensor_dtype(self._zeros[key].dtype)
            output = onnx.helper.make_tensor_value_info(name, data_type, None)
            self.model.graph.output.append(output)

    def _find_codes(self, model: ModelProto) -> None:
        """Find the values that hold codes, and the zero points that are stored for them."""
        initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type != "DequantizeLinear" or node.input[0] in initializers:
                continue
            key = self._key_of(node)
            if key is not None:
                self.values[key] = node.input[0]
                self._zeros[key] = numpy_helper.to_array(initializers[node.input[2]])

    def _key_of(self, node: NodeProto) -> Key | None:
        """Return the static integer activation that a node dequantizes."""
        key = key_of_node(node.name)
        tensor = self.tensors.get(key)
        if tensor is None or key[1] not in ("input", "activation"):
            return None
        if tensor.spec.dtype != "int" or tensor.spec.is_dynamic:
            return None
        return key

    @torch.no_grad()
    def add(self, call: Call, codes: Feed) -> None:
        """Add one batch; `codes` are outputs of the session by name."""
        graph = self.network.graph
        execution = Execution(self.network, self.network.inputs(*call))
        while execution.position < len(graph.nodes):
            node = graph.nodes[execution.position]
            input_key = (node.name, "input")
            output_role = "input" if node.op == "input" else "activation"
            output_key = (node.name, output_role)
            values = execution.values
            source = graph.source(node)
            if input_key in self.values and source is not None:
                layer = self.network.layers[node.name]
                quantized = layer.quantize_input(values[source.name])
                seen = self._compared(input_key, quantized, codes)
                values = values | {source.name: seen}
            value = self.network.run_node(node, values)
            if output_key in self.values:
                value = self._compared(output_key, value, codes)
            execution.put(value)

    def _compared(self, key: Key, value: Tensor, codes: Feed) -> Tensor:
        """Compare a value's codes with the session's, and return the value of the latter."""
        scale = self.tensors[key].scale
        stored = torch.from_numpy(codes[self.values[key]])
        distances = (stored.to(torch.int64) - int(self._zeros[key])).view(value.shape)
        self.rows[key].add(distances, torch.round(value / scale).to(torch.int64))
        return distances * scale


UNOPTIMIZED = "ONNX Runtime without optimizations"
DEFAULT = "a default ONNX Runtime session"
_LAYERS = "a default ONNX Runtime session that returns the codes of layers"
WITHOUT_KERNELS = "session.disable_quant_qdq"
"""The entry of a session that computes between DequantizeLinear and QuantizeLinear in float."""
_EXTERNAL = "session.optimized_model_external_initializers_file_name"
_OPTIMIZED = "optimized.onnx"
HELP = (
    "<--deploy pt2> needs no such runtime; another onnx_opset_version may avoid what this one "
    "gets wrong"
)
_NEVER_SLOWER = Sentence("<--onnx_profile tuned>")
_INT8_HELP = (
    "without VNNI, processors add up int8 weights of 8 bits wrong: use <--onnx_weights auto>, "
    "or give weights 7 bits"
)


@dataclass(frozen=True)
class OnnxFile:
    """A model to verify.

    Attributes:
        name: stands for it in messages.
        source: the serialized `model`, or the path of its file.
        floating: the same network without quantization, serialized; None if the speed is not to
            be compared.
        is_for_kernels: whether ONNX Runtime's kernels of integers are what the file is for. If
            not, sessions do without them, and speed and kernels say nothing.
    """

    name: str
    source: bytes | str
    model: ModelProto
    floating: bytes | None = None
    is_for_kernels: bool = True


def verify_sessions(file: OnnxFile, deployment: Deployment) -> Verification:
    """Compare the outputs of a file with test mode's over all calls.

    The codes of all layers are compared in a default session.

    Raises:
        VerificationError: ONNX Runtime cannot load or run it, or its outputs differ.
    """
    # The graph of a file that is for other engines is run as it stands
    watched = DEFAULT if file.is_for_kernels else UNOPTIMIZED
    with TemporaryDirectory() as folder:
        sessions = {
            label: open_session(file, label, folder if label == watched else "")
            for label in (UNOPTIMIZED, DEFAULT)
        }
        multiplications = _multiplications(file, deployment, sessions[watched], folder)
    layers = _layer_session(file, deployment)
    feeds: list[dict[str, NDArray[Any]]] = []

    def run(call: Call) -> list[list[Tensor]]:
        """Return what each session gives for a call, and compare the codes of its layers."""
        feed = named_inputs(file.model, deployment, call)
        if not feeds:
            feeds.append(feed)
        results: list[list[Tensor]] = []
        for label, session in sessions.items():
            with failures_named(label, file.name, HELP):
                results.append(_outputs(session, feed))
        if layers is not None:
            check, layer_session = layers
            names = list(check.values.values())
            with failures_named(DEFAULT, file.name, HELP):
                codes = layer_session.run(names, feed)
            check.add(call, dict(zip(names, codes, strict=True)))
        return results

    verified: dict[str, Verification] = {}
    for found, (label, session) in zip(
        compared_calls(deployment, run), sessions.items(), strict=True
    ):
        remedy = HELP
        if label == DEFAULT and deployment.choice("onnx_weights") == "int8":
            remedy = _INT8_HELP
        verified[label] = accept_file(
            found,
            deployment,
            session_outputs(session, file, deployment),
            refusal=f"{file.name} is not written: {label}",
            remedy=remedy,
        )
    rows = () if layers is None else tuple(layers[0].rows.values())
    speed = _speed(file, feeds)
    if speed is not None and speed.high < 1 and deployment.layer_choice is None:
        speed = replace(speed, remedy=_NEVER_SLOWER)
    default = replace(verified[DEFAULT], kernels=multiplications, layers=rows, speed=speed)
    return replace(verified[UNOPTIMIZED], default_session=default)


def _multiplications(
    file: OnnxFile, deployment: Deployment, session: onnxruntime.InferenceSession, folder: str
) -> Kernels:
    """Return what a session multiplies in integers, of a run on the deployment's call.

    Args:
        folder: where the session writes its graph and its profile.
    """
    feed = named_inputs(file.model, deployment, deployment.call)
    model = file.model
    if file.is_for_kernels:
        model = onnx.load(Path(folder) / _OPTIMIZED, load_external_data=False)
    with failures_named(DEFAULT, file.name, HELP):
        executed = ExecutedGraph.of(model, session, feed)
    products = executed.products(names_of_products(file.model))
    if not file.is_for_kernels:
        return products_between_codes(model, products)
    return kernels_of_products(file.model, products, deployment.graph, deployment.solution)


def _speed(file: OnnxFile, feeds: Sequence[Feed]) -> Speed | None:
    """Measure the speed of a file against the float network.

    That with int8 weights is measured, too, where the processor multiplies them right.
    """
    if file.floating is None or not feeds:
        return None
    with_int8 = None
    if isinstance(file.source, bytes):
        with_int8 = with_int8_weights(file.model)
    with failures_named("ONNX Runtime, without quantization,", file.name, HELP):
        return measured_speed(file.source, file.floating, feeds[0], with_int8=with_int8)


def _layer_session(
    file: OnnxFile, deployment: Deployment
) -> tuple[LayerCheck, onnxruntime.InferenceSession] | None:
    """Return what compares the codes of layers, and a default session that also returns them.

    Return None if no layer has codes, or the network is in half precision. It is None, too, if
    the file is too large to be changed, or if ONNX Runtime cannot load it with all codes as
    outputs.
    """
    is_half = any(node.dtype in HALF for node in deployment.graph.nodes)
    if is_half or not isinstance(file.source, bytes):
        return None
    check = LayerCheck(file.model, deployment)
    if not check.rows:
        return None
    watched = replace(file, source=check.model.SerializeToString())
    try:
        return check, open_session(watched, _LAYERS)
    except VerificationError:
        # Its optimizer fails at some networks with more outputs. The file has loaded.
        return None


def open_session(file: OnnxFile, label: str, folder: str = "") -> onnxruntime.InferenceSession:
    """Return a session of ONNX Runtime.

    Args:
        label: `UNOPTIMIZED` for one without optimizations. Only `DEFAULT` uses the memory of a
            value again for a later one.
        folder: where the session writes the profile of its runs, and a default one what its
            optimizer makes of the file.
    """
    options = onnxruntime.SessionOptions()
    if not file.is_for_kernels:
        options.add_session_config_entry(WITHOUT_KERNELS, "1")
    if label != DEFAULT:
        # Its plan takes a time that grows with the square of the number of nodes
        options.enable_mem_reuse = False
    if label == UNOPTIMIZED:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    elif folder:
        options.optimized_model_filepath = str(Path(folder) / _OPTIMIZED)
        if isinstance(file.source, str):
            options.add_session_config_entry(_EXTERNAL, f"{_OPTIMIZED}.data")
    if folder:
        profiled(options, folder)
    with failures_named(label, file.name, HELP):
        return cpu_session(file.source, options)


def session_outputs(
    session: onnxruntime.InferenceSession, file: OnnxFile, deployment: Deployment
) -> Outputs:
    """Return a function that calls a session as the model is called."""
    return lambda call: _outputs(session, named_inputs(file.model, deployment, call))


def _outputs(session: onnxruntime.InferenceSession, feed: Feed) -> list[Tensor]:
    """Return what a session gives for a call."""
    return [torch.from_numpy(output) for output in session.run(None, feed)]


def named_inputs(
    model: ModelProto, deployment: Deployment, call: Call
) -> dict[str, NDArray[Any]]:
    """Return the call's tensors that a file has as inputs, by name."""
    names = {value.name for value in model.graph.input}
    tensors = to_float32(tensor_leaves(call))
    named = zip(deployment.input_names, tensors, strict=True)
    return {name: tensor.numpy() for name, tensor in named if name in names}
