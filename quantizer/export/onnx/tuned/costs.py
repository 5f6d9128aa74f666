"""Computes from profiles what each block costs in integers and in float, and what it costs to
go from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from quantizer.export.onnx.tuned.blocks import (
    BlockMap,
    Point,
    own_name,
    seconds_by_block,
)
from quantizer.export.onnx.tuned.cut import TwoSides
from quantizer.export.onnx.tuned.meter import Kernel, Profile
from quantizer.plan.model import Key

_LAYOUTS = ("Transpose", "ReorderInput", "ReorderOutput")
# For an element that nothing was measured for.
_SECONDS_FOR_ELEMENT = 5e-10
_FACTORS = (1.0, 2.0, 0.5, 4.0)
"""Borders are estimated, so that several choices are tried: with them dearer and cheaper."""


@dataclass(frozen=True)
class BlockCost:
    """The share of float's time that a block takes.

    Attributes:
        integers: with its activations quantized.
        floats: without a quantized activation.
    """

    integers: float
    floats: float


@dataclass(frozen=True)
class BorderCost:
    """The share of float's time that a quantized activation takes at the border of blocks.

    Attributes:
        key: of the activation.
        block: that it is a value of.
        readers: the blocks with kernels that read its codes.
        others: the other blocks that read it.
        is_fused: whether a kernel makes its codes. Otherwise they are made of floats.
        to_integers: for the codes of a float.
        to_floats: for the float of a code.
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
    """What a network costs, block by block."""

    blocks: dict[str, BlockCost]
    borders: tuple[BorderCost, ...]

    def left_out(self, floats: Collection[str]) -> frozenset[Key]:
        """Return the activations that stay in float if these blocks do."""
        keys: set[Key] = set()
        for border in self.borders:
            is_made = border.is_fused and border.block not in floats
            is_read = any(block not in floats for block in border.readers)
            if not is_made and not is_read:
                keys.add(border.key)
        return frozenset(keys)

    def choices(self) -> list[frozenset[str]]:
        """Return sets of blocks to leave in float, the most promising first.

        Each is the cheapest one for some estimate of the borders.
        """
        choices: list[frozenset[str]] = []
        for factor in _FACTORS:
            choice = self._cheapest(factor)
            if choice not in choices:
                choices.append(choice)
        return choices

    def _cheapest(self, factor: float) -> frozenset[str]:
        """Return the blocks to leave in float if borders cost so many times their estimate."""
        sides = TwoSides()
        for name, block in self.blocks.items():
            sides.cost(name, on_first=block.integers, on_second=block.floats)
        for border in self.borders:
            _add_border(sides, border, factor)
        return frozenset(self.blocks.keys() - sides.first_side())


def _add_border(sides: TwoSides, border: BorderCost, factor: float) -> None:
    """Add the costs of an activation. Blocks on the first side are in integers."""
    quantized = f"to integers {border.key}"
    if border.is_fused:
        sides.cost_apart(quantized, border.block, factor * border.to_integers)
        read = f"to floats {border.key}"
        sides.cost_apart(border.block, read, factor * border.to_floats)
        for block in border.readers | border.others:
            sides.forbid(read, block)
    else:
        sides.cost(quantized, on_first=border.to_integers, on_second=0.0)
    for block in border.readers:
        sides.forbid(block, quantized)


@dataclass(frozen=True)
class ProfiledPair:
    """The profiles of a file with all activations quantized, and of one without any, for one
    batch.

    Attributes:
        quantized, bare: the two.
        elements: returns the size of an activation.
    """

    quantized: Profile
    bare: Profile
    elements: Callable[[Key], int]


def measured_costs(
    pairs: Sequence[ProfiledPair],
    quantized: BlockMap,
    bare: BlockMap,
    keys: Iterable[Key],
) -> Costs:
    """Return the costs as shares of the float file's time, on average over batches."""
    points = quantized.points(keys)
    names = list(dict.fromkeys((*quantized.names, *bare.names)))
    integers = dict.fromkeys(names, 0.0)
    floats = dict.fromkeys(names, 0.0)
    borders: dict[Key, list[BorderCost]] = {point.key: [] for point in points}
    for pair in pairs:
        share = 1 / len(pairs) / max(pair.bare.seconds, 1e-9)
        at_borders = _quantizing(pair.quantized, points)
        blocks = quantized.blocks_of(pair.quantized)
        for block, seconds in seconds_by_block(pair.quantized, blocks, at_borders).items():
            integers[block] += share * seconds
        in_float = seconds_by_block(pair.bare, bare.blocks_of(pair.bare))
        for block, seconds in in_float.items():
            floats[block] += share * seconds
        rates = _Rates.of(pair)
        for point in points:
            border = _border(point, quantized, pair, rates=rates, share=share)
            borders[point.key].append(border)
    costs = {name: BlockCost(integers[name], floats[name]) for name in names}
    return Costs(costs, tuple(_summed(parts) for parts in borders.values()))


def block_milliseconds(
    pairs: Sequence[ProfiledPair], quantized: BlockMap, bare: BlockMap
) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of each block in integers and in float, for each batch."""
    times: dict[str, dict[str, list[float]]] = {}
    for name in (*quantized.names, *bare.names):
        times[name] = {"integers_ms": [], "float_ms": []}
    for pair in pairs:
        integers = seconds_by_block(pair.quantized, quantized.blocks_of(pair.quantized))
        floats = seconds_by_block(pair.bare, bare.blocks_of(pair.bare))
        for name, row in times.items():
            row["integers_ms"].append(round(1e3 * integers.get(name, 0.0), 4))
            row["float_ms"].append(round(1e3 * floats.get(name, 0.0), 4))
    return times


def _quantizing(
    profile: Profile,
    points: Iterable[Point],
) -> list[Kernel]:
    """Return the kernels that make codes of floats at some places."""
    names: set[str] = set()
    for point in points:
        names |= point.nodes
    kernels: list[Kernel] = []
    for kernel in profile.kernels:
        if kernel.op_type == "QuantizeLinear" and own_name(kernel.name) in names:
            kernels.append(kernel)
    return kernels


@dataclass(frozen=True)
class _Rates:
    """The time of an element in kernels at borders."""

    quantize: float
    dequantize: float
    rearrange: float

    @classmethod
    def of(cls, pair: ProfiledPair) -> _Rates:
        """Return the rates of the kernels in both profiles."""
        kernels = (*pair.quantized.kernels, *pair.bare.kernels)
        return cls(
            _rate(kernels, ("QuantizeLinear",)),
            _rate(kernels, ("DequantizeLinear",)),
            _rate(kernels, _LAYOUTS),
        )


def _rate(kernels: Iterable[Kernel], op_types: Collection[str]) -> float:
    """Return the time of an element in kernels of some types."""
    seconds = 0.0
    elements = 0
    for kernel in kernels:
        if kernel.op_type in op_types:
            seconds += kernel.seconds
            elements += kernel.elements
    return seconds / elements if elements else _SECONDS_FOR_ELEMENT


def _border(
    point: Point,
    blocks: BlockMap,
    pair: ProfiledPair,
    *,
    rates: _Rates,
    share: float,
) -> BorderCost:
    """Return what an activation costs if its block and its readers are on different sides.

    A QuantizeLinear that is fused with its block was not measured. Its time is estimated.
    """
    quantizing = _quantizing(pair.quantized, [point])
    is_fused = not quantizing
    to_integers = sum(kernel.seconds for kernel in quantizing)
    types: dict[str, str] = {}
    for node in pair.quantized.optimized.graph.node:
        types[own_name(node.name)] = node.op_type
    readers: set[str] = set()
    others: set[str] = set()
    for name in point.readers:
        block = blocks.block_of_node(name)
        if _reads_codes(types.get(name, "")):
            readers.add(block)
        elif block != point.block:
            others.add(block)
    size = pair.elements(point.key)
    if is_fused:
        to_integers = size * (rates.quantize + rates.rearrange)
    return BorderCost(
        point.key,
        point.block,
        frozenset(readers),
        frozenset(others),
        is_fused,
        share * to_integers,
        share * size * (rates.dequantize + rates.rearrange),
    )


def _reads_codes(op_type: str) -> bool:
    """Return whether a kernel of ONNX Runtime computes with codes."""
    return op_type.startswith(("QLinear", "QGemm", "QAttention")) or "Integer" in op_type


def _summed(parts: Sequence[BorderCost]) -> BorderCost:
    """Return the costs of an activation, summed over batches."""
    first = parts[0]
    return BorderCost(
        first.key,
        first.block,
        frozenset().union(*(part.readers for part in parts)),
        frozenset().union(*(part.others for part in parts)),
        first.is_fused,
        sum(part.to_integers for part in parts),
        sum(part.to_floats for part in parts),
    )
