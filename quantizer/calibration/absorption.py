"""Decides on calibration data which layers may absorb the high biases of those before them.

A batch norm promises where values lie, and data may lie elsewhere. The decision is recorded in
the results, so that every later run makes the same graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec, Settings
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.graph.passes import CHECKED, graph_before
from quantizer.graph.passes.equalization import Absorption, find_absorptions
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import decibel, energy
from quantizer.sources.batches import Batch, naming_batch
from quantizer.storage.deferred_tensor import loaded

CHECKED_BATCHES = 4
"""How many of the first calibration batches are checked.

Each runs what lies between the two layers of a pair twice, and the second layer three times.
"""
VALUES = QuantizationSpec(bit_width=8, symmetric=False, signed=False, is_dynamic=True)
WEIGHTS = QuantizationSpec(bit_width=8, is_dynamic=True)
"""Eight bits for the input and for the weight of the second layer of a pair, with one scale
each.
"""
LEAST_DB = -100.0
"""The least SQNR that is recorded, where nothing is left of a signal."""
Record = Mapping[str, Any]
"""As quant_info.json has it: `batches`, and in `layers` both figures and the decision by first
layer.
"""
NOTHING: Record = {}
"""The record of a network without such layers, and of a calibration without data."""


@dataclass
class _Energies:
    """Energies over batches: of a second layer's output, and of either error in it."""

    signal: float = 0.0
    absorbing: float = 0.0
    eight_bits: float = 0.0

    @property
    def is_absorbed(self) -> bool:
        """Whether absorbing changes the output no more than eight bits do, which NaN does not
        say.
        """
        return self.absorbing <= self.eight_bits


def decide(original: Graph, settings: Settings, batches: Iterable[Batch]) -> Record:
    """Return which layers may absorb high biases, and what that changes on the first batches.

    Args:
        original: the model as traced.
        settings: of the config, which says whether biases are absorbed at all.
        batches: calibration data on the graph's device. The first `CHECKED_BATCHES` are read if
            any layer can absorb, else none.

    Raises:
        DataError: the network cannot run a batch.
    """
    graph = graph_before(CHECKED, original, settings)
    absorptions = [] if graph is None else list(find_absorptions(graph))
    if graph is None or not absorptions:
        return NOTHING
    sums = [_Energies() for _ in absorptions]
    network = Network(graph)
    coarse = Network(_with_coarse_weights(graph, absorptions))
    count = 0
    with torch.no_grad():
        for batch in islice(batches, CHECKED_BATCHES):
            with naming_batch(count):
                execution = network.start(batch.args, batch.kwargs)
                for absorption, energies in zip(absorptions, sums, strict=True):
                    first = graph.index[absorption.pair.first.name]
                    execution.advance(first + 1)
                    _add(energies, absorption, execution, coarse)
            count += 1
    rows = {}
    for absorption, energies in zip(absorptions, sums, strict=True):
        rows[absorption.pair.first.name] = _row(absorption, energies)
    return {"batches": count, "layers": rows}


def refused(record: Record) -> frozenset[str]:
    """Return the layers whose high biases stay; an empty record refuses none."""
    rows = record.get("layers", {})
    return frozenset(name for name, row in rows.items() if not row["absorbed"])


def refusals(record: Record) -> list[str]:
    """Return a sentence on each layer whose high biases stay."""
    sentences = []
    for name, row in record.get("layers", {}).items():
        if row["absorbed"]:
            continue
        absorbing = _in_words(row["absorbing_db"])
        eight_bits = _in_words(row["eight_bits_db"])
        sentences.append(
            f"the high biases of {name} stay: on {record['batches']} calibration batches, "
            f"absorbing them leaves {absorbing} of the output of {row['into']}, and 8 bits "
            f"{eight_bits}"
        )
    return sentences


def _in_words(ratio: float | None) -> str:
    return "all" if ratio is None else f"{ratio:.1f} dB"


def _row(absorption: Absorption, energies: _Energies) -> dict[str, Any]:
    return {
        "into": absorption.pair.second.name,
        "absorbing_db": _rounded_db(energies.signal, energies.absorbing),
        "eight_bits_db": _rounded_db(energies.signal, energies.eight_bits),
        "absorbed": energies.is_absorbed,
    }


def _rounded_db(signal: float, error: float) -> float | None:
    """The ratio without the last bits of sums, in dB; None where there is no error."""
    ratio = decibel(signal, error)
    return None if ratio == math.inf else max(LEAST_DB, round(ratio, 2))


def _add(
    energies: _Energies, absorption: Absorption, execution: Execution, coarse: Network
) -> None:
    """Add one batch to the energies of a pair.

    Args:
        energies: of the pair, which are added to.
        absorption: the pair, and by how much the first layer's output is lowered.
        execution: of the float network, which has just run the first layer.
        coarse: the same network with second layers' weights of eight bits.
    """
    pair, network = absorption.pair, execution.network
    second = network.graph.index[pair.second.name]
    source = pair.second.operands["input"]

    exact = execution.branch().advance(second)
    x = exact.values[source]

    # Absorbing is exact where adding the shift again, behind the ReLU, gives back the input.
    shifted = execution.branch()
    before = shifted.values[pair.first.name]
    weight = network.graph.weight(pair.first)
    shifted.values[pair.first.name] = before - _along_channels(absorption.high, before, weight)
    shifted.advance(second)
    weight = network.graph.weight(pair.second)
    restored = shifted.values[source] + _along_channels(absorption.high_inputs, x, weight)

    output = network.run_node(pair.second, exact.values)
    absorbed = network.run_node(pair.second, {**exact.values, source: restored})
    rounded = coarse.run_node(pair.second, {**exact.values, source: TensorQuantizer(VALUES)(x)})
    energies.signal += energy(output)
    energies.absorbing += energy(absorbed - output)
    energies.eight_bits += energy(rounded - output)


def _along_channels(values: Tensor, like: Tensor, weight: Tensor) -> Tensor:
    """One value for each channel, in the shape in which it is added to `like`.

    `like` is the input or the output of a layer with this weight.
    """
    axes_behind = weight.dim() - 2
    return values.to(like).reshape(-1, *[1] * axes_behind)


def _with_coarse_weights(graph: Graph, absorptions: Iterable[Absorption]) -> Graph:
    """The graph with weights of eight bits in all second layers."""
    weights = {}
    for absorption in absorptions:
        second = absorption.pair.second
        weight = loaded(graph.weight(second)).detach()
        weights[second.name] = {"weight": TensorQuantizer(WEIGHTS)(weight)}
    return with_weights(graph, weights)
