"""Rotations that spread outliers over all channels: QuaRot, exact in float.

R1 turns the residual stream, R2 the values of attention heads, both in the weights alone; R4
turns what a product or an activation function makes, by a layer of its own.

Source: Ashkboos et al. 2024, "QuaRot" (arXiv 2404.00456); names as in Liu et al. 2024,
"SpinQuant" (arXiv 2405.16406).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment, Remark, Task, adjusted
from quantizer.algorithms.fold import parameter
from quantizer.algorithms.residual_stream import Residual, residuals
from quantizer.config.algorithms import RotationConfig
from quantizer.config.roles import base_role
from quantizer.graph.axis_rules import ATTENTION, MATRIX_PRODUCT, PLAIN_MATRIX_PRODUCT, PRODUCT
from quantizer.graph.edits import Insertion
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.structure import InputGroup
from quantizer.numerics.hadamard import factors, rotated
from quantizer.storage.deferred_tensor import beside

Turn = Callable[[Tensor], Tensor]
_ATTENTIONS = (ATTENTION, MATRIX_PRODUCT, PLAIN_MATRIX_PRODUCT)
"""Rules of operators that end an attention: the last argument that they name has the values."""


def rotation(task: Task, settings: RotationConfig, found: Adjustment) -> Adjustment:
    """The network with its channels turned: another network of the same function.

    Needs no data. What was rounded before is dropped for the layers that change, as their
    weights are others.
    """
    work = _Work(
        task, found, adjusted(task.graph, found), torch.Generator().manual_seed(settings.seed)
    )
    turned: set[str] = set()
    if settings.residual:
        turned |= _turn_residuals(work)
    groups = [group for group in task.structure.groups if not turned & set(group.layers)]
    if settings.values:
        turned |= {layer for group in groups for layer in _turn_heads(work, group)}
    if settings.online:
        for group in groups:
            _turn_online(work, [layer for layer in group.layers if layer not in turned])
    return work.found


@dataclass
class _Work:
    """The network so far, and where signs come from."""

    task: Task
    found: Adjustment
    graph: Graph
    generator: torch.Generator

    def signs(self, channels: int) -> Tensor:
        """Random signs, float64 [channels]."""
        drawn = torch.randint(0, 2, (channels,), generator=self.generator)
        return (drawn * 2 - 1).to(self.task.graph.device, torch.float64)

    def weight(self, layer: str) -> Tensor:
        """As it is now, float64."""
        return parameter(self.graph, self.found, layer).double()

    def bias(self, layer: str) -> Tensor | None:
        """As it is now, float64; None where the layer has none."""
        known = {**self.graph.by_name[layer].params, **self.found.parameters.get(layer, {})}
        return (
            parameter(self.graph, self.found, layer, "bias").double()
            if "bias" in known
            else None
        )

    def put(self, layer: str, key: str, value: Tensor) -> None:
        """Another value for a parameter, in its dtype; a new bias has that of the weight."""
        params = self.graph.by_name[layer].params
        before = self.graph.tensors[params.get(key, params.get("weight", ""))]
        self.found = self.found.with_parameters(
            layer, **{key: beside(before, value.to(before.dtype))}
        )

    def is_quantized(self, layers: Iterable[str]) -> bool:
        """Whether the plan quantizes the weight of one of these layers."""
        return any((layer, "weights") in self.task.specs for layer in layers)


def _orthogonal(signs: Tensor, keeps_mean: bool = False) -> Turn:
    """Multiplies rows by an orthogonal matrix: signs and a Hadamard matrix, float64.

    With `keeps_mean` a reflection behind it takes the image of the vector of ones back to
    itself. Means over channels, and with them a LayerNorm, are then the same before and after;
    entries grow by O(1/n) beside 1/sqrt(n).
    """
    left, right = (factor.to(signs.device) for factor in factors(len(signs)))
    ones = torch.full_like(signs, len(signs) ** -0.5)
    normal = rotated(ones, signs, left, right) - ones
    square = normal @ normal

    def turn(rows: Tensor) -> Tensor:
        rows = rotated(rows, signs, left, right)
        return rows - torch.outer(
            rows.reshape(-1, len(signs)) @ normal, normal * (2 / square)
        ).view_as(rows)

    return (
        turn
        if keeps_mean and square > 1e-20
        else lambda rows: rotated(rows, signs, left, right)
    )


def _turn_residuals(work: _Work) -> set[str]:
    """R1: turn all that has no obstacle; returns the layers that read it."""
    turned: set[str] = set()
    obstacles = []
    for residual in residuals(work.graph):
        if residual.obstacle is not None:
            obstacles.append(residual)
        elif residual.readers and work.is_quantized((*residual.readers, *residual.writers)):
            _turn_residual(work, residual)
            turned |= residual.readers.keys()
    if obstacles and not turned:
        longest = max(obstacles, key=lambda residual: len(residual.members))
        work.found = work.found.with_remarks(_why_not(work.graph, longest))
    return turned


def _why_not(graph: Graph, residual: Residual) -> Remark:
    """What keeps the residual stream from being rotated, and what can be done."""
    node = residual.obstacle
    assert node is not None
    if node.name in residual.members and "" in graph.consumers[node.name]:
        why, remedy = (
            "the model returns it, and would return it rotated",
            "take the model with its head",
        )
    else:
        why = f"{node.op} would compute something else of it"
        remedy = "smoothquant or more bits for activations may help"
    text = f"the residual stream is not rotated: {why}, so the outliers between the blocks stay"
    return Remark(
        node.name, f'{text}; {remedy}, or write "residual": false to say that this is meant'
    )


def _turn_residual(work: _Work, residual: Residual) -> None:
    """Readers take over the factors of norms and turn back; writers turn."""
    turn = _orthogonal(work.signs(residual.channels), residual.keeps_mean)
    for reader, name in residual.readers.items():
        weight = work.weight(reader)
        if name is not None:
            norm = residual.norms[name]
            if norm.shift is not None and bool(norm.shift.any()):
                bias = work.bias(reader)
                work.put(reader, "bias", weight @ norm.shift + (0 if bias is None else bias))
            weight = weight * norm.factor
        work.put(reader, "weight", turn(weight))
    for writer, axis in residual.writers.items():
        _turn_writer(work, work.graph.by_name[writer], axis, turn)
    for norm in residual.norms.values():
        for layer, key, value in norm.neutral:
            work.put(layer, key, value)


def _turn_writer(work: _Work, node: Node, axis: int, turn: Turn) -> None:
    """The channels of what a layer makes."""
    weight = work.weight(node.name)
    if node.is_multiplying:
        axis = int(node.row.transposed)
        if (bias := work.bias(node.name)) is not None:
            work.put(node.name, "bias", turn(bias))
    elif node.row.channels is not None:
        axis = node.row.channels
    work.put(node.name, "weight", _along(weight, axis, turn))


@dataclass(frozen=True)
class _Heads:
    """`rows` are the outputs of `maker` that each head of `width` channels takes, one entry for
    heads that share.
    """

    maker: str
    width: int
    rows: tuple[tuple[int, ...], ...]


def _heads(graph: Graph, group: InputGroup) -> _Heads | None:
    """The heads of the value that a group reads, where between it and its maker there are moves
    and one attention.

    Any other operator, such as a gate, works on single channels, which a rotation would mix.
    """
    fold = group.fold
    if fold is None or graph.by_name[fold.node].row.spatial != 0 or fold.extra:
        return None
    attention = _moved_from(graph, graph.by_name[group.source])
    axes = attention.row.axes if attention is not None else None
    if attention is None or axes is None or axes not in _ATTENTIONS:
        return None
    values = attention.inputs.get(axes.arguments[-1])
    if not isinstance(values, Ref) or not attention.shape:
        return None
    maker, width = _moved_from(graph, graph.by_name[values.name]), attention.shape[-1]
    if maker is None or maker.name != fold.node or not width or group.channels % width:
        return None
    channels = fold.channels or tuple(range(group.channels))
    blocks = dict.fromkeys(channels[at : at + width] for at in range(0, group.channels, width))
    apart = len({row for block in blocks for row in block}) == len(blocks) * width
    return _Heads(maker.name, width, tuple(blocks)) if apart else None


def _moved_from(graph: Graph, node: Node | None) -> Node | None:
    """What made the values that operators before this one only moved."""
    while node is not None and node.row.only_moves:
        node = graph.source(node)
    return node


def _turn_heads(work: _Work, group: InputGroup) -> tuple[str, ...]:
    """R2: one rotation for all heads of a layer; returns the layers that read them."""
    found = _heads(work.graph, group)
    if found is None or not work.is_quantized((*group.layers, found.maker)):
        return ()
    turn = _orthogonal(work.signs(found.width))
    for layer in group.layers:
        weight = work.weight(layer)
        work.put(layer, "weight", turn(weight.reshape(len(weight), -1, found.width)).flatten(1))
    for key, rows in (("weight", work.weight(found.maker)), ("bias", work.bias(found.maker))):
        if rows is not None:
            rows = rows.clone()
            for head in found.rows:
                rows[list(head)] = _along(rows[list(head)], 0, turn)
            work.put(found.maker, key, rows)
    return group.layers


def _turn_online(work: _Work, layers: list[str]) -> None:
    """R4: a rotation before linear layers whose inputs are quantized and come from a product or
    an activation.
    """
    nodes = [work.graph.by_name[layer] for layer in layers]
    nodes = [
        node for node in nodes if node.row.spatial == 0 and work.is_quantized((node.name,))
    ]
    source = work.graph.source(nodes[0]) if nodes else None
    if source is None or source.shape is None or not _is_product(work.graph, source):
        return
    specs = work.task.specs
    own = {layer for layer, role in specs if base_role(role) == "input"}
    readers = tuple(
        node.name for node in nodes if node.name in own or (source.name, "activation") in specs
    )
    channels = source.shape[-1]
    if not readers or channels is None:
        return
    signs = work.signs(channels)
    turn = _orthogonal(signs)
    for reader in readers:
        work.put(reader, "weight", turn(work.weight(reader)))
    weight = signs.to(source.dtype)
    made = Insertion(_name(work, source), "rotation", source.name, readers, weight)
    work.found = replace(work.found, insertions=(*work.found.insertions, made))


def _is_product(graph: Graph, node: Node | None) -> bool:
    """Whether the value is a product of two, or an activation function's, but for moves."""
    node = _moved_from(graph, node)
    if node is None or node.row.axes is not PRODUCT:
        return node is not None and node.row.kind in ("nonlinear", "fusable")
    shapes = [graph.by_name[name].shape for name in node.refs()]
    # Unlike the product with a norm's weight
    return len(shapes) == 2 and all(shape == node.shape for shape in shapes)


def _name(work: _Work, source: Node) -> str:
    """A name beside that of the value's maker."""
    name = f"{source.name.rpartition('/')[0]}/rotation"
    taken = work.graph.by_name.keys() | {made.name for made in work.found.insertions}
    return next(
        other
        for other in (name, *(f"{name}.{at}" for at in range(1, len(taken))))
        if other not in taken
    )


def _along(tensor: Tensor, axis: int, turn: Turn) -> Tensor:
    return turn(tensor.movedim(axis, -1)).movedim(-1, axis).contiguous()
