"""Computes from profiles what each block costs in integers and in float, and what it costs to
convert activations between the two.

All costs are shares: 0.1 is a tenth of the time of the file without quantized activations. The
cheapest choice of blocks is a minimum cut, see `_add_border`. Blocks and conversions are the
vertices of a network. A cost is the capacity of an edge: it is paid if the edge begins on the
first side and ends on the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from quantizer.export.onnx.tuned.profiles import (
    BlockMap,
    Kernel,
    Profile,
    QuantizationPoint,
    original_name,
)
from quantizer.plan.model import Key

# Of the sum of all finite costs: a smaller share is an error of rounding
_TOLERANCE = 1e-12
# Names that are on their sides in every division
_FIRST = "\0first"
_SECOND = "\0second"


class TwoSides:
    """Divides names into a first and a second side, so that the sum of costs is the smallest.

    The order of the calls does not matter. Of equally cheap divisions, the result is the one
    with the smallest first side. Costs are not negative and have any unit.

    Alone, "b" is cheaper on the second side. But "a" belongs on the first side, and dividing
    the two costs more than "b" saves:

    >>> sides = TwoSides()
    >>> sides.cost("a", on_first=1, on_second=5)
    >>> sides.cost("b", on_first=3, on_second=2)
    >>> sides.cost_apart("a", "b", 4)
    >>> sorted(sides.first_side())
    ['a', 'b']
    """

    def __init__(self) -> None:
        self._costs: dict[tuple[str, str], float] = {}

    def cost(self, name: str, *, on_first: float, on_second: float) -> None:
        """Add what a name costs on each side."""
        # A name on the second side is apart from `_FIRST`, which is always on the first
        self.cost_apart(_FIRST, name, on_second)
        self.cost_apart(name, _SECOND, on_first)

    def cost_apart(self, first: str, second: str, cost: float) -> None:
        """Add what it costs if `first` is on the first side and `second` on the second.

        The other way round, they cost nothing.
        """
        self._costs[first, second] = self._costs.get((first, second), 0.0) + cost

    def forbid(self, first: str, second: str) -> None:
        """Refuse that `first` is on the first side and `second` on the second."""
        self._costs[first, second] = math.inf

    def first_side(self) -> set[str]:
        """Return the names on the first side."""
        # Only files that are tuned need it
        import networkx

        total = sum(filter(math.isfinite, self._costs.values()))
        unit = _TOLERANCE * total or 1.0
        network = networkx.DiGraph()
        # Backwards, as the library makes the side that flow ends on the smallest
        for (first, second), cost in self._costs.items():
            network.add_edge(second, first)
            # An edge without a capacity is never cut
            if math.isfinite(cost):
                network[second][first]["capacity"] = round(cost / unit)
        _, (_, first_side) = networkx.minimum_cut(network, _SECOND, _FIRST)
        names: set[str] = first_side - {_FIRST}
        return names


# Integers and floats may need different layouts in memory
_LAYOUTS = ("Transpose", "ReorderInput", "ReorderOutput")
# For an element in kernels of a type that neither profile has
_SECONDS_FOR_ELEMENT = 5e-10
# The costs of borders are estimates. So choices are also made with them dearer and cheaper
_FACTORS = (1.0, 2.0, 0.5, 4.0)


@dataclass(frozen=True)
class BlockCost:
    """The time that a block takes, as a share of the float file's time.

    Attributes:
        integers: with its activations quantized.
        floats: without a quantized activation.
    """

    integers: float
    floats: float


@dataclass(frozen=True)
class BorderCost:
    """The time to convert an activation between two blocks, as a share of the float file's
    time.

    Attributes:
        key: the layer and role of the activation.
        block: the block that computes it.
        readers: the blocks with kernels that read its codes.
        others: the blocks that read it as floats, except its own.
        is_fused: whether the kernel that computes it also writes its codes. Otherwise the file
            has a QuantizeLinear of its own for it.
        to_integers: to make its codes of floats.
        to_floats: to make floats of its codes.
    """

    key: Key
    block: str
    readers: frozenset[str]
    others: frozenset[str]
    is_fused: bool
    to_integers: float
    to_floats: float


@dataclass(frozen=True)
class Costs:
    """What a network costs.

    Attributes:
        blocks: the cost of each block, by its name.
        borders: the cost of each quantized activation.
    """

    blocks: dict[str, BlockCost]
    borders: tuple[BorderCost, ...]

    def left_out(self, floats: Collection[str]) -> frozenset[Key]:
        """Return the activations that stay in float if the blocks `floats` do.

        An activation is quantized if a block in integers writes or reads its codes.
        """
        unread = [border for border in self.borders if border.readers.issubset(floats)]
        return frozenset(
            border.key for border in unread if not border.is_fused or border.block in floats
        )

    def choices(self) -> list[frozenset[str]]:
        """Return different sets of blocks to leave in float, the most promising first.

        Each is the cheapest one if all borders cost some multiple of their estimates.
        """
        return list(dict.fromkeys(map(self._cheapest, _FACTORS)))

    def _cheapest(self, factor: float) -> frozenset[str]:
        """Return the blocks to leave in float if all borders cost `factor` times their
        estimates.
        """
        sides = TwoSides()
        for name, block in self.blocks.items():
            sides.cost(name, on_first=block.integers, on_second=block.floats)
        for border in self.borders:
            _add_border(sides, border, factor)
        return frozenset(self.blocks.keys() - sides.first_side())


def _add_border(sides: TwoSides, border: BorderCost, factor: float) -> None:
    """Add the costs of an activation. Blocks on the first side are in integers.

    An activation is converted once for all its readers. So each conversion is a name of its
    own:

    - "to integers" is on the first side if a reader of codes is. It costs something if the
      activation is a float: its block is on the second side, or the file has a QuantizeLinear.
    - "to floats" is on the second side if a reader is. It costs something if the block is on
      the first side and writes codes.
    """
    to_integers = f"to integers {border.key}"
    if border.is_fused:
        sides.cost_apart(to_integers, border.block, factor * border.to_integers)
        to_floats = f"to floats {border.key}"
        sides.cost_apart(border.block, to_floats, factor * border.to_floats)
        for block in border.readers | border.others:
            sides.forbid(to_floats, block)
    else:
        # This time was measured, so it has no factor
        sides.cost(to_integers, on_first=border.to_integers, on_second=0.0)
    for block in border.readers:
        sides.forbid(block, to_integers)


@dataclass(frozen=True)
class ProfiledPair:
    """The profiles of two files with one batch.

    Attributes:
        quantized: of the file with all activations quantized.
        bare: of the file without a quantized activation.
        elements: returns how many elements an activation has in this batch.
    """

    quantized: Profile
    bare: Profile
    elements: Callable[[Key], int]


def measured_costs(
    pairs: Sequence[ProfiledPair], quantized: BlockMap, bare: BlockMap, keys: Iterable[Key]
) -> Costs:
    """Return the costs of blocks and borders, on average over batches.

    Args:
        pairs: the profiles, one pair for each batch.
        quantized: the blocks of the file with all activations quantized.
        bare: the blocks of the file without a quantized activation.
        keys: the activations.
    """
    points = quantized.points(keys)
    names = list(dict.fromkeys((*quantized.names, *bare.names)))
    integers = dict.fromkeys(names, 0.0)
    floats = dict.fromkeys(names, 0.0)
    for pair in pairs:
        share_of_second = _share_of_second(pair, pairs)
        # Their time is a cost of borders
        at_borders = _quantizing_kernels(pair.quantized, points)
        for block, seconds in quantized.seconds(pair.quantized, at_borders).items():
            integers[block] += share_of_second * seconds
        for block, seconds in bare.seconds(pair.bare).items():
            floats[block] += share_of_second * seconds
    costs = {name: BlockCost(integers[name], floats[name]) for name in names}
    return Costs(costs, tuple(_border_cost(point, quantized, pairs) for point in points))


def _share_of_second(pair: ProfiledPair, pairs: Sequence[ProfiledPair]) -> float:
    """Return what one second with a batch adds to a cost, which is an average over batches."""
    return 1 / len(pairs) / max(pair.bare.seconds, 1e-9)


def block_milliseconds(
    pairs: Sequence[ProfiledPair], quantized: BlockMap, bare: BlockMap
) -> dict[str, dict[str, list[float]]]:
    """Return by block its milliseconds under "integers_ms" and "float_ms", a list of one number
    for each batch.
    """
    times: dict[str, dict[str, list[float]]] = {
        name: {"integers_ms": [], "float_ms": []} for name in (*quantized.names, *bare.names)
    }
    for pair in pairs:
        integers = quantized.seconds(pair.quantized)
        floats = bare.seconds(pair.bare)
        for name, row in times.items():
            row["integers_ms"].append(round(1e3 * integers.get(name, 0.0), 4))
            row["float_ms"].append(round(1e3 * floats.get(name, 0.0), 4))
    return times


def _quantizing_kernels(profile: Profile, points: Iterable[QuantizationPoint]) -> list[Kernel]:
    """Return the kernels of QuantizeLinear at `points`."""
    names = {name for point in points for name in point.nodes}
    return [
        kernel
        for kernel in profile.kernels
        if kernel.op_type == "QuantizeLinear" and original_name(kernel.name) in names
    ]


def _rate(kernels: Iterable[Kernel], op_types: Collection[str]) -> float:
    """Return the seconds for an element of the outputs of kernels of some types."""
    seconds = 0.0
    elements = 0
    for kernel in kernels:
        if kernel.op_type in op_types:
            seconds += kernel.seconds
            elements += kernel.elements
    return seconds / elements if elements else _SECONDS_FOR_ELEMENT


def _border_cost(
    point: QuantizationPoint, blocks: BlockMap, pairs: Sequence[ProfiledPair]
) -> BorderCost:
    """Return the cost of an activation at the border of its block, on average over batches.

    A QuantizeLinear that is fused with its block has no kernel in the profile. Its time, and
    that of each DequantizeLinear, is estimated from the number of elements.

    Args:
        point: where the activation is quantized.
        blocks: of the file with all activations quantized.
        pairs: the profiles, one pair for each batch.
    """
    is_fused = not _quantizing_kernels(pairs[0].quantized, [point])
    readers: set[str] = set()
    others: set[str] = set()
    to_integers = 0.0
    to_floats = 0.0
    for pair in pairs:
        kernels = (*pair.quantized.kernels, *pair.bare.kernels)
        size = pair.elements(point.key)
        rearranging = _rate(kernels, _LAYOUTS)
        quantizing = _quantizing_kernels(pair.quantized, [point])
        seconds = sum(kernel.seconds for kernel in quantizing)
        if not quantizing:
            seconds = size * (_rate(kernels, ("QuantizeLinear",)) + rearranging)
        share_of_second = _share_of_second(pair, pairs)
        to_integers += share_of_second * seconds
        seconds = size * (_rate(kernels, ("DequantizeLinear",)) + rearranging)
        to_floats += share_of_second * seconds
        nodes = pair.quantized.optimized.graph.node
        types = {original_name(node.name): node.op_type for node in nodes}
        for name in point.readers:
            block = blocks.block_of_node[name]
            if _reads_codes(types.get(name, "")):
                readers.add(block)
            elif block != point.block:
                others.add(block)
    return BorderCost(
        point.key,
        point.block,
        frozenset(readers),
        frozenset(others),
        is_fused,
        to_integers,
        to_floats,
    )


def _reads_codes(op_type: str) -> bool:
    """Return whether kernels of ONNX Runtime of this type compute with codes.

    >>> _reads_codes("QLinearConv"), _reads_codes("MatMulIntegerToFloat"), _reads_codes("Conv")
    (True, True, False)
    """
    return op_type.startswith(("QLinear", "QGemm", "QAttention")) or "Integer" in op_type
