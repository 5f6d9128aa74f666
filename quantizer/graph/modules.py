"""The graph of a module tree: a node for each layer that can be quantized in place, fed by
itself. Traces nothing.

Names, scopes and operators are those that a trace would give where each layer is called once.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quantizer.errors import ModelError
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.names import Namer
from quantizer.graph.ops import OPS
from quantizer.graph.passes.linear_from_matmul import TRANSPOSED
from quantizer.graph.passes.linear_of_experts import STACKED

OPERATORS: dict[type[nn.Module], str] = {
    getattr(nn, name.removeprefix("torch.nn.")): row.name
    for row in OPS.values()
    for name in row.types
    if row.weight and hasattr(nn, name.removeprefix("torch.nn."))
}
# Its projection of query, key and value
OPERATORS[nn.MultiheadAttention] = OPERATORS[nn.Linear]
"""The operator of a class and of its subclasses."""
EXPERTS = next(row.name for row in OPS.values() if row.experts)
"""That of a module of experts, whatever its class."""

_PROJECTIONS = {
    "weight_q": "q_proj_weight",
    "weight_k": "k_proj_weight",
    "weight_v": "v_proj_weight",
}


def module_graph(model: nn.Module) -> Graph:
    """The layers of `model` as nodes that share nothing; a tied parameter keeps its first path
    in `tensors`.

    A layer's `scope` is its dotted path. Its input is a `module_input` node, so that only its
    own rules reach it; a layer whose forward is never called (the output projection of
    `nn.MultiheadAttention`) has none, nor has one of experts, as there is one for each tensor
    of their module. A weight that is kept [in, out] stands in `tensors` as [out, in], those of
    experts as [experts * out, in]. Last come modules without such weights: names that may be
    said.

    Raises:
        ModelError: a layer has no weights yet (lazy modules, the meta device).
    """
    namer = Namer(model)
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    nodes: list[Node] = []
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        op, owned, params = operator_of(module), parameters_of(module), {}
        if not op or "weight" not in {key.partition("_")[0] for key in owned}:
            continue
        for key, attribute in owned.items():
            parameter = module.get_parameter(attribute)
            if is_lazy(parameter):
                text = f"{path}.{attribute} has no shape yet: its layer is lazy"
                raise ModelError(text, help="run the model once on real data first")
            if parameter.is_meta:
                text = f"{path}.{attribute} is on the meta device, without values"
                raise ModelError(text, help="load the model's weights first")
            params[key] = paths[id(parameter)] + _suffix(module, key)
            tensors[params[key]] = as_planned(module, key, parameter.detach())
        if is_of_experts(module):
            nodes += _experts(namer, path, module, params)
            continue
        dtype = tensors[next(iter(params.values()))].dtype
        name = namer.name(path, op)
        inputs = {}
        if is_called(module):
            source, looks_up = (
                f"{namer.model}::module_input_{len(nodes)}",
                isinstance(module, nn.Embedding),
            )
            nodes.append(
                Node(source, "module_input", "module", dtype=torch.int64 if looks_up else dtype)
            )
            inputs["indices" if looks_up else "input"] = Ref(source)
        # Several tensors have none
        made = dtype if is_called(module) and not isinstance(module, nn.RNNBase) else None
        classes = namer.classes(path)
        attrs = {"groups": module.groups} if OPS[op].spatial else {}
        node = Node(name, op, "module", inputs, attrs, params, path, classes, dtype=made)
        nodes.append(node)
    output = tuple(Ref(node.name) for node in nodes if node.params)
    covered = {node.scope for node in nodes}
    for path, module in model.named_modules():
        if path and path not in covered and not any(module.children()):
            nodes.append(
                Node(
                    namer.name(path, "module"),
                    "module",
                    "module",
                    scope=path,
                    classes=namer.classes(path),
                )
            )
    return Graph(namer.model, tuple(nodes), output, tensors)


def _experts(
    namer: Namer, path: str, module: nn.Module, params: Mapping[str, str]
) -> Iterator[Node]:
    """A layer for each tensor of a module of experts, with the name that it has in a trace."""
    classes = namer.classes(path)
    for key, attribute in parameters_of(module).items():
        name, groups = namer.name(path, attribute), len(module.get_parameter(attribute))
        weight = {"weight": params[key]}
        yield Node(
            name,
            EXPERTS,
            "module",
            attrs={"groups": groups},
            params=weight,
            scope=path,
            classes=classes,
        )


def key_in_module(node: Node, key: str) -> str:
    """What `parameters_of` the node's module calls a parameter: each tensor of experts is a
    layer, and one of its own there.
    """
    return f"{key}_{node.name.rpartition('/')[2]}" if node.row.experts else key


def operator_of(module: nn.Module) -> str | None:
    """The operator that a module computes with its weight, None if it is none of ours."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if isinstance(module, nn.RNN):
        return f"rnn_{module.nonlinearity}"
    if is_transposed(module):
        return OPERATORS[nn.Linear]
    if is_of_experts(module):
        return EXPERTS
    return next((op for cls, op in OPERATORS.items() if isinstance(module, cls)), None)


def parameters_of(module: nn.Module) -> Mapping[str, str]:
    """Role-like key ("weight", "bias_ih_l0", …) to attribute, for parameters of floating point
    that the module owns.

    A weight that is computed (by a parametrization) or stored in integers is not among them.
    """
    wanted: Mapping[str, str] = {"weight": "weight", "bias": "bias"}
    if isinstance(module, nn.RNNBase):
        wanted = {
            name: name for name in module._parameters if name.startswith(("weight", "bias"))
        }
    elif isinstance(module, nn.MultiheadAttention):
        wanted = {"weight": "in_proj_weight", **_PROJECTIONS, "bias": "in_proj_bias"}
    elif is_of_experts(module):
        wanted = {
            f"weight_{name}": name
            for name, value in module._parameters.items()
            if _is_stack(module, value)
        }
    owned = {
        name
        for name, value in module._parameters.items()
        if value is not None and value.is_floating_point()
    }
    return {key: name for key, name in wanted.items() if name in owned}


def is_transposed(module: nn.Module) -> bool:
    """Whether this is transformers' Conv1D: a linear layer with its weight as [in, out]."""
    weight = module._parameters.get("weight")
    return (
        type(module).__name__ == "Conv1D"
        and hasattr(module, "nf")
        and weight is not None
        and weight.dim() == 2
    )


def is_of_experts(module: nn.Module) -> bool:
    """Whether this is a module of transformers with a tensor [experts, out, in] for each layer
    of its experts, or [experts, in, out] where its `is_transposed` says so.
    """
    known = isinstance(vars(module).get("is_transposed"), bool) and isinstance(
        vars(module).get("num_experts"), int
    )
    return known and any(_is_stack(module, value) for value in module._parameters.values())


def _is_stack(module: Any, value: Tensor | None) -> bool:
    return (
        value is not None
        and not is_lazy(value)
        and value.dim() == 3
        and len(value) == module.num_experts
    )


def as_planned(module: Any, key: str, value: Tensor) -> Tensor:
    """A parameter, or a tensor shaped like it, with its axes as the plan counts them."""
    if is_of_experts(module):
        return (value.mT if module.is_transposed else value).flatten(0, 1)
    return value.t() if key == "weight" and is_transposed(module) else value


def as_stored(module: Any, key: str, value: Tensor) -> Tensor:
    """The way back from `as_planned`."""
    if is_of_experts(module):
        stack = value.reshape(int(module.num_experts), -1, value.shape[1])
        return stack.mT if module.is_transposed else stack
    return value.t() if key == "weight" and is_transposed(module) else value


def _suffix(module: Any, key: str) -> str:
    """What ends the path of a parameter whose axes are not those of the module's."""
    if is_of_experts(module):
        return f"{TRANSPOSED if module.is_transposed else ''}{STACKED}"
    return ".T" if key == "weight" and is_transposed(module) else ""


def is_called(module: nn.Module) -> bool:
    """Whether the layer's forward runs with its input; attention reads the weights of its
    projections directly, and experts theirs.
    """
    reads = isinstance(
        module, (nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)
    )
    return not reads and not is_of_experts(module)


def left_out(model: nn.Module, graph: Graph) -> dict[str, str]:
    """Path and class of each module with trained weights of two or more dimensions that no node
    covers.
    """
    covered = {node.scope for node in graph.nodes if node.params}
    return {
        path: type(module).__name__
        for path, module in model.named_modules()
        if path not in covered
        and any(not is_lazy(p) and p.dim() > 1 for p in module.parameters(recurse=False))
    }
