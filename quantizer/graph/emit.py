"""Write a graph as a readable `<Model>.py`: a line per layer that ends in its name, and a
forward without control flow. All values are literals.

The layer of a node is its class in `quantizer.nn`, and the arguments of the constructor. The
executor makes layers from the same description.
"""

import keyword
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.op_row import Op
from quantizer.graph.ops import OPS

_HEADER = (
    '"""{model} as traced and quantized, written by quantizer. '
    'The layer names are those a config may use."""\n'
    """
import quantizer
import torch


class {model}(torch.nn.Module):
    def __init__(self):
        super().__init__()
"""
)
_DEFAULT_OVERLOADS = (
    "relu",
    "relu6",
    "leaky_relu",
    "hardtanh",
    "prelu",
    "elu",
    "gelu",
    "silu",
    "mish",
    "sigmoid",
    "tanh",
    "hardswish",
    "hardsigmoid",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "neg",
    "matmul",
    "bmm",
    "addmm",
    "scaled_dot_product_attention",
    "cat",
    "stack",
    "chunk",
    "reshape",
    "permute",
    "pad",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
)
"""Operators that torch calls by their default overload."""
_OVERLOADS = {
    **dict.fromkeys(_DEFAULT_OVERLOADS, "default"),
    "add": "Tensor",
    "sub": "Tensor",
    "mul": "Tensor",
    "div": "Tensor",
    "split": "Tensor",
    "slice": "Tensor",
    "softmax": "int",
    "log_softmax": "int",
    "transpose": "int",
    "select": "int",
    "mean": "dim",
    "sum": "dim_IntList",
    "where": "self",
    "masked_fill": "Scalar",
    "flatten": "using_ints",
}


def _class(row: Op) -> str:
    """Return the name of our class: that of torch.nn, or that of a function in camel case."""
    name = row.types[0].rpartition(".")[2] if row.types else ""
    if name[:1].isupper():
        return name
    return "".join(word.capitalize() for word in row.name.split("_"))


FUNCTION_LAYERS: dict[str, str] = {
    **{_class(OPS[op]): f"aten.{op}.{overload}" for op, overload in _OVERLOADS.items()},
    "BatchNorm": "aten.batch_norm.default",
    "InstanceNorm": "aten.instance_norm.default",
    "View": "aten.view.default",
    "Size": "aten.sym_size.int",
    "GetItem": "operator.getitem",
}
"""Targets by class, for the classes of `quantizer.nn` that are one torch function."""
_PACKAGE_LAYERS: dict[str, str] = {
    "dpu.avg_pool2d": "DpuAvgPool2d",
    "dpu.hardsigmoid": "DpuHardsigmoid",
    "dpu.hardswish": "DpuHardswish",
    "rescale.input_scale": "InputScale",
    "rescale.rotation": "InputRotation",
}
"""Classes by target, for layers that torch does not have. Some compute as a device does. Others
are inserted by algorithms, and take a weight's size.
"""
_CLASS_OF_TARGET = {target: name for name, target in reversed(FUNCTION_LAYERS.items())}
_STRUCTURE = {"input": "Input", "quant_stub": "QuantStub", "dequant_stub": "DeQuantStub"}
_INPLACE = ("relu", "relu6", "leaky_relu", "hardtanh", "silu", "hardswish")
"""Activations that may overwrite their input if no other node reads it."""


@dataclass(frozen=True)
class LayerCall:
    """A constructor call `quantizer.nn.<cls>(*args, **kwargs)`, of which all arguments are
    literals.
    """

    cls: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def describe(graph: Graph, node: Node) -> LayerCall:
    """Return the constructor call of a node's layer."""
    if node.op in _STRUCTURE:
        return LayerCall(_STRUCTURE[node.op])
    if node.is_tensor:
        tensor = graph.weight(node)
        name = node.op.capitalize()
        return LayerCall(name, (list(tensor.shape),), {"dtype": tensor.dtype})
    if "weight_hh_l0" in node.params:
        return _recurrent(node, graph.tensors)
    if node.row.weight and "weight" in node.params and "bias" not in node.inputs:
        return _weighted(graph, node)
    kwargs = dict(node.attrs)
    if node.target in _PACKAGE_LAYERS:
        sizes = (len(graph.weight(node)),) if "weight" in node.params else ()
        return LayerCall(_PACKAGE_LAYERS[node.target], sizes, kwargs)
    if node.params:
        shapes = {key: list(graph.tensors[path].shape) for key, path in node.params.items()}
        kwargs["params"] = shapes
    if node.op == "relu6":
        kwargs = {}
    if overwritten(graph, node) is not None:
        kwargs["inplace"] = True
    # torch calls it as a hardtanh
    if node.op == "relu6":
        return LayerCall("ReLU6", (), kwargs)
    if node.target not in _CLASS_OF_TARGET:
        return LayerCall("Function", (node.target,), kwargs)
    return LayerCall(_CLASS_OF_TARGET[node.target], (), kwargs)


def overwritten(graph: Graph, node: Node) -> str | None:
    """Return the node whose value this one's layer overwrites, None if it overwrites none.

    No other node may read that value, and its layer must have allocated the memory.
    """
    if node.op not in _INPLACE or node.params:
        return None
    source = next(node.refs(), None)
    if source is None or not graph.by_name[source].row.fresh:
        return None
    return source if graph.consumers[source] == (node.name,) else None


def _weighted(graph: Graph, node: Node) -> LayerCall:
    """Return the constructor call of a layer with a weight, with the arguments of torch.nn."""
    name = _class(node.row)
    rows, *sizes = graph.weight(node).shape
    groups = node.attrs.get("groups", 1)
    bias = "bias" in node.params
    dims = node.row.spatial
    if dims == 0:
        features = {"in_features": sizes[0], "out_features": rows // groups}
        if node.row.experts:
            return LayerCall(name, (), {**features, "experts": groups})
        return LayerCall(name, (), {**features, "bias": bias})
    if not node.row.types:
        return LayerCall("ChannelScale", (rows,))
    if dims is None:
        padding = node.attrs.get("padding_idx", -1)
        kwargs: dict[str, Any] = {
            "num_embeddings": rows,
            "embedding_dim": sizes[0],
            "padding_idx": None if padding == -1 else padding,
        }
        return LayerCall(name, (), kwargs)
    inputs = sizes[0] * groups
    outputs = rows
    if node.row.transposed:
        inputs, outputs = outputs, inputs
    kwargs = {
        "in_channels": inputs,
        "out_channels": outputs,
        "kernel_size": sizes[1:],
        "stride": _for_each_dim(node.attrs.get("stride", 1), dims),
        "padding": _for_each_dim(node.attrs.get("padding", 0), dims),
    }
    if node.row.transposed:
        kwargs["output_padding"] = _for_each_dim(node.attrs.get("output_padding", 0), dims)
    kwargs["dilation"] = _for_each_dim(node.attrs.get("dilation", 1), dims)
    kwargs["groups"] = groups
    kwargs["bias"] = bias
    return LayerCall(name, (), kwargs)


def _recurrent(node: Node, tensors: Mapping[str, Tensor]) -> LayerCall:
    """Return the constructor call of a recurrent layer, with sizes from its first weights.

    Arguments with torch's default are left out.
    """
    hidden = tensors[node.params["weight_hh_l0"]].shape[1]
    kwargs: dict[str, Any] = {
        "input_size": tensors[node.params["weight_ih_l0"]].shape[1],
        "hidden_size": hidden,
        "num_layers": node.attrs["num_layers"],
        "bias": node.attrs["has_biases"],
        "batch_first": node.attrs["batch_first"],
        "bidirectional": node.attrs["bidirectional"],
    }
    # With a projection the layer feeds back the projected state
    if "weight_hr_l0" in node.params:
        kwargs["hidden_size"] = tensors[node.params["weight_hr_l0"]].shape[1]
        kwargs["proj_size"] = hidden
    if node.op == "rnn_relu":
        kwargs["nonlinearity"] = "relu"
    return LayerCall(_class(node.row), (), kwargs)


def _for_each_dim(value: Any, dims: int) -> Any:
    """Return one number per spatial dimension; "same" and "valid" stay words."""
    if isinstance(value, str):
        return value
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * dims if len(values) == 1 else values


def emit(graph: Graph) -> str:
    """Return the Python source of the network.

    `<Model>()` reads its weights and scales from the folder that contains the file. Calls take
    the same arguments as the traced model. The output is made of dicts, lists and tuples.
    """
    modules = {node.name: f"module_{index}" for index, node in enumerate(graph.nodes)}
    paths = iter(graph.input_paths)
    lines = [_HEADER.format(model=graph.model)]
    calls: list[str] = []
    for node in graph.nodes:
        module = modules[node.name]
        layer = describe(graph, node)
        arguments = [_literal(value, {}) for value in layer.args]
        arguments += _keywords(layer.kwargs, {})
        constructor = f"quantizer.nn.{layer.cls}({', '.join(arguments)})"
        lines.append(f"        self.{module} = {constructor} #{node.name}\n")
        if node.op == "input":
            read = f"input={_access(next(paths))}"
        else:
            read = _arguments(node, modules)
        calls.append(f"        output_{module} = self.{module}({read})\n")
    lines.append("        quantizer.nn.load(self, __file__)\n\n")
    lines.append("    def forward(self, *args, **kwargs):\n")
    lines += calls
    lines.append(f"        return {_literal(graph.output, modules)}\n")
    return "".join(lines)


def _access(path: tuple[Any, ...]) -> str:
    """Return how to read an input of the call, for example `kwargs['opts'][0]`."""
    is_keyword, *keys = path
    text = "kwargs" if is_keyword else "args"
    for key in keys:
        text += f"[{_literal(key, {})}]"
    return text


def _keywords(values: Mapping[str, Any], modules: Mapping[str, str]) -> list[str]:
    """Return the arguments of a call by name, as a dict if a name is not an identifier."""
    if all(key.isidentifier() and not keyword.iskeyword(key) for key in values):
        return [f"{key}={_literal(value, modules)}" for key, value in values.items()]
    return [f"**{_literal(dict(values), modules)}"]


def _arguments(node: Node, modules: Mapping[str, str]) -> str:
    """Return the arguments of a call. A single input is positional, others are named as the
    function names them.
    """
    if node.inputs.keys() == {"input"} and isinstance(node.inputs["input"], Ref):
        return _literal(node.inputs["input"], modules)
    return ", ".join(_keywords(node.inputs, modules))


def _literal(value: Any, modules: Mapping[str, str]) -> str:
    """Return the source text of a nested constant or reference.

    Args:
        value: what to write.
        modules: the attribute of each layer, by name.

    Raises:
        TypeError: this kind of value has no literal.
    """
    if isinstance(value, Ref):
        return f"output_{modules[value.name]}"
    if isinstance(value, dict):
        items: list[str] = []
        for key, item in value.items():
            items.append(f"{_literal(key, {})}: {_literal(item, modules)}")
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{_literals(value, modules)}]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({_literals(value, modules)}{comma})"
    if type(value) is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if type(value) is complex:
        # The repr loses the sign of a zero
        return f"complex({_literals((value.real, value.imag), {})})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return "torch.device('cpu')"  # where a generated network is loaded
    # The repr of a subclass may be any code
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    raise TypeError(f"{type(value).__name__} has no literal")


def _literals(values: Iterable[Any], modules: Mapping[str, str]) -> str:
    return ", ".join(_literal(value, modules) for value in values)
