"""Make the graph of a module tree without a trace: a node for each layer that can be quantized
in place, with an input of its own. Also find what a graph lacks of a model.

Names, scopes and operators are those of a trace in which each layer is called once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from quantizer.errors import ModelError
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.names import Namer, last_part
from quantizer.graph.ops import OPS
from quantizer.graph.passes.linear_layers import STACKED, TRANSPOSED

MODULE_OPERATORS: dict[type[nn.Module], str] = {}
"""The operator of a class and of its subclasses."""
for _row in OPS.values():
    for _type in _row.types:
        _name = _type.removeprefix("torch.nn.")
        if _row.weight and hasattr(nn, _name):
            MODULE_OPERATORS[getattr(nn, _name)] = _row.name
# Its projection of query, key and value
MODULE_OPERATORS[nn.MultiheadAttention] = MODULE_OPERATORS[nn.Linear]
_EXPERTS = next(row.name for row in OPS.values() if row.experts)
"""The operator of a module of experts, of any class."""

_PROJECTIONS = {
    "weight_q": "q_proj_weight",
    "weight_k": "k_proj_weight",
    "weight_v": "v_proj_weight",
}


def module_graph(model: nn.Module) -> Graph:
    """Return the layers of `model` as nodes that share nothing.

    A tied parameter has its first path in `tensors`. A layer's `scope` is its dotted path. Its
    input is a `module_input` node, so that only its own rules reach it. Layers have no input
    if their forward is never called (the output projection of `nn.MultiheadAttention`), or if
    their module has several of them (experts). A weight that the module has as [in, out] is
    [out, in] in `tensors`, a stack of experts [experts * out, in]. Modules without such weights
    come last, so that a config may name them.

    Raises:
        ModelError: a layer has no weights yet (lazy modules, the meta device).
    """
    namer = Namer(model)
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    nodes: list[Node] = []
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        op = operator_of(module)
        owned = parameters_of(module)
        roles = {key.partition("_")[0] for key in owned}
        if op is None or "weight" not in roles:
            continue
        params: dict[str, str] = {}
        for key, attribute in owned.items():
            parameter = _loaded_parameter(path, module, attribute)
            params[key] = paths[id(parameter)] + _suffix(module, key)
            tensors[params[key]] = as_planned(module, key, parameter.detach())
        if is_of_experts(module):
            nodes += _expert_layers(namer, path, module, params)
            continue
        dtype = tensors[next(iter(params.values()))].dtype
        layer = Node(
            name=namer.name(path, op),
            op=op,
            target="module",
            params=params,
            scope=path,
            classes=namer.classes(path),
        )
        if OPS[op].spatial:
            layer = replace(layer, attrs={"groups": module.groups})
        if is_called(module):
            source = f"{namer.model}::module_input_{len(nodes)}"
            looks_up = isinstance(module, nn.Embedding)
            read = torch.int64 if looks_up else dtype
            nodes.append(Node(source, "module_input", "module", dtype=read))
            inputs = {"indices" if looks_up else "input": Ref(source)}
            # A recurrent layer makes several tensors
            result = None if isinstance(module, nn.RNNBase) else dtype
            layer = replace(layer, inputs=inputs, dtype=result)
        nodes.append(layer)
    output = tuple(Ref(node.name) for node in nodes if node.params)
    covered = {node.scope for node in nodes}
    for path, module in model.named_modules():
        if path and path not in covered and not any(module.children()):
            name = namer.name(path, "module")
            classes = namer.classes(path)
            nodes.append(Node(name, "module", "module", scope=path, classes=classes))
    return Graph(namer.model, tuple(nodes), output, tensors)


def _loaded_parameter(path: str, module: nn.Module, attribute: str) -> nn.Parameter:
    """Return a parameter.

    Raises:
        ModelError: it has no values.
    """
    parameter = module.get_parameter(attribute)
    if is_lazy(parameter):
        text = f"{path}.{attribute} has no shape yet: its layer is lazy"
        raise ModelError(text, help="run the model once on real data first")
    if parameter.is_meta:
        text = f"{path}.{attribute} is on the meta device, without values"
        raise ModelError(text, help="load the model's weights first")
    return parameter


def _expert_layers(
    namer: Namer, path: str, module: nn.Module, params: Mapping[str, str]
) -> Iterator[Node]:
    """Yield a layer for each tensor of a module of experts, with the name of a trace."""
    for key, attribute in parameters_of(module).items():
        experts = len(module.get_parameter(attribute))
        yield Node(
            name=namer.name(path, attribute),
            op=_EXPERTS,
            target="module",
            attrs={"groups": experts},
            params={"weight": params[key]},
            scope=path,
            classes=namer.classes(path),
        )


def key_in_module(node: Node, key: str) -> str:
    """Return the key by which `parameters_of` the node's module lists a parameter.

    Each tensor of experts is a layer here, and has a key of its own there.
    """
    return f"{key}_{last_part(node.name)}" if node.row.experts else key


def operator_of(module: nn.Module) -> str | None:
    """Return the operator that a module computes with its weight, None if it has none."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    if isinstance(module, nn.RNN):
        return f"rnn_{module.nonlinearity}"
    if is_transposed(module):
        return MODULE_OPERATORS[nn.Linear]
    if is_of_experts(module):
        return _EXPERTS
    for kind, op in MODULE_OPERATORS.items():
        if isinstance(module, kind):
            return op
    return None


def parameters_of(module: nn.Module) -> Mapping[str, str]:
    """Return the attributes of the floating-point parameters that a module owns, by role
    ("weight", "bias_ih_l0", …).

    A weight that is computed (by a parametrization) or stored in integers is not among them.
    """
    attributes = {"weight": "weight", "bias": "bias"}
    if isinstance(module, nn.RNNBase):
        names = [name for name in module._parameters if name.startswith(("weight", "bias"))]
        attributes = dict(zip(names, names, strict=True))
    elif isinstance(module, nn.MultiheadAttention):
        attributes = {"weight": "in_proj_weight", **_PROJECTIONS, "bias": "in_proj_bias"}
    elif is_of_experts(module):
        attributes = {}
        for name, value in module._parameters.items():
            if _is_stack(module, value):
                attributes[f"weight_{name}"] = name
    # Modules that torch.jit compiled have parameters that are no dict.
    parameters = dict(module._parameters.items())
    owned: dict[str, str] = {}
    for key, name in attributes.items():
        value = parameters.get(name)
        if value is not None and value.is_floating_point():
            owned[key] = name
    return owned


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D: a linear layer with a weight
    [in, out].
    """
    weight = module._parameters.get("weight")
    if type(module).__name__ != "Conv1D" or not hasattr(module, "nf"):
        return False
    return weight is not None and weight.dim() == 2


def is_of_experts(module: nn.Module) -> bool:
    """Return whether a module of transformers has a tensor [experts, out, in] for each layer of
    its experts, or [experts, in, out] where its `is_transposed` says so.
    """
    attributes = vars(module)
    if not isinstance(attributes.get("is_transposed"), bool):
        return False
    if not isinstance(attributes.get("num_experts"), int):
        return False
    return any(_is_stack(module, value) for value in module._parameters.values())


def _is_stack(module: Any, value: Tensor | None) -> bool:
    if value is None or is_lazy(value):
        return False
    return value.dim() == 3 and len(value) == module.num_experts


def as_planned(module: Any, key: str, value: Tensor) -> Tensor:
    """Return a parameter, or a tensor shaped like it, with its axes as in the plan."""
    if is_of_experts(module):
        stack = value.mT if module.is_transposed else value
        return stack.flatten(0, 1)
    return value.t() if key == "weight" and is_transposed(module) else value


def as_stored(module: Any, key: str, value: Tensor) -> Tensor:
    """Return a tensor of the plan with its axes as in the module, the inverse of
    `as_planned`.
    """
    if is_of_experts(module):
        stack = value.reshape(int(module.num_experts), -1, value.shape[1])
        return stack.mT if module.is_transposed else stack
    return value.t() if key == "weight" and is_transposed(module) else value


def _suffix(module: Any, key: str) -> str:
    """Return the end of the path of a parameter whose axes differ from the module's."""
    if is_of_experts(module):
        return TRANSPOSED + STACKED if module.is_transposed else STACKED
    return ".T" if key == "weight" and is_transposed(module) else ""


def is_called(module: nn.Module) -> bool:
    """Return whether the layer's forward runs with its input.

    Attention reads the weights of its projections directly, and modules of experts theirs.
    """
    if isinstance(module, nn.MultiheadAttention) or is_of_experts(module):
        return False
    return not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)


def uncovered_modules(model: nn.Module, graph: Graph) -> dict[str, str]:
    """Return the path and the class of each module with trained weights of two or more
    dimensions that no node covers.
    """
    covered = {node.scope for node in graph.nodes if node.params}
    classes: dict[str, str] = {}
    for path, module in model.named_modules():
        weights = [value for value in module.parameters(recurse=False) if not is_lazy(value)]
        if path not in covered and any(weight.dim() > 1 for weight in weights):
            classes[path] = type(module).__name__
    return classes


@dataclass(frozen=True)
class Untraced:
    """The parameters of a model that no node of a graph reads.

    Attributes:
        size: in bytes.
        reasons: why their layers stay in float, by path.
    """

    size: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict)


def untraced_part(model: nn.Module, graph: Graph) -> Untraced:
    """Return the parameters that no node of a trace reads.

    Args:
        model: in float.
        graph: its trace before all passes.
    """
    traced_ids = _traced_ids(model, graph)
    size = 0
    reasons: dict[str, str] = {}
    for path, parameter in model.named_parameters():
        if id(parameter) in traced_ids:
            continue
        size += parameter.nbytes
        if parameter.dim() > 1:
            layer, _, _ = path.rpartition(".")
            reasons[layer] = "not reached by the data"
    return Untraced(size, reasons)


def _traced_ids(model: nn.Module, graph: Graph) -> set[int]:
    """Return the ids of the parameters that a node reads, by any of their paths."""
    traced_paths: set[str] = set()
    for node in graph.nodes:
        traced_paths.update(node.params.values())
    traced_ids: set[int] = set()
    parameters = model.named_parameters(remove_duplicate=False)
    for path, parameter in parameters:
        if path in traced_paths:
            traced_ids.add(id(parameter))
    return traced_ids
