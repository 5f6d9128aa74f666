"""Computes from profiles what each block costs in integers and in float, and what it costs to
convert activations between the two.

All costs are shares: 0.1 is a tenth of the time of the file without quantized activations. The
cheapest choice of blocks is a minimum cut, see `_add_border`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from quantizer.export.onnx.tuned.blocks import BlockMap, QuantizationPoint, original_name
from quantizer.export.onnx.tuned.cut import TwoSides
from quantizer.export.onnx.tuned.meter import Kernel, Profile
from quantizer.plan.model import Key

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
        keys: set[Key] = set()
        for border in self.borders:
            is_written = border.is_fused and border.block not in floats
            is_read = any(block not in floats for block in border.readers)
            if not is_written and not is_read:
                keys.add(border.key)
        return frozenset(keys)

    def choices(self) -> list[frozenset[str]]:
        """Return different sets of blocks to leave in float, the most promising first.

        Each is the cheapest one if all borders cost some multiple of their estimates.
        """
        choices: list[frozenset[str]] = []
        for factor in _FACTORS:
            choice = self._cheapest(factor)
            if choice not in choices:
                choices.append(choice)
        return choices

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
    borders: dict[Key, list[BorderCost]] = {point.key: [] for point in points}
    for pair in pairs:
        # The sum of a cost over batches is then its average
        share_of_second = 1 / len(pairs) / max(pair.bare.seconds, 1e-9)
        # Their time is a cost of borders
        at_borders = _quantizing_kernels(pair.quantized, points)
        for block, seconds in quantized.seconds(pair.quantized, at_borders).items():
            integers[block] += share_of_second * seconds
        for block, seconds in bare.seconds(pair.bare).items():
            floats[block] += share_of_second * seconds
        rates = _Rates.of(pair)
        for point in points:
            border = _border_cost(
                point, quantized, pair, rates=rates, share_of_second=share_of_second
            )
            borders[point.key].append(border)
    costs = {name: BlockCost(integers[name], floats[name]) for name in names}
    return Costs(costs, tuple(_summed(parts) for parts in borders.values()))


def block_milliseconds(
    pairs: Sequence[ProfiledPair], quantized: BlockMap, bare: BlockMap
) -> dict[str, dict[str, list[float]]]:
    """Return by block its milliseconds under "integers_ms" and "float_ms", a list of one number
    for each batch.
    """
    times: dict[str, dict[str, list[float]]] = {}
    for name in (*quantized.names, *bare.names):
        times[name] = {"integers_ms": [], "float_ms": []}
    for pair in pairs:
        integers = quantized.seconds(pair.quantized)
        floats = bare.seconds(pair.bare)
        for name, row in times.items():
            row["integers_ms"].append(round(1e3 * integers.get(name, 0.0), 4))
            row["float_ms"].append(round(1e3 * floats.get(name, 0.0), 4))
    return times


def _quantizing_kernels(profile: Profile, points: Iterable[QuantizationPoint]) -> list[Kernel]:
    """Return the kernels of QuantizeLinear at `points`."""
    names: set[str] = set()
    for point in points:
        names |= point.nodes
    kernels: list[Kernel] = []
    for kernel in profile.kernels:
        if kernel.op_type == "QuantizeLinear" and original_name(kernel.name) in names:
            kernels.append(kernel)
    return kernels


@dataclass(frozen=True)
class _Rates:
    """The seconds that one element takes in kernels that convert it."""

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
    """Return the seconds for an element of the outputs of kernels of some types."""
    seconds = 0.0
    elements = 0
    for kernel in kernels:
        if kernel.op_type in op_types:
            seconds += kernel.seconds
            elements += kernel.elements
    return seconds / elements if elements else _SECONDS_FOR_ELEMENT


def _border_cost(
    point: QuantizationPoint,
    blocks: BlockMap,
    pair: ProfiledPair,
    *,
    rates: _Rates,
    share_of_second: float,
) -> BorderCost:
    """Return the cost of an activation at the border of its block, for one batch.

    A QuantizeLinear that is fused with its block has no kernel in the profile. Its time, and
    that of each DequantizeLinear, is estimated from the number of elements.

    Args:
        point: where the activation is quantized.
        blocks: of the file with all activations quantized.
        pair: the profiles with the batch.
        rates: of the same profiles.
        share_of_second: what one second with this batch adds to a cost.
    """
    quantizing = _quantizing_kernels(pair.quantized, [point])
    is_fused = not quantizing
    to_integers = sum(kernel.seconds for kernel in quantizing)
    types: dict[str, str] = {}
    for node in pair.quantized.optimized.graph.node:
        types[original_name(node.name)] = node.op_type
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
        share_of_second * to_integers,
        share_of_second * size * (rates.dequantize + rates.rearrange),
    )


def _reads_codes(op_type: str) -> bool:
    """Return whether kernels of ONNX Runtime of this type compute with codes.

    >>> _reads_codes("QLinearConv"), _reads_codes("MatMulIntegerToFloat"), _reads_codes("Conv")
    (True, True, False)
    """
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
