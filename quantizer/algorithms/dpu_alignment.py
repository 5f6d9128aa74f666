"""Fix positions that the DPU's shifters can take: integers in, integers out; a position fp
stands for the scale 2^-fp.

The limits are those that are checked before a network goes to the DPU compiler. Sees no tensor.

Source: pytorch_nndct 3.5 (Vitis AI).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quantizer.graph.axis_rules import PADDED
from quantizer.graph.ir import Graph, Node
from quantizer.plan.groups import EVERY_JOIN, Layout, layout, quantization_point
from quantizer.plan.model import Key

MOST_SHIFT = 16
# That a bias may be finer than the products by, the output's 8 and shift_cut taken off
ACCUMULATOR_BITS = 24
GATE_POSITION = 7


@dataclass(frozen=True)
class Move:
    """One tensor's position changed, and the sentence that says why."""

    layer: str
    role: str
    before: int
    after: int
    why: str

    def __str__(self) -> str:
        return (
            f"{self.role} of {self.layer}: position {self.before} -> {self.after}: {self.why}"
        )


def align(
    graph: Graph,
    positions: Mapping[Key, int],
    *,
    change_concat_input_fix: bool = False,
    change_pool_input_fix: bool = False,
) -> tuple[dict[Key, int], tuple[Move, ...]]:
    """The positions of (layer, role) moved into the DPU's limits, and each move in order.

    A tensor that is missing in `positions` has no power-of-two scale; what concerns it is left
    alone. Inputs of concatenations and of average pooling take the output's position if that is
    asked for. Activations only become coarser, except that hardsigmoid and hardswish have least
    positions.
    """
    aligner = _Aligner(graph, layout(graph, EVERY_JOIN), dict(positions))
    for node in reversed(graph.nodes):
        if node.row.axes is PADDED:
            aligner.tie(
                aligner.holder(node.name),
                aligner.read(node),
                "padding keeps the position of its input",
            )
        elif node.is_join and change_concat_input_fix:
            for name in node.refs():
                why = f"{node.name} reads it, change_concat_input_fix"
                aligner.tie(aligner.holder(name), aligner.holder(node.name), why)
        elif node.op in _AVERAGES and change_pool_input_fix:
            why = f"{node.name} reads it, change_pool_input_fix"
            aligner.tie(aligner.read(node), aligner.holder(node.name), why)
    for round_ in range(3 * len(graph.nodes) + 3):
        # Ties can close a circle of layers that coarsen each other; weights move instead then.
        aligner.frozen = round_ > len(graph.nodes)
        before = dict(aligner.positions)
        for node in graph.nodes:
            if (
                limit := _limit_shifts
                if node.row.is_linear_or_convolution
                else _LIMITS.get(node.op)
            ):
                limit(aligner, node)
        if aligner.positions == before:
            break
    return aligner.positions, tuple(aligner.moves)


@dataclass
class _Aligner:
    """Positions as they are now; `tied` are the tensors that share one, `least` what must not
    become coarser.
    """

    graph: Graph
    where: Layout
    positions: dict[Key, int]
    moves: list[Move] = field(default_factory=list)
    tied: dict[Key, frozenset[Key]] = field(default_factory=dict)
    least: dict[Key, int] = field(default_factory=dict)
    frozen: bool = False

    def holder(self, name: str) -> Key | None:
        """The tensor that holds a node's values as codes."""
        point = quantization_point(self.graph, self.where, name)
        key = (
            point or "",
            "input" if point and self.graph.by_name[point].op == "input" else "activation",
        )
        return key if key in self.positions else None

    def read(self, node: Node) -> Key | None:
        """The tensor that holds what a layer reads: one of its own, or its producer's."""
        own = (node.name, "input")
        return own if own in self.positions else self.holder(next(node.refs()))

    def move(self, key: Key, to: int, why: str) -> None:
        """Give a tensor, and those tied to it, another position."""
        for member in sorted(self.tied.get(key, {key})):
            if self.positions[member] != to:
                self.moves.append(Move(*member, self.positions[member], to, why))
                self.positions[member] = to

    def tie(self, key: Key | None, to: Key | None, why: str) -> None:
        """From now on `key` has the position of `to`."""
        if key is None or to is None or key == to:
            return
        self.move(key, self.positions[to], why)
        together = self.tied.get(key, frozenset({key})) | self.tied.get(to, frozenset({to}))
        self.tied |= dict.fromkeys(together, together)

    def keep(self, key: Key, least: int, why: str) -> None:
        """Raise a tensor to its least position, now and for good."""
        for member in self.tied.get(key, {key}):
            self.least[member] = max(least, self.least.get(member, least))
        if self.positions[key] < least:
            self.move(key, least, why)


def _limit_shifts(aligner: _Aligner, node: Node) -> None:
    """shift_cut = fw + fi - fo within [0, 16], and shift_bias = fw + fi - fb within what the
    accumulator has left.
    """
    weights, read, made = (node.name, "weights"), aligner.read(node), aligner.holder(node.name)
    at = aligner.positions
    if weights not in at or read is None or made is None:
        return
    cut = at[weights] + at[read] - at[made]
    why = f"shift_cut of {node.name} would be {cut}, and the DPU has 0 to {MOST_SHIFT}"
    may_coarsen = not aligner.frozen and at[made] + cut >= aligner.least.get(
        made, at[made] + cut
    )
    if cut < 0 and made != read and may_coarsen:
        aligner.move(made, at[made] + cut, why)
    elif cut < 0:
        aligner.move(
            weights, at[weights] - cut, f"{why}; finer weights cut off their largest values"
        )
    elif cut > MOST_SHIFT:
        aligner.move(weights, at[weights] - (cut - MOST_SHIFT), why)
    _limit_bias(aligner, node, at[weights] + at[read], made)


def _limit_bias(aligner: _Aligner, node: Node, product: int, made: Key) -> None:
    weights, bias, at = (node.name, "weights"), (node.name, "bias"), aligner.positions
    if bias not in at:
        return
    least = min(0, -(ACCUMULATOR_BITS - (8 + product - at[made])))
    shift = product - at[bias]
    why = f"shift_bias of {node.name} would be {shift}, and the DPU has {least} to {MOST_SHIFT}"
    if shift < least:
        aligner.move(bias, product - least, why)
    elif shift > MOST_SHIFT and aligner.frozen:
        aligner.move(bias, product - MOST_SHIFT, why)
    elif shift > MOST_SHIFT:
        aligner.move(weights, at[weights] - (shift - MOST_SHIFT), why)


def _limit_hardsigmoid(aligner: _Aligner, node: Node) -> None:
    read, made = aligner.read(node), aligner.holder(node.name)
    if read is not None:
        aligner.keep(read, 0, f"{node.name} reads it, and hardsigmoid takes positions from 0")
    if made is not None:
        aligner.keep(made, GATE_POSITION, f"hardsigmoid makes positions from {GATE_POSITION}")


def _limit_hardswish(aligner: _Aligner, node: Node) -> None:
    read, made = aligner.read(node), aligner.holder(node.name)
    if read is None:
        return
    aligner.keep(read, 0, f"{node.name} reads it, and hardswish takes positions from 0")
    most = aligner.positions[read] + GATE_POSITION
    if made is not None and aligner.positions[made] > most:
        aligner.move(
            made, most, f"hardswish makes at most its input's position and {GATE_POSITION}"
        )


LimitRule = Callable[[_Aligner, Node], None]
_AVERAGES = ("avg_pool2d", "adaptive_avg_pool2d")
_LIMITS: dict[str, LimitRule] = {
    "hardsigmoid": _limit_hardsigmoid,
    "hardswish": _limit_hardswish,
}
