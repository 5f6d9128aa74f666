"""The .onnx target: the network with QuantizeLinear and DequantizeLinear, equal to test mode. Never silently different.

torch.onnx translates the network with a mark where each activation is quantized; then marks become nodes, and weights
become codes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import ModelProto, NodeProto
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantizer
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.wording import shortened
from quantizer.engine.result_files import write_bytes
from quantizer.engine.solution import Solution
from quantizer.errors import ModelError, UsageError
from quantizer.export.deployment import Deployment, Verification, tensor_leaves, verify
from quantizer.export.onnx_nodes import Emission, Quantization, quantize_activation, refusal
from quantizer.export.onnx_weights import quantize_parameter
from quantizer.export.program import exported
from quantizer.graph.ir import Graph
from quantizer.graph.trace import quiet
from quantizer.nn.network import Network

OPSET, OPSETS = 21, range(18, 24)
"""Operator set 21 has 4-bit and 16-bit QuantizeLinear; torch.onnx writes those of the range."""
LARGEST = 2**31 - 2**20
"""Bytes of parameters, as float32, that fit one protobuf message."""
_DOMAIN = "quantizer"


def export(deployment: Deployment, path: Path) -> Verification:
    """Write the model; its inputs and outputs are `input_0`, …, `output_0`, … in the order of the call's tensors.

    The bytes depend on network and calibration alone. The file is run by ONNX Runtime, unoptimized, to verify it.
    """
    check(deployment.graph, deployment.solution, deployment.opset)
    opset = OPSET if deployment.opset == -1 else deployment.opset
    wanted = _quantizations(deployment.solution)
    network = deployment.network()
    model = _translate(deployment, _Flat(network, deployment, wanted), opset)
    _lower(model, network, wanted, opset)
    _clean(model, deployment.graph.model)
    onnx.checker.check_model(model)
    content = model.SerializeToString(deterministic=True)
    verification = verify("outputs", deployment.expected, _run(content, deployment))
    write_bytes(path, content)
    return verification


def check(graph: Graph, solution: Solution, opset: int) -> None:
    """Refuse a network that this target cannot express; needs no run of it. `opset` is -1 to let the exporter choose.

    Raises:
        UsageError: the reason, with the first tensors it holds for.
    """
    opset = OPSET if opset == -1 else opset
    if opset not in OPSETS:
        raise UsageError(
            f"--deploy onnx writes operator sets {OPSETS.start} to {OPSETS[-1]}, not {opset}",
            help="set onnx_opset_version to one of these, or to -1",
        )
    size = sum(4 * tensor.numel() for tensor in graph.tensors.values())
    if size > LARGEST:
        raise UsageError(
            f"--deploy onnx: {graph.model} has {size / 2**30:.1f} GB of parameters, and the format holds 2",
            help="use --deploy pt2 or safetensors",
        )
    reasons: dict[tuple[str, str], list[str]] = {}
    for wanted in _quantizations(solution):
        found = None if is_parameter(wanted.role) else refusal(wanted, graph, opset)
        if found is not None:
            reasons.setdefault(found, []).append(f"{wanted.role} of {wanted.layer}")
    if reasons:
        texts = [shortened(names) + (": each " if names[1:] else " ") + why for (why, _), names in reasons.items()]
        helps = dict.fromkeys(help_ for _, help_ in reasons)
        raise UsageError(f"--deploy onnx: {'; '.join(texts)}", help="; ".join(helps))


def _quantizations(solution: Solution) -> list[Quantization]:
    return [
        Quantization(layer, role, found.spec, found.scale, found.zero_point)
        for (layer, role), found in solution.tensors.items()
    ]


class _Mark(nn.Module):
    """Stands where `index` of the quantizations belongs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.onnx.ops.symbolic(
            f"{_DOMAIN}::Mark", (x,), {"index": self.index}, dtype=x.dtype, shape=x.shape, version=1
        )


class _Flat(nn.Module):
    """The network with marks for its activations' quantizers, from a flat list of tensors to another."""

    def __init__(self, network: Network, deployment: Deployment, wanted: list[Quantization]) -> None:
        super().__init__()
        self.network = network
        self.leaves, self.spec = pytree.tree_flatten(deployment.blank)
        for index, quantization in enumerate(wanted):
            if not is_parameter(quantization.role):
                network.layers[quantization.layer].attach(quantization.role, _Mark(index))  # type: ignore[arg-type]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs: list[Tensor] = []
        for output in tensor_leaves(self.network(*args, **kwargs)):
            named_twice = any(output is other for other in (*tensors, *outputs))
            outputs.append(output.clone() if named_twice else output)
        return outputs


def _translate(deployment: Deployment, flat: _Flat, opset: int) -> ModelProto:
    """torch.onnx's translation, unoptimized.

    Raises:
        ModelError: it does not know an operator of the network.
    """
    tensors = tuple(leaf for leaf in flat.leaves if isinstance(leaf, Tensor))
    program = exported(flat, deployment.graph, tensors, {})
    try:
        with quiet(), torch.no_grad():
            translated = torch.onnx.export(
                program,
                input_names=[f"input_{index}" for index in range(len(tensors))],
                output_names=[f"output_{index}" for index in range(len(deployment.expected))],
                opset_version=opset,
                dynamo=True,
                optimize=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        why = next((line for line in str(error).splitlines() if line.startswith("<class")), "")
        raise ModelError(
            f"--deploy onnx: torch.onnx cannot translate {deployment.graph.model}: {why.partition(': ')[2]}",
            help="the pt2 target has no such limit",
        ) from error
    assert translated is not None  # only the old exporter returns nothing
    model: ModelProto = translated.model_proto
    return model


def _lower(model: ModelProto, network: Network, wanted: list[Quantization], opset: int) -> None:
    """Put the quantizations in: nodes for marks, codes for parameters."""
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    parameters: list[NodeProto] = []
    for quantization in wanted:
        if is_parameter(quantization.role):
            attribute = parameter_name(quantization.role)
            name = f"network.{network.module_names[quantization.layer]}.{attribute}"
            values = network.layers[quantization.layer].get_parameter(attribute).detach()
            emission = quantize_parameter(quantization, values, name, opset)
            if emission is not None:
                model.graph.initializer.remove(initializers[name])
                parameters += _entered(model, emission)
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        if node.domain != _DOMAIN:
            nodes.append(node)
            continue
        quantization = wanted[node.attribute[0].i]
        nodes += _entered(model, quantize_activation(quantization, node.input[0], node.output[0], opset))
    del model.graph.node[:]
    model.graph.node.extend([*parameters, *nodes])


def _entered(model: ModelProto, emission: Emission) -> list[NodeProto]:
    model.graph.initializer.extend(emission.initializers)
    return emission.nodes


def _clean(model: ModelProto, name: str) -> None:
    """Nothing of where the model was made: no traces, no internal names of sizes, no shapes of values that are gone."""
    model.producer_name, model.producer_version = "quantizer", quantizer.__version__
    kept = [entry for entry in model.opset_import if entry.domain != _DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    del model.metadata_props[:], model.graph.metadata_props[:], model.graph.value_info[:]
    model.graph.name, model.graph.doc_string = name, ""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    symbols: dict[str, str] = {}
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                new = "batch" if not symbols else f"size_{len(symbols)}"
                dimension.dim_param = symbols.setdefault(dimension.dim_param, new)


def _run(content: bytes, deployment: Deployment) -> list[Tensor]:
    """What ONNX Runtime makes of the call."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    tensors = tensor_leaves((deployment.args, dict(deployment.kwargs)))
    names = [f"input_{index}" for index in range(len(tensors))]
    used = {value.name for value in session.get_inputs()}
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True) if name in used}
    return [torch.from_numpy(output) for output in session.run(None, feed)]
