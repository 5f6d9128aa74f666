"""The .onnx target: the network with QuantizeLinear and DequantizeLinear, equal to test mode.
Never silently different.

torch.onnx translates the network with a mark where each activation is quantized; then marks
become nodes, and weights become codes.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import ModelProto

import quantizer
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role, is_parameter
from quantizer.export import Refusal, check
from quantizer.export.agreement import Verification
from quantizer.export.deployment import Deployment
from quantizer.export.float32 import in_float32
from quantizer.export.onnx import complex_numbers as onnx_complex
from quantizer.export.onnx import openvino as onnx_openvino
from quantizer.export.onnx.biases import as_run, overflowing, sum_biases, sum_steps
from quantizer.export.onnx.files import stored
from quantizer.export.onnx.gates import quantize_gates
from quantizer.export.onnx.lowering import DOMAIN, lower
from quantizer.export.onnx.nodes import BLOCKS, refusal
from quantizer.export.onnx.profile import PACKED_DOMAIN, half_even
from quantizer.export.onnx.specs import processors, quantized_apart, restated
from quantizer.export.onnx.speed import float_model
from quantizer.export.onnx.tensors import LEAST, activation_carrier, weight_carrier
from quantizer.export.onnx.translation import translate
from quantizer.export.onnx.verify import OnnxFile, verify_sessions
from quantizer.graph.ir import Graph
from quantizer.plan.model import Key

OPSETS = range(LEAST, 24)
"""The operator sets that torch.onnx writes."""
_SYMBOL = re.compile(r"\b[su]\d+\b")
"""torch's name for a size that is open, alone or in a formula."""


def export(deployment: Deployment, path: Path) -> Verification:
    """Write the model; its inputs and outputs are `input_0`, …, `output_0`, … in the order of
    the call's tensors.

    The bytes depend on network and calibration alone. ONNX Runtime runs them, without
    optimizations and as users do, before they are written. A network of half precision computes
    in float32 there. OpenVINO runs them, too, where it is installed, and a warning says so if
    it reads them otherwise.

    Raises:
        UsageError: ONNX cannot say what the config asks for.
        ModelError: torch.onnx does not know an operator of the network.
        VerificationError: a session does not give test mode's outputs.
    """
    check("onnx", deployment.graph, deployment.solution.specs, deployment.opset)
    is_fast = deployment.choice("onnx_profile") == "fast"
    solution = as_run(deployment.graph, deployment.solution).by_rows()
    # The file is compared with this, whatever is restated for it
    tested = replace(deployment, solution=solution)
    deployment = replace(
        deployment, solution=quantized_apart(deployment.graph, solution, any_rounding=is_fast)
    )
    wide = in_float32(deployment)
    encoded = half_even(wide.encoded) if is_fast else wide.encoded
    solution = restated(wide.graph, encoded, wide.choice("onnx_weights"), packed=is_fast)
    wanted = list(solution.tensors.items())
    opset = operator_set(solution.specs) if deployment.opset == -1 else deployment.opset
    network = wide.network()
    model = translate(wide, network, wanted, opset)
    floating = float_model(model)
    biases = sum_biases(network, sum_steps(wide.graph, solution))
    in_float = overflowing(network, solution) - biases.keys()
    lower(model, network, wanted, biases, opset, packed=is_fast, in_float=in_float)
    if is_fast:
        quantize_gates(model)
    _clean(model, deployment.graph)
    with stored(model, path) as source:
        file = OnnxFile(path.name, source, model, floating)
        with onnx_openvino.started(file, tested) as openvino:
            found = verify_sessions(file, tested)
            engines = () if openvino is None else (openvino.result(),)
    return replace(found, remarks=processors(wide.graph, solution), engines=engines)


def refusals(
    graph: Graph, specs: Mapping[Key, QuantizationSpec], opset: int
) -> Iterator[Refusal]:
    """What this target cannot express; needs no run of the network. `opset` is -1 to let the
    exporter choose.
    """
    opset = operator_set(specs) if opset == -1 else opset
    if opset not in OPSETS:
        why = f"writes operator sets {OPSETS.start} to {OPSETS[-1]}, not {opset}"
        yield Refusal(why, "set onnx_opset_version to one of these, or to -1")
    yield from onnx_complex.refusals(graph)
    yield from _unprojected(graph)
    for (layer, role), spec in specs.items():
        found = None if is_parameter(role) else refusal(spec, graph.by_name[layer].dtype, opset)
        if found is not None:
            yield Refusal(*found, layer, role)


def _unprojected(graph: Graph) -> Iterator[Refusal]:
    for node in graph.nodes:
        if "weight_hr_l0" in node.params:
            why = "is an LSTM with proj_size, which ONNX's LSTM operator lacks"
            remedy = "leave proj_size out and put a Linear layer behind it, or use --deploy pt2"
            yield Refusal(why, remedy, node.name)


def operator_set(specs: Mapping[Key, QuantizationSpec]) -> int:
    """20, which every optimization of ONNX Runtime knows; 21 if a type or the blocks of a
    weight came only with it.
    """
    return max(
        [20, *(_oldest(role, spec) for (_, role), spec in specs.items() if spec.dtype == "int")]
    )


def _oldest(role: str, spec: QuantizationSpec) -> int:
    """The first operator set with the type of a tensor's codes; floats, as biases are, need
    none.
    """
    newest = OPSETS[-1]
    if base_role(role) == "bias":
        return 0
    if not is_parameter(role):
        found = activation_carrier(spec, newest)
        return found[0].opset if found else 0
    held = weight_carrier(spec, newest)
    return max(held.opset if held else 0, BLOCKS if spec.qscheme == "per_group" else 0)


def _clean(model: ModelProto, graph: Graph) -> None:
    """Nothing of where the model was made: no traces, no internal names of sizes, no shapes of
    values that are gone.
    """
    model.producer_name, model.producer_version = "quantizer", quantizer.__version__
    used = {node.domain for node in model.graph.node}
    kept = [
        entry for entry in model.opset_import if entry.domain not in (DOMAIN, PACKED_DOMAIN)
    ]
    kept += [onnx.helper.make_opsetid(PACKED_DOMAIN, 1)] if PACKED_DOMAIN in used else []
    del model.opset_import[:]
    model.opset_import.extend(kept)
    del model.metadata_props[:], model.graph.metadata_props[:], model.graph.value_info[:]
    model.graph.name, model.graph.doc_string = graph.model, ""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    names = _names_of_sizes(model, graph)
    for value in (*model.graph.input, *model.graph.output):
        del value.metadata_props[:]
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.HasField("dim_param"):
                dimension.dim_param = _SYMBOL.sub(
                    lambda found: names[found[0]], dimension.dim_param
                )


def _names_of_sizes(model: ModelProto, graph: Graph) -> Mapping[str, str]:
    """What torch's symbols stand for: the batch, a length, "size_1" and so on for what follows
    from values.
    """
    inputs = [node for node in graph.nodes if node.op == "input"]
    tensors = [index for index, node in enumerate(inputs) if node.shape is not None]
    lengths = {at: length.name for length in graph.lengths for at in length.axes}
    names: dict[str, str] = {}
    for value in model.graph.input:
        index = tensors[int(value.name.rpartition("_")[2])]
        for axis, dimension in enumerate(value.type.tensor_type.shape.dim):
            if dimension.HasField("dim_param"):
                names[dimension.dim_param] = lengths.get((index, axis), "batch")
    shapes = (value.type.tensor_type.shape.dim for value in model.graph.output)
    symbols = [
        symbol
        for shape in shapes
        for size in shape
        for symbol in _SYMBOL.findall(size.dim_param)
    ]
    unknown = [symbol for symbol in dict.fromkeys(symbols) if symbol not in names]
    return names | {symbol: f"size_{number}" for number, symbol in enumerate(unknown, 1)}
