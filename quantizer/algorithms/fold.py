"""Divides what a group of layers reads by a factor for each channel, and multiplies their
weights: same function.

Where the division goes is the group's `Fold`, or else a layer of its own. Chooses no factors.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment
from quantizer.graph.edits import Insertion, channels_of, rescaled
from quantizer.graph.ir import Graph
from quantizer.graph.structure import Fold, InputGroup
from quantizer.storage.deferred_tensor import beside

SCALE_OP = "input_scale"


def folded(graph: Graph, group: InputGroup, factors: Tensor, found: Adjustment) -> Adjustment:
    """What was found, and the group's input divided by `factors`, the columns of its layers'
    weights multiplied.

    What was rounded of the layers that change is forgotten.

    Args:
        graph: without what was found.
        factors: float32 [channels], above 0; as `admissible` gives them. Experts that are
            `factored_apart` may have some each: [experts * channels].
    """
    fold = _fold(group, found)
    for layer in (*group.layers, *(fold.extra if fold else ())):
        weight = parameter(graph, found, layer)
        value = rescaled(graph.by_name[layer], weight, inputs=factors)
        found = found.with_parameters(layer, weight=beside(weight, value))
    return (
        _inserted(group, factors, found)
        if fold is None
        else _divided(graph, fold, factors, found)
    )


def factored_apart(graph: Graph, group: InputGroup) -> bool:
    """Whether each expert may have factors of its own: layers of the same experts make what the
    group's layers read.
    """
    nodes = [
        graph.by_name[name]
        for name in (
            *group.layers,
            *((group.fold.node, *group.fold.extra) if group.fold else ()),
        )
    ]
    routes = {
        tuple(item for item in node.operands.items() if item[0] != "input") for node in nodes
    }
    return (
        group.fold is not None and all(node.row.experts for node in nodes) and len(routes) == 1
    )


def admissible(
    graph: Graph, group: InputGroup, found: Adjustment
) -> Callable[[Tensor], Tensor]:
    """What makes of any factors the nearest that can be folded: equal where channels are, and
    nothing overflows.

    Parameters of 16 bits would be rounded by other factors than powers of two, so those are
    taken there.
    """
    fold = _fold(group, found)
    columns = [
        parameter(graph, found, layer)
        for layer in (*group.layers, *(fold.extra if fold else ()))
    ]
    rows = _parameters(graph, fold, found) if fold else {}
    is_narrow = any(tensor.element_size() < 4 for tensor in (*columns, *rows.values()))
    most, least = 2.0**126, 2.0**-126
    for tensor in columns:
        most = min(most, torch.finfo(tensor.dtype).max / max(_largest(tensor), 1e-30))
    for tensor in rows.values():
        least = max(least, _largest(tensor) / torch.finfo(tensor.dtype).max)

    def within(factors: Tensor) -> Tensor:
        even = powers_of_two(tied(group, factors)) if is_narrow else tied(group, factors)
        inside = even.clamp(least, most)
        return (
            inside
            if torch.equal(inside, even)
            else powers_of_two(inside.clamp(2 * least, most / 2))
        )

    return within


def tied(group: InputGroup, factors: Tensor) -> Tensor:
    """The factors, the largest one for all channels that come from one output channel of the
    layer before.

    >>> group = InputGroup(
    ...     "x", ("layer",), -1, 4, fold=Fold("layer", "before", channels=(0, 0, 1, 1))
    ... )
    >>> tied(group, torch.tensor([1.0, 2.0, 3.0, 1.0])).tolist()
    [2.0, 2.0, 3.0, 3.0]
    """
    if group.fold is None or group.fold.channels is None:
        return factors
    origin = torch.tensor(group.fold.channels, device=factors.device)
    channels = int(origin.max()) + 1
    return _by_origin(group.fold, factors, channels).view(-1, channels)[:, origin].flatten()


def powers_of_two(factors: Tensor) -> Tensor:
    """The nearest powers of two: multiplying by them rounds nothing, so the network's float
    outputs keep every bit.

    >>> powers_of_two(torch.tensor([0.3, 1.0, 3.0])).tolist()
    [0.25, 1.0, 4.0]
    """
    return torch.exp2(torch.log2(factors).round())


def parameter(graph: Graph, found: Adjustment, layer: str, key: str = "weight") -> Tensor:
    """A layer's parameter as it was found, or as the model has it."""
    value = found.parameters.get(layer, {}).get(key)
    return graph.tensors[graph.by_name[layer].params[key]] if value is None else value


def input_name(group: InputGroup, found: Adjustment) -> str:
    """The node whose value the group's layers read, behind what was inserted."""
    name = group.source
    for row in found.insertions:
        if row.source == name and group.layers[0] in row.readers:
            name = row.name
    return name


def shared_folds(
    graph: Graph,
    groups: Sequence[InputGroup],
    concerned: Callable[[InputGroup], bool],
    found: Adjustment,
) -> tuple[list[InputGroup], dict[int, int]]:
    """The groups, and which of them follow others, by their numbers.

    Groups that read one value by ways of their own (a router, the experts, a shared expert)
    fold into one layer. Of those that are `concerned`, the one with most weights finds the
    factors, and the fold multiplies the columns of the others as well. Where that cannot be,
    each gets a multiplication of its own instead.
    """
    made, leads = list(groups), dict[int, int]()
    owner = {
        layer: number
        for number, group in enumerate(groups)
        if concerned(group)
        for layer in group.layers
    }
    behind = {layer for row in found.insertions for layer in row.readers}
    for number, group in enumerate(groups):
        others = {
            owner[layer] for layer in (group.fold.extra if group.fold else ()) if layer in owner
        } - {number}
        if not others or not concerned(group):
            continue
        alike = {number, *others}
        first = max(
            alike,
            key=lambda at: (
                sum(graph.weight(graph.by_name[n]).numel() for n in groups[at].layers),
                -at,
            ),
        )
        layers = {layer for at in alike for layer in groups[at].layers}
        fold = groups[first].fold
        if (
            fold is None
            or layers & behind
            or not layers <= {*groups[first].layers, *fold.extra}
        ):
            made[number] = replace(group, fold=None)
        elif number != first:
            made[number], leads[number] = replace(group, fold=None, is_fixed=True), first
    return made, leads


def _fold(group: InputGroup, found: Adjustment) -> Fold | None:
    """The group's fold, unless something stands between it and the layers."""
    between = any(row.readers and group.layers[0] in row.readers for row in found.insertions)
    return None if between else group.fold


def _parameters(graph: Graph, fold: Fold, found: Adjustment) -> Mapping[str, Tensor]:
    """What is divided."""
    keys = [key for key in ("weight", "bias") if key in graph.by_name[fold.node].params]
    return {key: parameter(graph, found, fold.node, key) for key in keys}


def _divided(graph: Graph, fold: Fold, factors: Tensor, found: Adjustment) -> Adjustment:
    node, values = graph.by_name[fold.node], {}
    for key, value in _parameters(graph, fold, found).items():
        is_weight = key == "weight"
        if is_weight and node.is_multiplying:
            inverse = 1 / _by_origin(fold, factors, channels_of(node, value)[0])
            values[key] = beside(value, rescaled(node, value, outputs=inverse))
        else:
            inverse = 1 / _by_origin(fold, factors, value.numel()).view(value.shape)
            offset = fold.offset if is_weight else 0.0
            values[key] = ((value.float() + offset) * inverse - offset).to(value.dtype)
    return found.with_parameters(fold.node, **values)


def _by_origin(fold: Fold, factors: Tensor, channels: int) -> Tensor:
    """A factor for each output channel of the fold's node, or of each of its experts; 1 for
    those that are not read.
    """
    if fold.channels is None:
        return factors
    origin = torch.tensor(fold.channels, device=factors.device)
    given = factors.view(-1, len(origin))
    ones = torch.ones(len(given), channels, device=factors.device)
    return ones.scatter_reduce(
        1, origin.expand_as(given), given, "amax", include_self=False
    ).flatten()


def _inserted(group: InputGroup, factors: Tensor, found: Adjustment) -> Adjustment:
    """The division as a layer of its own, or in the one that is there from before."""
    before = input_name(group, found)
    for index, row in enumerate(found.insertions):
        if row.name == before and row.op == SCALE_OP and set(row.readers) == set(group.layers):
            rows = list(found.insertions)
            rows[index] = replace(row, weight=row.weight / factors)
            return replace(found, insertions=tuple(rows))
    scope, _, last = group.layers[0].rpartition("/")
    _, dot, number = last.partition(".")
    name = f"{scope}/{SCALE_OP}{dot}{number}" if scope else f"{SCALE_OP}{dot}{number}"
    taken, again = (
        {row.name for row in found.insertions},
        (f"{name}.{count}" for count in itertools.count(1)),
    )
    # Of experts in one module
    name = name if name not in taken else next(each for each in again if each not in taken)
    row = Insertion(name, SCALE_OP, before, group.layers, 1 / factors, {"axis": group.axis})
    return replace(found, insertions=(*found.insertions, row))


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().float().abs().max()) if tensor.numel() else 0.0
