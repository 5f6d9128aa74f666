"""Divide the value that a group of layers reads by a factor for each channel, and multiply the
layers' weights by it. The float network computes the same.

The division goes into the layer before, the group's `Fold`, or else becomes a layer of its own.
Which factors are good is decided elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.graph.edits import Insertion, channels_of, input_weights, rescale_weight
from quantizer.graph.ir import Graph
from quantizer.graph.output_names import unused_names
from quantizer.graph.structure.definitions import Fold, InputGroup
from quantizer.layerwise.adjustment import Adjustment, Remark
from quantizer.storage.deferred_tensor import deferred_like

SCALE_OP = "input_scale"
_KEEPS_INPUTS = "no layer takes up factors of its inputs, so these are not rescaled"


def fold_factors(
    graph: Graph, group: InputGroup, factors: Tensor, adjustment: Adjustment
) -> Adjustment:
    """Return the adjustment with the group's input divided by `factors`, and the columns of its
    layers' weights multiplied.

    Rounded weights of the layers that change are dropped.

    Args:
        graph: without the adjustment.
        group: the layers.
        factors: float32 [channels], above 0, as `admissible` gives them. Experts that are
            `factored_apart` may have some each: [experts * channels].
        adjustment: what earlier steps found.
    """
    fold = _fold(group, adjustment)
    for layer in _multiplied(group, fold):
        node = graph.by_name[layer]
        for key in input_weights(node):
            weight = parameter(graph, adjustment, layer, key)
            scaled = rescale_weight(node, weight, inputs=factors)
            changed = {key: deferred_like(weight, scaled)}
            adjustment = adjustment.with_parameters(layer, **changed)
    if fold is None:
        return _divided_by_layer(graph, group, factors, adjustment)
    return _divided_in_fold(graph, fold, factors, adjustment)


def factored_apart(graph: Graph, group: InputGroup) -> bool:
    """Check whether each expert may have factors of its own, as layers of the same experts make
    what the group's layers read.
    """
    names = [*group.layers]
    if group.fold is not None:
        names += [group.fold.node, *group.fold.extra]
    nodes = [graph.by_name[name] for name in names]
    routes = set()
    for node in nodes:
        routing = [item for item in node.operands.items() if item[0] != "input"]
        routes.add(tuple(routing))
    are_experts = all(node.row.experts for node in nodes)
    return group.fold is not None and are_experts and len(routes) == 1


def admissible(
    graph: Graph, group: InputGroup, adjustment: Adjustment
) -> Callable[[Tensor], Tensor]:
    """Return a function that turns any factors into the nearest that can be folded.

    Those are equal where channels are, and nothing overflows. Parameters of 16 bits get powers
    of two, as other factors would round them.
    """
    fold = _fold(group, adjustment)
    multiplied = [parameter(graph, adjustment, name) for name in _multiplied(group, fold)]
    divided = []
    if fold is not None:
        divided = [*_divided_parameters(graph, fold, adjustment).values()]
    is_narrow = any(tensor.element_size() < 4 for tensor in (*multiplied, *divided))
    largest = 2.0**126
    for tensor in multiplied:
        largest = min(largest, torch.finfo(tensor.dtype).max / max(_largest(tensor), 1e-30))
    smallest = 2.0**-126
    for tensor in divided:
        smallest = max(smallest, _largest(tensor) / torch.finfo(tensor.dtype).max)

    def nearest_admissible(factors: Tensor) -> Tensor:
        """Return the factors, tied and within what the dtypes can hold."""
        factors = tie_factors(group, factors)
        if is_narrow:
            factors = powers_of_two(factors)
        inside = factors.clamp(smallest, largest)
        if torch.equal(inside, factors):
            return factors
        return powers_of_two(inside.clamp(2 * smallest, largest / 2))

    return nearest_admissible


def tie_factors(group: InputGroup, factors: Tensor) -> Tensor:
    """Return the factors, with the largest one for all channels that come from one output
    channel of the layer before.

    >>> group = InputGroup(
    ...     "x", ("layer",), -1, 4, fold=Fold("layer", "before", channels=(0, 0, 1, 1))
    ... )
    >>> tie_factors(group, torch.tensor([1.0, 2.0, 3.0, 1.0])).tolist()
    [2.0, 2.0, 3.0, 3.0]
    """
    if group.fold is None or group.fold.channels is None:
        return factors
    origin = torch.tensor(group.fold.channels, device=factors.device)
    channels = int(origin.max()) + 1
    by_origin = _by_origin(group.fold, factors, channels).view(-1, channels)
    return by_origin[:, origin].flatten()


def powers_of_two(factors: Tensor) -> Tensor:
    """Return the nearest powers of two. Multiplying by them rounds nothing, so the network's
    float outputs keep every bit.

    >>> powers_of_two(torch.tensor([0.3, 1.0, 3.0])).tolist()
    [0.25, 1.0, 4.0]
    """
    return torch.exp2(torch.log2(factors).round())


def parameter(graph: Graph, adjustment: Adjustment, layer: str, key: str = "weight") -> Tensor:
    """Return a layer's parameter as the adjustment has it, or else the model."""
    value = adjustment.parameters.get(layer, {}).get(key)
    if value is None:
        return graph.tensors[graph.by_name[layer].params[key]]
    return value


def input_name(group: InputGroup, adjustment: Adjustment) -> str:
    """Return the node whose value the group's layers read, after all insertions."""
    name = group.source
    for insertion in adjustment.insertions:
        if insertion.source == name and group.layers[0] in insertion.readers:
            name = insertion.name
    return name


def shared_folds(
    graph: Graph,
    groups: Sequence[InputGroup],
    is_rescaled: Callable[[InputGroup], bool],
    adjustment: Adjustment,
) -> tuple[list[InputGroup], dict[int, int]]:
    """Return the groups, and the number of the group that each follower follows.

    Groups that read one value in ways of their own (a router, the experts, a shared expert)
    fold into one layer. Of those that are rescaled, the one with the most weights finds the
    factors, and the columns of the others are multiplied as well. Where that cannot be, each
    gets a multiplication of its own instead.
    """
    group_of: dict[str, int] = {}
    for number, group in enumerate(groups):
        if is_rescaled(group):
            group_of.update(dict.fromkeys(group.layers, number))
    behind_insertions: set[str] = set()
    for insertion in adjustment.insertions:
        behind_insertions.update(insertion.readers)

    def size(number: int) -> int:
        nodes = [graph.by_name[name] for name in groups[number].layers]
        return sum(graph.weight(node).numel() for node in nodes)

    changed = list(groups)
    leads: dict[int, int] = {}
    for number, group in enumerate(groups):
        if group.fold is None or not is_rescaled(group):
            continue
        others = {group_of[name] for name in group.fold.extra if name in group_of}
        together = sorted({number, *others})
        if len(together) == 1:
            continue
        lead = max(together, key=size)  # the first of equal ones
        layers: set[str] = set()
        for member in together:
            layers.update(groups[member].layers)
        fold = groups[lead].fold
        can_lead = fold is not None and layers <= {*groups[lead].layers, *fold.extra}
        if not can_lead or layers & behind_insertions:
            changed[number] = replace(group, fold=None)
        elif number != lead:
            changed[number] = replace(group, fold=None, is_fixed=True)
            leads[number] = lead
    return changed, leads


def without_insertions(
    groups: Sequence[InputGroup], adjustment: Adjustment
) -> tuple[list[InputGroup], list[Remark]]:
    """Return the groups, where those whose factors fold into no layer are fixed.

    Returns:
        The groups, and a note on each layer whose inputs can be divided by an operator only.
    """
    changed: list[InputGroup] = []
    remarks: list[Remark] = []
    for group in groups:
        if group.is_fixed or _fold(group, adjustment) is not None:
            changed.append(group)
            continue
        changed.append(replace(group, is_fixed=True))
        remarks.extend(Remark(layer, _KEEPS_INPUTS, is_warning=False) for layer in group.layers)
    return changed, remarks


def _fold(group: InputGroup, adjustment: Adjustment) -> Fold | None:
    """Return the group's fold, unless a layer was inserted behind it."""
    for insertion in adjustment.insertions:
        if group.layers[0] in insertion.readers:
            return None
    return group.fold


def _multiplied(group: InputGroup, fold: Fold | None) -> tuple[str, ...]:
    """Return the layers whose columns are multiplied."""
    return group.layers if fold is None else (*group.layers, *fold.extra)


def _divided_parameters(graph: Graph, fold: Fold, adjustment: Adjustment) -> dict[str, Tensor]:
    params = graph.by_name[fold.node].params
    keys = [key for key in ("weight", "bias") if key in params]
    return {key: parameter(graph, adjustment, fold.node, key) for key in keys}


def _divided_in_fold(
    graph: Graph, fold: Fold, factors: Tensor, adjustment: Adjustment
) -> Adjustment:
    """Divide the output channels of the layer before."""
    node = graph.by_name[fold.node]
    values: dict[str, Tensor] = {}
    for key, value in _divided_parameters(graph, fold, adjustment).items():
        if key == "weight" and node.is_multiplying:
            inverse = 1 / _by_origin(fold, factors, channels_of(node, value)[0])
            values[key] = deferred_like(value, rescale_weight(node, value, outputs=inverse))
        else:
            inverse = 1 / _by_origin(fold, factors, value.numel()).view(value.shape)
            offset = fold.offset if key == "weight" else 0.0
            values[key] = ((value.float() + offset) * inverse - offset).to(value.dtype)
    return adjustment.with_parameters(fold.node, **values)


def _by_origin(fold: Fold, factors: Tensor, channels: int) -> Tensor:
    """Return a factor for each output channel of the fold's node, or of each of its experts; 1
    for channels that are not read.
    """
    if fold.channels is None:
        return factors
    origin = torch.tensor(fold.channels, device=factors.device)
    rows = factors.view(-1, len(origin))
    ones = torch.ones(len(rows), channels, device=factors.device)
    largest = ones.scatter_reduce(1, origin.expand_as(rows), rows, "amax", include_self=False)
    return largest.flatten()


def _divided_by_layer(
    graph: Graph, group: InputGroup, factors: Tensor, adjustment: Adjustment
) -> Adjustment:
    """Divide by an inserted layer, which may be there from an earlier step."""
    source = input_name(group, adjustment)
    insertions = list(adjustment.insertions)
    for index, insertion in enumerate(insertions):
        is_scale = insertion.name == source and insertion.op == SCALE_OP
        if is_scale and set(insertion.readers) == set(group.layers):
            insertions[index] = replace(insertion, weight=insertion.weight / factors)
            return replace(adjustment, insertions=tuple(insertions))
    scope, slash, last = group.layers[0].rpartition("/")
    _, dot, number = last.partition(".")
    # Experts in one module need a number, and the graph may scale this input already
    taken = {insertion.name for insertion in insertions} | graph.by_name.keys()
    [name] = unused_names([f"{scope}{slash}{SCALE_OP}{dot}{number}"], taken)
    axis = {"axis": group.axis}
    insertion = Insertion(name, SCALE_OP, source, group.layers, 1 / factors, axis)
    return replace(adjustment, insertions=(*insertions, insertion))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().float().abs().max()) if tensor.numel() else 0.0
