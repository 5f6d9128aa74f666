"""QuaRot: rotate activations so that outliers spread over all channels. The float network
computes the same.

R1 rotates the residual stream and R2 the values of attention heads, both by changing weights
only. R4 rotates the output of a product or an activation function, by a layer of its own. A
rotation is a Hadamard matrix times random signs.

Source: Ashkboos et al. 2024, "QuaRot" (arXiv 2404.00456); R1, R2 and R4 as in Liu et al. 2024,
"SpinQuant" (arXiv 2405.16406).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.algorithms.rotation.residual_stream import Residual, residuals
from quantizer.algorithms.rotation.settings import RotationConfig
from quantizer.config.roles import base_role
from quantizer.graph.channels.axis_rules import (
    ATTENTION,
    MATRIX_PRODUCT,
    PLAIN_MATRIX_PRODUCT,
    PRODUCT,
)
from quantizer.graph.edits import Insertion
from quantizer.graph.ir import Graph, Node, Ref
from quantizer.graph.output_names import unused_names
from quantizer.graph.structure.definitions import InputGroup
from quantizer.layerwise.adjustment import Adjustment, Remark, Task, apply_adjustment
from quantizer.layerwise.fold import parameter
from quantizer.nn.rare_layers import factors, rotate_rows
from quantizer.storage.deferred_tensor import deferred_like

Rotation = Callable[[Tensor], Tensor]
"""Multiplies the last axis by an orthogonal matrix."""
_ATTENTIONS = (ATTENTION, MATRIX_PRODUCT, PLAIN_MATRIX_PRODUCT)
"""Rules of operators that end an attention: the last argument that they name has the values."""


def rotation(task: Task, settings: RotationConfig, adjustment: Adjustment) -> Adjustment:
    """Return the network with its channels rotated.

    Needs no data. Rounded weights of layers that change are dropped.
    """
    work = _RotatedNetwork(task, adjustment, seed=settings.seed)
    rotated_layers: set[str] = set()
    if settings.residual:
        rotated_layers |= _rotate_residuals(work)
    groups = [
        group for group in task.structure.groups if not rotated_layers & set(group.layers)
    ]
    if settings.values:
        for group in groups:
            rotated_layers.update(_rotate_heads(work, group))
    if settings.online:
        for group in groups:
            layers = [layer for layer in group.layers if layer not in rotated_layers]
            _rotate_online(work, layers)
    return work.adjustment


class _RotatedNetwork:
    """Holds the network as it is rotated so far."""

    def __init__(self, task: Task, adjustment: Adjustment, *, seed: int) -> None:
        self.task = task
        self.adjustment = adjustment
        self.graph = apply_adjustment(task.graph, adjustment)
        self._generator = torch.Generator().manual_seed(seed)

    def signs(self, channels: int) -> Tensor:
        """Draw random signs, float64 [channels]."""
        bits = torch.randint(0, 2, (channels,), generator=self._generator)
        return (bits * 2 - 1).to(self.task.graph.device, torch.float64)

    def weight(self, layer: str) -> Tensor:
        """Return a layer's weight as it is now, float64."""
        return parameter(self.graph, self.adjustment, layer).double()

    def bias(self, layer: str) -> Tensor | None:
        """Return a layer's bias as it is now, float64; None if it has none."""
        new_parameters = self.adjustment.parameters.get(layer, {})
        if "bias" not in new_parameters and "bias" not in self.graph.by_name[layer].params:
            return None
        return parameter(self.graph, self.adjustment, layer, "bias").double()

    def set_parameter(self, layer: str, key: str, value: Tensor) -> None:
        """Replace a parameter, in its dtype. A new bias has the dtype of the weight."""
        params = self.graph.by_name[layer].params
        path = params.get(key, params.get("weight", ""))
        before = self.graph.tensors[path]
        after = deferred_like(before, value.to(before.dtype))
        self.adjustment = self.adjustment.with_parameters(layer, **{key: after})

    def is_quantized(self, layers: Iterable[str]) -> bool:
        """Check whether the plan quantizes the weight of one of these layers."""
        return any((layer, "weights") in self.task.specs for layer in layers)


def _rotation(signs: Tensor, *, keeps_mean: bool = False) -> Rotation:
    """Return the multiplication by Q = diag(signs) times a Hadamard matrix, float64.

    With `keeps_mean`, a reflection after Q takes the image of the vector of ones back to
    itself. Means over channels, and with them a LayerNorm, then stay the same. Entries of the
    matrix grow by O(1/n), compared with 1/sqrt(n).
    """
    left, right = (factor.to(signs.device) for factor in factors(len(signs)))

    def rotate(rows: Tensor) -> Tensor:
        return rotate_rows(rows, signs, left, right)

    ones = torch.full_like(signs, len(signs) ** -0.5)
    normal = rotate(ones) - ones
    square = normal @ normal
    if not keeps_mean or square <= 1e-20:
        return rotate

    def rotate_and_reflect(rows: Tensor) -> Tensor:
        rows = rotate(rows)
        along_normal = rows.reshape(-1, len(signs)) @ normal
        return rows - torch.outer(along_normal, normal * (2 / square)).view_as(rows)

    return rotate_and_reflect


def _rotate_residuals(work: _RotatedNetwork) -> set[str]:
    """Apply R1 to all that has no obstacle. Return the layers that read it."""
    rotated_layers: set[str] = set()
    blocked = []
    for residual in residuals(work.graph):
        if residual.obstacle is not None:
            blocked.append(residual)
        elif residual.readers and work.is_quantized((*residual.readers, *residual.writers)):
            _rotate_residual(work, residual)
            rotated_layers.update(residual.readers)
    if blocked and not rotated_layers:
        longest = max(blocked, key=lambda residual: len(residual.members))
        remark = _not_rotated(work.graph, longest)
        work.adjustment = work.adjustment.with_remarks(remark)
    return rotated_layers


def _not_rotated(graph: Graph, residual: Residual) -> Remark:
    """Return what keeps the residual stream from being rotated, and what can be done."""
    node = residual.obstacle
    assert node is not None
    if node.name in residual.members and "" in graph.consumers[node.name]:
        reason = "the model returns it, and would return it rotated"
        remedy = "take the model with its head"
    else:
        reason = f"{node.op} would compute something else of it"
        remedy = "smoothquant or more bits for activations may help"
    text = (
        f"the residual stream is not rotated: {reason}, so the outliers between the blocks "
        f'stay; {remedy}, or write "residual": false to say that this is meant'
    )
    return Remark(node.name, text)


def _rotate_residual(work: _RotatedNetwork, residual: Residual) -> None:
    """Rotate what readers read and writers write, with the factors of norms moved into the
    readers.
    """
    rotate = _rotation(work.signs(residual.channels), keeps_mean=residual.keeps_mean)
    for reader, norm_name in residual.readers.items():
        weight = work.weight(reader)
        if norm_name is not None:
            norm = residual.norms[norm_name]
            if norm.shift is not None and bool(norm.shift.any()):
                bias = work.bias(reader)
                if bias is None:
                    bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
                work.set_parameter(reader, "bias", weight @ norm.shift + bias)
            weight = weight * norm.factor
        work.set_parameter(reader, "weight", rotate(weight))
    for writer, axis in residual.writers.items():
        _rotate_writer(work, work.graph.by_name[writer], axis, rotate)
    for norm in residual.norms.values():
        for layer, key, value in norm.neutral:
            work.set_parameter(layer, key, value)


def _rotate_writer(work: _RotatedNetwork, node: Node, axis: int, rotate: Rotation) -> None:
    """Rotate the channels that a layer writes."""
    weight = work.weight(node.name)
    if node.is_multiplying:
        axis = int(node.row.transposed)
        bias = work.bias(node.name)
        if bias is not None:
            work.set_parameter(node.name, "bias", rotate(bias))
    elif node.row.channels is not None:
        axis = node.row.channels
    work.set_parameter(node.name, "weight", _along(weight, axis, rotate))


@dataclass(frozen=True)
class _Heads:
    """Describes the heads of an attention.

    Attributes:
        maker: the layer that makes the values.
        width: channels of a head.
        rows: the outputs of `maker` that each head takes, once for heads that share them.
    """

    maker: str
    width: int
    rows: tuple[tuple[int, ...], ...]


def _heads(graph: Graph, group: InputGroup) -> _Heads | None:
    """Return the heads of the value that a group reads, if it comes from one attention.

    Between the attention, its values and the layer that makes them there are only moves.

    Any other operator, such as a gate, works on single channels, which a rotation would mix.
    """
    fold = group.fold
    if fold is None or graph.by_name[fold.node].row.spatial != 0 or fold.extra:
        return None
    attention = _before_moves(graph, graph.by_name[group.source])
    axes = attention.row.axes if attention is not None else None
    if attention is None or axes is None or axes not in _ATTENTIONS:
        return None
    values = attention.inputs.get(axes.arguments[-1])
    if not isinstance(values, Ref) or not attention.shape:
        return None
    maker = _before_moves(graph, graph.by_name[values.name])
    width = attention.shape[-1]
    if maker is None or maker.name != fold.node or not width or group.channels % width:
        return None
    channels = fold.channels or tuple(range(group.channels))
    starts = range(0, group.channels, width)
    rows = tuple(dict.fromkeys(channels[start : start + width] for start in starts))
    distinct: set[int] = set()
    for of_head in rows:
        distinct.update(of_head)
    if len(distinct) != len(rows) * width:
        return None
    return _Heads(maker.name, width, rows)


def _before_moves(graph: Graph, node: Node | None) -> Node | None:
    """Return the node that made the values, before operators that only moved them."""
    while node is not None and node.row.only_moves:
        node = graph.source(node)
    return node


def _rotate_heads(work: _RotatedNetwork, group: InputGroup) -> tuple[str, ...]:
    """Apply R2: one rotation for all heads of a layer. Return the layers that read them."""
    heads = _heads(work.graph, group)
    if heads is None or not work.is_quantized((*group.layers, heads.maker)):
        return ()
    rotate = _rotation(work.signs(heads.width))
    for layer in group.layers:
        weight = work.weight(layer)
        by_head = weight.reshape(len(weight), -1, heads.width)
        work.set_parameter(layer, "weight", rotate(by_head).flatten(1))
    _rotate_rows(work, heads, "weight", work.weight(heads.maker), rotate=rotate)
    bias = work.bias(heads.maker)
    if bias is not None:
        _rotate_rows(work, heads, "bias", bias, rotate=rotate)
    return group.layers


def _rotate_rows(
    work: _RotatedNetwork, heads: _Heads, key: str, values: Tensor, *, rotate: Rotation
) -> None:
    """Rotate a parameter of the layer that makes the heads' values."""
    values = values.clone()
    for rows in heads.rows:
        values[list(rows)] = _along(values[list(rows)], 0, rotate)
    work.set_parameter(heads.maker, key, values)


def _rotate_online(work: _RotatedNetwork, layers: Sequence[str]) -> None:
    """Apply R4: a rotation before linear layers whose inputs are quantized and come from a
    product or an activation function.
    """
    readers = []
    for name in layers:
        if work.graph.by_name[name].row.spatial == 0 and work.is_quantized((name,)):
            readers.append(name)
    if not readers:
        return
    source = work.graph.source(work.graph.by_name[readers[0]])
    if source is None or source.shape is None or not _is_product(work.graph, source):
        return
    specs = work.task.specs
    if (source.name, "activation") not in specs:
        with_input = {layer for layer, role in specs if base_role(role) == "input"}
        readers = [name for name in readers if name in with_input]
    channels = source.shape[-1]
    if not readers or channels is None:
        return
    signs = work.signs(channels)
    rotate = _rotation(signs)
    for reader in readers:
        work.set_parameter(reader, "weight", rotate(work.weight(reader)))
    taken = {insertion.name for insertion in work.adjustment.insertions}
    scope = source.name.rpartition("/")[0]
    [name] = unused_names([f"{scope}/rotation"], taken | work.graph.by_name.keys())
    insertion = Insertion(name, "rotation", source.name, tuple(readers), signs.to(source.dtype))
    insertions = (*work.adjustment.insertions, insertion)
    work.adjustment = replace(work.adjustment, insertions=insertions)


def _is_product(graph: Graph, node: Node) -> bool:
    """Check whether the value is a product of two values, or an activation function's, apart
    from moves.
    """
    maker = _before_moves(graph, node)
    if maker is None:
        return False
    if maker.row.axes is not PRODUCT:
        return maker.row.kind in ("nonlinear", "fusable")
    # Not the product with a norm's weight
    shapes = [graph.by_name[name].shape for name in maker.refs()]
    return len(shapes) == 2 and all(shape == maker.shape for shape in shapes)


def _along(tensor: Tensor, axis: int, rotate: Rotation) -> Tensor:
    return rotate(tensor.movedim(axis, -1)).movedim(-1, axis).contiguous()
