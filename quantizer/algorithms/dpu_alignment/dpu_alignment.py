"""Move the positions of power-of-two scales into the limits of the DPU's shifters.

A tensor with position fp has the scale 2^-fp: a larger position is a finer scale. The positions
alone are moved here; no tensor is rounded. The limits are those that are checked before a
network goes to the DPU compiler.

Source: pytorch_nndct 3.5 (Vitis AI).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.calibration.solution import Solution
from quantizer.config.model import Settings
from quantizer.graph.channels.axis_rules import PADDED
from quantizer.graph.ir import Graph, Node
from quantizer.plan.groups import layout
from quantizer.plan.layout import EVERY_JOIN, Layout, quantization_point
from quantizer.plan.model import Key

_MAX_SHIFT = 16
"""The largest shift in bits, of products to the output and of the bias to the products."""
_ACCUMULATOR_BITS = 24
_OUTPUT_BITS = 8
_GATE_POSITION = 7
"""The position of hardsigmoid's output, whose values are at most 1."""


@dataclass(frozen=True)
class Move:
    """Records a change of one tensor's position, and the reason as a sentence."""

    layer: str
    role: str
    before: int
    after: int
    why: str

    def __str__(self) -> str:
        return (
            f"{self.role} of {self.layer}: position {self.before} -> {self.after}: {self.why}"
        )


def align_to_dpu(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Move power-of-two scales to those that the DPU has shifts for."""
    plan = state.plan
    solution, moves = align_positions(state.solution, plan.graph, plan.settings)
    for move in moves:
        request.events.message(logging.INFO, f"note: {move}")
    return replace(state, solution=solution)


def align_positions(
    solution: Solution, graph: Graph, settings: Settings
) -> tuple[Solution, tuple[Move, ...]]:
    """Return the solution with positions that the DPU has shifts for, and what was moved.

    A position p stands for the scale 2^-p. Each moved tensor has a note in the solution.
    """
    positions, moves = align(
        graph,
        solution.positions,
        change_concat_input_fix=settings.change_concat_input_fix,
        change_pool_input_fix=settings.change_pool_input_fix,
    )
    tensors = dict(solution.tensors)
    notes = dict(solution.notes)
    for move in moves:
        key = (move.layer, move.role)
        tensor = solution.tensors[key]
        scale = torch.full_like(tensor.scale, 2.0 ** -positions[key])
        tensors[key] = replace(tensor, scale=scale)
        note = f"position {move.before} -> {move.after}: {move.why}"
        notes[key] = (*notes.get(key, ()), note)
    return replace(solution, tensors=tensors, notes=notes), moves


def align(
    graph: Graph,
    positions: Mapping[Key, int],
    *,
    change_concat_input_fix: bool = False,
    change_pool_input_fix: bool = False,
) -> tuple[dict[Key, int], tuple[Move, ...]]:
    """Return the positions of (layer, role) moved into the DPU's limits, and each move in
    order.

    Activations only become coarser, except that the inputs of hardsigmoid and hardswish and
    the output of hardsigmoid have least positions.

    Args:
        graph: of the network.
        positions: of the tensors that have a power-of-two scale. Limits that involve other
            tensors are skipped.
        change_concat_input_fix: give inputs of concatenations the position of the output.
        change_pool_input_fix: give inputs of average pooling the position of the output.
    """
    aligner = _Aligner(graph, layout(graph, EVERY_JOIN), dict(positions))
    for node in reversed(graph.nodes):
        if node.row.axes is PADDED:
            why = "padding keeps the position of its input"
            aligner.tie(aligner.output(node.name), aligner.input(node), why)
        elif node.is_join and change_concat_input_fix:
            why = f"{node.name} reads it, change_concat_input_fix"
            for name in node.refs():
                aligner.tie(aligner.output(name), aligner.output(node.name), why)
        elif node.op in _AVERAGES and change_pool_input_fix:
            why = f"{node.name} reads it, change_pool_input_fix"
            aligner.tie(aligner.input(node), aligner.output(node.name), why)
    for round_ in range(3 * len(graph.nodes) + 3):
        # Layers that are tied in a circle may coarsen each other forever. After as many rounds
        # as there are nodes, activations stay and weights and biases move instead
        aligner.is_frozen = round_ > len(graph.nodes)
        before = dict(aligner.positions)
        for node in graph.nodes:
            if node.row.is_linear_or_convolution:
                _limit_shifts(aligner, node)
            elif node.op in _LIMITS:
                _LIMITS[node.op](aligner, node)
        if aligner.positions == before:
            break
    return aligner.positions, tuple(aligner.moves)


@dataclass
class _Aligner:
    """Holds the positions as they are now.

    Attributes:
        tied: the tensors that share one position.
        least: the positions that tensors must not become coarser than.
        is_frozen: whether activations must not become coarser any more.
    """

    graph: Graph
    layout: Layout
    positions: dict[Key, int]
    moves: list[Move] = field(default_factory=list)
    tied: dict[Key, frozenset[Key]] = field(default_factory=dict)
    least: dict[Key, int] = field(default_factory=dict)
    is_frozen: bool = False

    def output(self, name: str) -> Key | None:
        """Return the key of the tensor that a node's values are quantized as; None if that has
        no position.
        """
        point = quantization_point(self.graph, self.layout, name)
        if not point:
            return None
        role = "input" if self.graph.by_name[point].op == "input" else "activation"
        key = (point, role)
        return key if key in self.positions else None

    def input(self, node: Node) -> Key | None:
        """Return the key of the tensor that a layer reads: its own quantized input, or the
        output of its producer.
        """
        key = (node.name, "input")
        return key if key in self.positions else self.output(next(node.refs()))

    def move(self, key: Key, to: int, why: str) -> None:
        """Give a tensor and those tied to it another position, and record each move."""
        for member in sorted(self.tied.get(key, {key})):
            before = self.positions[member]
            if before != to:
                self.moves.append(Move(*member, before, to, why))
                self.positions[member] = to

    def tie(self, key: Key | None, to: Key | None, why: str) -> None:
        """Give `key` the position of `to`, and keep them equal from now on."""
        if key is None or to is None or key == to:
            return
        self.move(key, self.positions[to], why)
        tied = self.tied.get(key, frozenset({key})) | self.tied.get(to, frozenset({to}))
        self.tied |= dict.fromkeys(tied, tied)

    def keep_finer(self, key: Key, least: int, why: str) -> None:
        """Raise a tensor to its least position, and keep it there or finer."""
        for member in self.tied.get(key, {key}):
            self.least[member] = max(least, self.least.get(member, least))
        if self.positions[key] < least:
            self.move(key, least, why)


def _limit_shifts(aligner: _Aligner, node: Node) -> None:
    """Keep the two shifts of a linear layer or convolution within the DPU's limits.

    With the positions fw of weights, fi of the input, fo of the output and fb of the bias,
    products have the position fw + fi. They are shifted right by shift_cut = fw + fi - fo to
    the output's position. The bias is shifted left by shift_bias = fw + fi - fb to theirs.
    """
    weights = (node.name, "weights")
    input_key = aligner.input(node)
    output = aligner.output(node.name)
    positions = aligner.positions
    if weights not in positions or input_key is None or output is None:
        return
    product = positions[weights] + positions[input_key]
    cut = product - positions[output]
    why = f"shift_cut of {node.name} would be {cut}, and the DPU has 0 to {_MAX_SHIFT}"
    may_coarsen = not aligner.is_frozen and product >= aligner.least.get(output, product)
    if cut < 0 and output != input_key and may_coarsen:
        aligner.move(output, product, why)
    elif cut < 0:
        why = f"{why}; finer weights cut off their largest values"
        aligner.move(weights, positions[weights] - cut, why)
    elif cut > _MAX_SHIFT:
        aligner.move(weights, positions[weights] - (cut - _MAX_SHIFT), why)
    bias = (node.name, "bias")
    if bias in positions:
        moved_product = positions[weights] + positions[input_key]
        _limit_bias(aligner, node, moved_product, positions[output])


def _limit_bias(aligner: _Aligner, node: Node, product: int, output: int) -> None:
    """Keep shift_bias within [least, 16].

    A bias may be finer than the products by the bits that the accumulator has left after the
    output's bits and shift_cut.

    Args:
        aligner: holds the positions.
        node: the layer.
        product: the position of the products.
        output: the position of the output.
    """
    weights = (node.name, "weights")
    bias = (node.name, "bias")
    positions = aligner.positions
    cut = product - output
    least = min(0, _OUTPUT_BITS + cut - _ACCUMULATOR_BITS)
    shift = product - positions[bias]
    why = f"shift_bias of {node.name} would be {shift}, and the DPU has {least} to {_MAX_SHIFT}"
    if shift < least:
        aligner.move(bias, product - least, why)
    elif shift > _MAX_SHIFT and aligner.is_frozen:
        aligner.move(bias, product - _MAX_SHIFT, why)
    elif shift > _MAX_SHIFT:
        aligner.move(weights, positions[weights] - (shift - _MAX_SHIFT), why)


def _limit_hardsigmoid(aligner: _Aligner, node: Node) -> None:
    """Keep the positions of the input at 0 or finer, and those of the output at 7 or finer."""
    input_key = aligner.input(node)
    output = aligner.output(node.name)
    if input_key is not None:
        why = f"{node.name} reads it, and hardsigmoid takes positions from 0"
        aligner.keep_finer(input_key, 0, why)
    if output is not None:
        why = f"hardsigmoid makes positions from {_GATE_POSITION}"
        aligner.keep_finer(output, _GATE_POSITION, why)


def _limit_hardswish(aligner: _Aligner, node: Node) -> None:
    """Keep the input's position at 0 or finer, and the output's at most 7 finer than that."""
    input_key = aligner.input(node)
    output = aligner.output(node.name)
    if input_key is None:
        return
    why = f"{node.name} reads it, and hardswish takes positions from 0"
    aligner.keep_finer(input_key, 0, why)
    finest = aligner.positions[input_key] + _GATE_POSITION
    if output is not None and aligner.positions[output] > finest:
        why = f"hardswish makes at most its input's position and {_GATE_POSITION}"
        aligner.move(output, finest, why)


_AVERAGES = ("avg_pool2d", "adaptive_avg_pool2d")
_LIMITS: dict[str, Callable[[_Aligner, Node], None]] = {
    "hardsigmoid": _limit_hardsigmoid,
    "hardswish": _limit_hardswish,
}
