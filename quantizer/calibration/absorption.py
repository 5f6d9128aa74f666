"""Decides on calibration data which layers absorb the high biases of the layers before them.

The pass relies on the ranges that batch norms predict, which real data may not have. The
decision is recorded in the results, so that every later run makes the same graph.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from quantizer.calibration.solution import AbsorptionRecord
from quantizer.config.model import QuantizationSpec, Settings
from quantizer.config.wording import counted
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.graph.passes import CHECKED, graph_before
from quantizer.graph.passes.equalization import Absorption, find_absorptions
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import decibel, energy
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import loaded

_MAX_BATCHES = 4
"""How many of the first calibration batches are read.

Each runs the layers between the two of a pair twice, and the second layer three times.
"""
_INPUT_SPEC = QuantizationSpec(bit_width=8, symmetric=False, signed=False, is_dynamic=True)
_WEIGHT_SPEC = QuantizationSpec(bit_width=8, is_dynamic=True)
"""8 bits for the input and the weight of the second layer of a pair, with one scale each."""
_MIN_DB = -100.0
"""The lowest SQNR that is recorded, in dB."""


@dataclass
class _Energies:
    """Sums over batches: the energy of a second layer's output, and of two errors in it."""

    signal: float = 0.0
    absorbing: float = 0.0
    eight_bits: float = 0.0

    @property
    def is_absorbed(self) -> bool:
        """Return whether absorbing changes the output no more than 8 bits do; not for NaN."""
        return self.absorbing <= self.eight_bits


def decide_absorption(
    original: Graph, settings: Settings, batches: Iterable[Batch]
) -> AbsorptionRecord:
    """Return the layers that absorb high biases, and their effect on the first batches.

    Args:
        original: the model as traced.
        settings: of the config, which says whether biases are absorbed at all.
        batches: calibration data on the graph's device. They are read only if a layer can
            absorb biases.

    Raises:
        DataError: the network cannot run a batch.
    """
    graph = graph_before(CHECKED, original, settings)
    if graph is None:
        return {}
    pairs = []
    for absorption in find_absorptions(graph):
        pairs.append((absorption, _Energies()))
    if not pairs:
        return {}
    network = Network(graph)
    coarse = Network(_with_8_bit_weights(graph, pairs))
    count = 0
    with torch.no_grad():
        for batch in islice(batches, _MAX_BATCHES):
            with prefix_batch_errors(count, batch):
                execution = network.start(batch.args, batch.kwargs)
                for absorption, energies in pairs:
                    first = absorption.pair.first.name
                    execution.advance(graph.index[first] + 1)
                    _add(energies, absorption, execution, coarse)
            count += 1
    rows = {}
    for absorption, energies in pairs:
        pair = absorption.pair
        rows[pair.first.name] = {
            "into": pair.second.name,
            "absorbing_db": _rounded_db(energies.signal, energies.absorbing),
            "eight_bits_db": _rounded_db(energies.signal, energies.eight_bits),
            "absorbed": energies.is_absorbed,
        }
    return {"batches": count, "layers": rows}


def refused_sentences(record: AbsorptionRecord) -> list[str]:
    """Return a sentence on each layer whose high biases stay."""
    sentences = []
    for name, row in record.get("layers", {}).items():
        if not row["absorbed"]:
            absorbing = _ratio_text(row["absorbing_db"])
            eight_bits = _ratio_text(row["eight_bits_db"])
            batches = counted(record["batches"], "calibration batch", "calibration batches")
            sentences.append(
                f"the high biases of {name} stay: on {batches}, the output of {row['into']} "
                f"has an SQNR of {absorbing} with absorbed biases, and of {eight_bits} with "
                "8 bits"
            )
    return sentences


def _ratio_text(ratio: float | None) -> str:
    return "infinity" if ratio is None else f"{ratio:.1f} dB"


def _rounded_db(signal: float, error: float) -> float | None:
    """Return the ratio in dB, without the last bits of sums; None if there is no error."""
    ratio = decibel(signal, error)
    if ratio == math.inf:
        return None
    ratio = round(ratio, 2)
    return max(_MIN_DB, ratio)


def _add(
    energies: _Energies, absorption: Absorption, execution: Execution, coarse: Network
) -> None:
    """Add one batch to the energies of a pair.

    Args:
        energies: added to.
        absorption: the pair, and by how much the first layer's output is lowered.
        execution: of the float network, which has just run the first layer.
        coarse: the same network with 8-bit weights in second layers.
    """
    pair, network = absorption.pair, execution.network
    second = network.graph.index[pair.second.name]
    source = pair.second.operands["input"]

    exact = execution.branch().advance(second)
    x = exact.values[source]

    # Absorbing is exact if adding the shift again after the ReLU gives back the input.
    shifted = execution.branch()
    before = shifted.values[pair.first.name]
    weight = network.graph.weight(pair.first)
    shift = _by_channel(absorption.high, before, weight)
    shifted.values[pair.first.name] = before - shift
    shifted.advance(second)
    weight = network.graph.weight(pair.second)
    shift = _by_channel(absorption.high_inputs, x, weight)
    restored = shifted.values[source] + shift
    quantized = TensorQuantizer(_INPUT_SPEC)(x)

    output = network.run_node(pair.second, exact.values)
    absorbed = network.run_node(pair.second, {**exact.values, source: restored})
    rounded = coarse.run_node(pair.second, {**exact.values, source: quantized})
    energies.signal += energy(output)
    energies.absorbing += energy(absorbed - output)
    energies.eight_bits += energy(rounded - output)


def _by_channel(values: Tensor, like: Tensor, weight: Tensor) -> Tensor:
    """Return [channels] values as [channels, 1, ...], to add to the input or output `like` of a
    layer with this weight.
    """
    spatial = weight.dim() - 2
    return values.to(like).reshape(-1, *[1] * spatial)


def _with_8_bit_weights(graph: Graph, pairs: Iterable[tuple[Absorption, _Energies]]) -> Graph:
    """Return the graph with 8-bit weights in all second layers."""
    weights = {}
    for absorption, _ in pairs:
        second = absorption.pair.second
        weight = loaded(graph.weight(second)).detach()
        quantized = TensorQuantizer(_WEIGHT_SPEC)(weight)
        weights[second.name] = {"weight": quantized}
    return with_weights(graph, weights)
