"""How a node is written down, for the executor and the generated code: class in `quantizer.nn`,
arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from quantizer.graph.ir import Graph, Node
from quantizer.graph.op_row import Op
from quantizer.graph.ops import OPS


def _class(row: Op) -> str:
    """The class of torch.nn, after which ours is named; of a function its name."""
    name = row.types[0].rpartition(".")[2] if row.types else ""
    return (
        name
        if name[:1].isupper()
        else "".join(part.capitalize() for part in row.name.split("_"))
    )


def _layers(overload: str, *names: str) -> dict[str, str]:
    """The classes of operators that torch calls by one overload."""
    return {_class(OPS[name]): f"aten.{name}.{overload}" for name in names}


FUNCTION_LAYERS: dict[str, str] = {
    **_layers(
        "default",
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
    ),
    **_layers(
        "default",
        "tanh",
        "hardswish",
        "hardsigmoid",
        "layer_norm",
        "group_norm",
        "rms_norm",
        "neg",
        "matmul",
    ),
    **_layers(
        "default",
        "bmm",
        "addmm",
        "scaled_dot_product_attention",
        "cat",
        "stack",
        "chunk",
        "reshape",
        "permute",
    ),
    **_layers(
        "default",
        "pad",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
    ),
    **_layers("default", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    **_layers("Tensor", "add", "sub", "mul", "div", "split", "slice"),
    **_layers("int", "softmax", "log_softmax", "transpose", "select"),
    **_layers("dim", "mean"),
    **_layers("dim_IntList", "sum"),
    **_layers("self", "where"),
    **_layers("Scalar", "masked_fill"),
    **_layers("using_ints", "flatten"),
    "BatchNorm": "aten.batch_norm.default",
    "InstanceNorm": "aten.instance_norm.default",
    "View": "aten.view.default",
    "Size": "aten.sym_size.int",
    "GetItem": "operator.getitem",
}
"""Classes of `quantizer.nn` that are one torch function: class name -> target."""
# Layers of our own: those that compute as a device does, and those that algorithms insert,
# which take a weight's size.
OWN_LAYERS: dict[str, str] = {
    "dpu.avg_pool2d": "DpuAvgPool2d",
    "dpu.hardsigmoid": "DpuHardsigmoid",
    "dpu.hardswish": "DpuHardswish",
    "rescale.input_scale": "InputScale",
    "rescale.rotation": "InputRotation",
}
_CLASS_OF_TARGET = {target: name for name, target in reversed(FUNCTION_LAYERS.items())}
_STRUCTURE = {"input": "Input", "quant_stub": "QuantStub", "dequant_stub": "DeQuantStub"}
# Activations that may overwrite their input when nobody else reads it.
_INPLACE = ("relu", "relu6", "leaky_relu", "hardtanh", "silu", "hardswish")


@dataclass(frozen=True)
class LayerCall:
    """`quantizer.nn.<cls>(*args, **kwargs)`; all arguments are literals."""

    cls: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def describe(graph: Graph, node: Node) -> LayerCall:
    """The constructor call of a node's layer."""
    if node.op in _STRUCTURE:
        return LayerCall(_STRUCTURE[node.op])
    if node.op in ("parameter", "constant"):
        tensor = graph.weight(node)
        return LayerCall(node.op.capitalize(), (list(tensor.shape),), {"dtype": tensor.dtype})
    if "weight_hh_l0" in node.params:
        return _recurrent(node, graph.tensors)
    if node.row.weight and "weight" in node.params and "bias" not in node.inputs:
        return _weighted(node, graph.tensors)
    kwargs = dict(node.attrs)
    if node.target in OWN_LAYERS:
        sizes = (len(graph.weight(node)),) if "weight" in node.params else ()
        return LayerCall(OWN_LAYERS[node.target], sizes, kwargs)
    if node.params:
        kwargs["params"] = {
            key: list(graph.tensors[path].shape) for key, path in node.params.items()
        }
    if overwritten(graph, node) is not None:
        kwargs["inplace"] = True
    if node.op == "relu6":
        return LayerCall(
            "ReLU6", (), {key: value for key, value in kwargs.items() if key == "inplace"}
        )
    cls = _CLASS_OF_TARGET.get(node.target)
    return LayerCall(cls, (), kwargs) if cls else LayerCall("Function", (node.target,), kwargs)


def overwritten(graph: Graph, node: Node) -> str | None:
    """The node whose value this one's layer overwrites, if any: nobody else reads the memory
    that its producer made.
    """
    source = next(iter(node.refs()), None)
    is_alone = (
        source is not None
        and graph.by_name[source].row.fresh
        and graph.consumers[source] == (node.name,)
    )
    return source if node.op in _INPLACE and not node.params and is_alone else None


def _weighted(node: Node, tensors: Mapping[str, Tensor]) -> LayerCall:
    """Constructor arguments as torch.nn spells them, read off the weight's shape and the call's
    constants.
    """
    shape, dims, transposed = (
        tensors[node.params["weight"]].shape,
        node.row.spatial,
        node.row.transposed,
    )
    bias = "bias" in node.params
    if dims == 0:
        experts = {"experts": node.attrs["groups"]} if node.row.experts else {"bias": bias}
        outputs = shape[0] // node.attrs.get("groups", 1)
        return LayerCall(
            _class(node.row), (), {"in_features": shape[1], "out_features": outputs, **experts}
        )
    if not node.row.types:
        return LayerCall("ChannelScale", (shape[0],))
    if dims is None:
        padding = node.attrs.get("padding_idx", -1)
        sizes = {"num_embeddings": shape[0], "embedding_dim": shape[1]}
        return LayerCall(
            _class(node.row), (), {**sizes, "padding_idx": None if padding == -1 else padding}
        )
    groups = node.attrs.get("groups", 1)
    kwargs: dict[str, Any] = {
        "in_channels": shape[0] if transposed else shape[1] * groups,
        "out_channels": shape[1] * groups if transposed else shape[0],
        "kernel_size": list(shape[2:]),
        "stride": _spread(node.attrs.get("stride", 1), dims),
        "padding": _spread(node.attrs.get("padding", 0), dims),
    }
    if transposed:
        kwargs["output_padding"] = _spread(node.attrs.get("output_padding", 0), dims)
    kwargs |= {
        "dilation": _spread(node.attrs.get("dilation", 1), dims),
        "groups": groups,
        "bias": bias,
    }
    return LayerCall(_class(node.row), (), kwargs)


def _recurrent(node: Node, tensors: Mapping[str, Tensor]) -> LayerCall:
    """The sizes are read off the first layer's weights; what torch.nn takes for granted is left
    out.
    """
    hidden = tensors[node.params["weight_hh_l0"]].shape
    projection = "weight_hr_l0" in node.params
    kwargs: dict[str, Any] = {
        "input_size": tensors[node.params["weight_ih_l0"]].shape[1],
        "hidden_size": tensors[node.params["weight_hr_l0"]].shape[1]
        if projection
        else hidden[1],
        "num_layers": node.attrs["num_layers"],
        "bias": node.attrs["has_biases"],
        "batch_first": node.attrs["batch_first"],
        "bidirectional": node.attrs["bidirectional"],
    }
    kwargs |= {"proj_size": hidden[1]} if projection else {}
    kwargs |= {"nonlinearity": "relu"} if node.op == "rnn_relu" else {}
    return LayerCall(_class(node.row), (), kwargs)


def _spread(value: Any, dims: int) -> Any:
    """One number per spatial dimension; "same" and "valid" stay words."""
    if isinstance(value, str):
        return value
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * dims if len(values) == 1 else values
