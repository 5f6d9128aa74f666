"""The .onnx target: the network with QuantizeLinear and DequantizeLinear, equal to test mode. Never silently different.

torch.onnx translates the network with a mark where each activation is quantized; then marks become nodes, and weights
become codes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantizer
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.engine.result_files import write_bytes
from quantizer.errors import ModelError
from quantizer.export import Refusal, check
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment, tensor_leaves
from quantizer.export.onnx_lowering import DOMAIN, Wanted, lower
from quantizer.export.onnx_nodes import (
    BLOCKS,
    refusal,
)
from quantizer.export.onnx_specs import restated
from quantizer.export.onnx_tensors import LEAST, activation_carrier, weight_carrier
from quantizer.export.onnx_verify import verify_sessions
from quantizer.export.torch_program import exported
from quantizer.graph.ir import Graph
from quantizer.graph.trace import quiet
from quantizer.nn.network import Network
from quantizer.plan.model import Key

OPSETS = range(LEAST, 24)
"""The operator sets that torch.onnx writes."""
LARGEST = 2**31 - 2**20
"""Bytes of parameters, as float32, that fit one protobuf message."""


def export(deployment: Deployment, path: Path) -> Verification:
    """Write the model; its inputs and outputs are `input_0`, …, `output_0`, … in the order of the call's tensors.

    The bytes depend on network and calibration alone. ONNX Runtime runs them, without optimizations and as users do,
    before they are written.

    Raises:
        UsageError: ONNX cannot say what the config asks for.
        ModelError: torch.onnx does not know an operator of the network.
        VerificationError: a session does not give test mode's outputs.
    """
    check("onnx", deployment.graph, deployment.solution.specs, deployment.opset)
    solution = restated(deployment.graph, deployment.encoded)
    wanted = list(solution.tensors.items())
    opset = operator_set(solution.specs) if deployment.opset == -1 else deployment.opset
    network = deployment.network()
    model = _translate(deployment, _Flat(network, deployment, wanted), opset)
    lower(model, network, wanted, opset)
    _clean(model, deployment.graph.model)
    onnx.checker.check_model(model)
    content = model.SerializeToString(deterministic=True)
    verification = verify_sessions(content, deployment, path.name)
    write_bytes(path, content)
    return verification


def refusals(graph: Graph, specs: Mapping[Key, QuantizationSpec], opset: int) -> Iterator[Refusal]:
    """What this target cannot express; needs no run of the network. `opset` is -1 to let the exporter choose."""
    opset = operator_set(specs) if opset == -1 else opset
    if opset not in OPSETS:
        why = f"writes operator sets {OPSETS.start} to {OPSETS[-1]}, not {opset}"
        yield Refusal(why, "set onnx_opset_version to one of these, or to -1")
    size = sum(4 * tensor.numel() for tensor in graph.tensors.values())
    if size > LARGEST:
        yield Refusal(
            f"is given {size / 2**30:.1f} GB of parameters, and the format holds 2", "use --deploy pt2 or safetensors"
        )
    for (layer, role), spec in specs.items():
        found = None if is_parameter(role) else refusal(spec, graph.by_name[layer].dtype, opset)
        if found is not None:
            yield Refusal(*found, layer, role)


def operator_set(specs: Mapping[Key, QuantizationSpec]) -> int:
    """20, which every optimization of ONNX Runtime knows; 21 if a type or the blocks of a weight came only with it."""
    return max([20, *(_oldest(role, spec) for (_, role), spec in specs.items() if spec.dtype == "int")])


def _oldest(role: str, spec: QuantizationSpec) -> int:
    """The first operator set with the type of a tensor's codes; floats, as biases are, need none."""
    newest = OPSETS[-1]
    if base_role(role) == "bias":
        return 0
    if not is_parameter(role):
        found = activation_carrier(spec, newest)
        return found[0].opset if found else 0
    held = weight_carrier(spec, newest)
    return max(held[0].opset if held else 0, BLOCKS if spec.qscheme == "per_group" else 0)


class _Mark(nn.Module):
    """Stands where `index` of the quantizations belongs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::Mark", (x,), {"index": self.index}, dtype=x.dtype, shape=x.shape, version=1
        )


class _Flat(nn.Module):
    """The network with marks for its quantizers, from a flat list of tensors to another.

    Weights are marked where they are used, so that torch.onnx does not fold them into something else.
    """

    def __init__(self, network: Network, deployment: Deployment, wanted: Wanted) -> None:
        super().__init__()
        self.network = network
        self.leaves, self.spec = pytree.tree_flatten(deployment.blank)
        self.weights: dict[str, _Mark] = {}
        for index, ((layer, role), _) in enumerate(wanted):
            if base_role(role) == "weights":
                self.weights[f"{network.module_names[layer]}.{parameter_name(role)}"] = _Mark(index)
            elif not is_parameter(role):
                network.layers[layer].attach(role, _Mark(index))  # type: ignore[arg-type]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        weights = {name: mark(self.network.get_parameter(name)) for name, mark in self.weights.items()}
        outputs: list[Tensor] = []
        for output in tensor_leaves(torch.func.functional_call(self.network, weights, args, kwargs)):
            named_twice = any(output is other for other in (*tensors, *outputs))
            outputs.append(output.clone() if named_twice else output)
        return outputs


def _translate(deployment: Deployment, flat: _Flat, opset: int) -> ModelProto:
    """torch.onnx's translation.

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
                optimize=True,
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


def _clean(model: ModelProto, name: str) -> None:
    """Nothing of where the model was made: no traces, no internal names of sizes, no shapes of values that are gone."""
    model.producer_name, model.producer_version = "quantizer", quantizer.__version__
    kept = [entry for entry in model.opset_import if entry.domain != DOMAIN]
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
