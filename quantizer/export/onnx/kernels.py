"""Reports which products of a file an engine computes in integers, and why not the others.

A product is a node of a type in `MULTIPLYING`: a convolution or a matrix product. ONNX Runtime
shows what it computes by its optimized graph.
"""

import re
from collections.abc import Sequence

import onnx
from onnx import ModelProto

from quantizer.calibration.solution import Solution
from quantizer.config.model import QuantizationSpec
from quantizer.export.agreement import Kernels
from quantizer.export.onnx.marks import INSIDE, MULTIPLYING, NUMBERED
from quantizer.export.onnx.specs import is_narrow, layer_input_spec, output_spec
from quantizer.graph.ir import Graph
from quantizer.plan.groups import Layout, layout

# ONNX Runtime's products with integer weights
_INTEGER_OPERATORS = (
    "QLinearConv",
    "ConvInteger",
    "QLinearMatMul",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "QGemm",
    "DynamicQuantizeMatMul",
    "MatMulNBits",
)
# An engine can move codes instead of floats, so what they make of codes is still codes
_MOVING = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")
_ONNX_RUNTIME = "ONNX Runtime"
_INSIDE_AN_OPERATOR = "a step inside the operator, whose result the config does not quantize"
_BITS_LIMIT = "8 bits or fewer of integers have kernels"


def products_between_codes(model: ModelProto) -> Kernels:
    """Return the products of a file whose operands are both quantized, for an engine that does
    not run here. The reason of each other product names the operands that are not.
    """
    # Names of values that are floats of codes
    dequantized: set[str] = set()
    integer: list[str] = []
    reasons: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" or (
            node.op_type in _MOVING and node.input[0] in dequantized
        ):
            dequantized.update(node.output)
        elif node.op_type in MULTIPLYING:
            operands = dict(zip(("input", "weights"), node.input[:2], strict=True))
            floats = [word for word, name in operands.items() if name not in dequantized]
            if floats:
                verb = "is" if floats == ["input"] else "are"
                reasons[node.name] = f"its {' and '.join(floats)} {verb} not quantized"
            else:
                integer.append(node.name)
    return Kernels(tuple(integer), reasons, "of quantized values")


def kernels_of_session(
    model: ModelProto, optimized: str, graph: Graph, solution: Solution
) -> Kernels:
    """Return how a session of ONNX Runtime multiplies, with the reasons for float.

    A product that has no node in integers counts as float.

    Args:
        model: the file as it was written.
        optimized: the path of the file that a session wrote as its `optimized_model_filepath`.
            Its nodes keep the names of those that they replace.
        graph: the layers. The names of products begin with theirs.
        solution: what is quantized.
    """
    integer: list[str] = []
    for node in onnx.load(optimized, load_external_data=False).graph.node:
        if node.op_type in _INTEGER_OPERATORS:
            # The optimizer appends this to the name of a node that it merged
            integer.append(re.sub(r"_token_\d+$", "", node.name))
    return kernels_of_engine(model, integer, graph, solution)


def kernels_of_engine(
    model: ModelProto,
    integer: Sequence[str],
    graph: Graph,
    solution: Solution,
    *,
    engine: str = _ONNX_RUNTIME,
) -> Kernels:
    """Return how an engine multiplies, with the reasons for float.

    Args:
        model: the file as it was written.
        integer: the names of the products that the engine computes in integers.
        graph: the layers. The names of products begin with theirs.
        solution: what is quantized.
        engine: its name, for reasons.
    """
    # The types of the nodes that read and that make each value
    readers: dict[str, str] = {}
    makers: dict[str, str] = {}
    for node in model.graph.node:
        readers |= dict.fromkeys(node.input, node.op_type)
        makers |= dict.fromkeys(node.output, node.op_type)
    where = layout(graph)
    reasons: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in MULTIPLYING and node.name not in integer:
            if INSIDE in node.name:
                reasons[node.name] = _INSIDE_AN_OPERATOR
                continue
            reader = readers.get(node.output[0], "")
            layer = node.name.partition(NUMBERED)[0]
            reason = _reason(layer, graph, where, solution, reader=reader, engine=engine)
            if not reason and "Softmax" in (makers.get(name) for name in node.input):
                reason = "it multiplies by a softmax that the config does not quantize"
            reasons[node.name] = reason or f"{engine} does not fuse it"
    return Kernels(tuple(integer), reasons)


def _reason(
    layer: str,
    graph: Graph,
    where: Layout,
    solution: Solution,
    *,
    reader: str,
    engine: str,
) -> str:
    """Return the first thing in the config that keeps a layer in float, and what to change;
    empty if there is none.

    Args:
        layer: the name of the layer.
        graph, solution: the layers, and what is quantized.
        where: which values are quantized together.
        reader: the type of the node that reads the product in the file; empty without one. An
            activation that became bounds of codes is not a node.
        engine: the name of the engine.
    """
    if layer not in graph.by_name:
        return (
            "it is part of an operator that torch.onnx took apart, or what it makes is not "
            "quantized"
        )
    node = graph.by_name[layer]
    specs = solution.specs
    weights = specs.get((layer, "weights"))
    if node.row.weight and weights is None:
        return "its weights are not quantized"
    if weights is not None and not is_narrow(weights):
        return f"its weights are {_words(weights)}; {_BITS_LIMIT}"
    if node.row.transposed and engine == _ONNX_RUNTIME:
        return "ONNX Runtime has no integer kernel for transposed convolutions"
    activations = {
        "input": layer_input_spec(layer, graph, specs),
        "output": output_spec(layer, graph, specs, where),
    }
    for role, spec in activations.items():
        if spec is None:
            return f"its {role} is not quantized"
        if not is_narrow(spec):
            return f"its {role} is {_words(spec)}; {_BITS_LIMIT}"
        if role == "output" and spec.round_mode != "half_even":
            return (
                f"its {role} is rounded by operators in float: set round_mode to "
                '"half_even", '
                "or --onnx_profile fast"
            )
    followers = [graph.by_name[name] for name in graph.consumers[layer] if name]
    is_activated = any(follower.row.kind == "fusable" for follower in followers)
    if is_activated and reader != "QuantizeLinear":
        return (
            f"{reader} follows it, and its output is quantized after that; ReLU and ReLU6 "
            "have integer kernels"
        )
    return ""


def _words(spec: QuantizationSpec) -> str:
    """Return the bits of integers, and the name of another format.

    >>> _words(QuantizationSpec(bit_width=16))
    'in 16 bits'
    """
    if spec.dtype == "int":
        return f"in {spec.bit_width} bits"
    return spec.dtype
