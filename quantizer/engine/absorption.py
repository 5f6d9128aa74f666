"""Whether layers may take up the high biases of those before them, as the first calibration batches show.

Batch norms promise where values lie, and data may lie elsewhere. What was decided is recorded, so that every later run
makes the same graph; nothing here decides it a second time.
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
from quantizer.numerics.deferred import loaded
from quantizer.numerics.metrics import decibel, energy
from quantizer.sources.batches import Batch, naming_batch

CHECKED_BATCHES = 4
"""Calibration batches that are looked at. Each costs what lies between two layers twice, for each such pair."""
VALUES = QuantizationSpec(bit_width=8, symmetric=False, signed=False, is_dynamic=True)
WEIGHTS = QuantizationSpec(bit_width=8, is_dynamic=True)
"""Eight bits for what the second layer of a pair reads: one scale for all its input, and one for its weight."""

LEAST_DB = -100.0
"""What is recorded where nothing is left of a signal."""
Record = Mapping[str, Any]
"""What quant_info.json says: `batches`, and for each first layer of `layers` both figures and the decision."""


NOTHING: Record = {}
"""Of a network without such layers, and of a calibration without data."""


@dataclass
class _Energies:
    """Of a second layer's output over batches: its own, and that of either error."""

    signal: float = 0.0
    absorbing: float = 0.0
    eight_bits: float = 0.0

    @property
    def is_absorbed(self) -> bool:
        """Whether absorbing changes the output no more than eight bits do; NaN is no such thing."""
        return self.absorbing <= self.eight_bits


def checked(original: Graph, settings: Settings, batches: Iterable[Batch]) -> Record:
    """Return what absorbing high biases changes on the first batches, and which layers it is done for.

    Args:
        original: as traced.
        settings: of the config.
        batches: calibration data, on the graph's device; the first `CHECKED_BATCHES` are read, if any layer can absorb.

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
    """Return the first layers whose biases stay, by a record; an empty one refuses none."""
    rows = record.get("layers", {})
    return frozenset(name for name, row in rows.items() if not row["absorbed"])


def refusals(record: Record) -> list[str]:
    """Return a sentence on each layer whose biases stay."""
    sentences = []
    for name, row in record.get("layers", {}).items():
        if row["absorbed"]:
            continue
        absorbing, eight_bits = _in_words(row["absorbing_db"]), _in_words(row["eight_bits_db"])
        sentences.append(
            f"the high biases of {name} stay: on {record['batches']} calibration batches, absorbing "
            f"them leaves {absorbing} of the output of {row['into']}, and 8 bits {eight_bits}"
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
    """Decibels that do not depend on the last bits of sums; None where there is no error."""
    ratio = decibel(signal, error)
    return None if ratio == math.inf else max(LEAST_DB, round(ratio, 2))


def _add(energies: _Energies, absorption: Absorption, execution: Execution, coarse: Network) -> None:
    """Take in what absorbing and what eight bits change in the second layer's output, from after the first layer."""
    pair, network = absorption.pair, execution.network
    second = network.graph.index[pair.second.name]
    source = pair.second.operands["input"]
    exact = execution.branch().advance(second)
    x = exact.values[source]
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
    """One value for each channel of what a layer with this weight reads or makes, ready to be added to that."""
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
