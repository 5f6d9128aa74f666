"""Moves high biases to the next layer, where the first calibration batches allow it.

If most of a channel's range is never used, its bias moves: relu(x - c) is relu(x) - c where
x >= c. A folded batch norm states mean and std of a channel. With c = max(0, mean - 3 std),
x >= c holds for all but 0.13 % of normally distributed values. Real data may have other ranges,
so the decision is made on data. It is recorded in the results, so that every later run makes
the same graph.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction",
section 4.1 (2019).
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.equalization.equalization import LayerPair, find_pairs
from quantizer.calibration.request import CalibrationRequest, CalibrationState, Decision
from quantizer.config.model import QuantizationSpec
from quantizer.config.wording import counted
from quantizer.graph.channels.axis_rules import is_padded
from quantizer.graph.edits import by_channel, passes_shifts, with_weights
from quantizer.graph.ir import Graph, Node, PassChange
from quantizer.graph.passes import graph_before
from quantizer.nn.network import Execution, Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import decibel, energy
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import loaded
from quantizer.storage.files import damaged

_NAME = "absorption"
_PASS = "absorb_high_biases"
_STDS = 3
_MAX_BATCHES = 4
"""How many of the first calibration batches are read.

Each runs the layers between the two of a pair twice, and the second layer three times.
"""
_INPUT_SPEC = QuantizationSpec(bit_width=8, symmetric=False, signed=False, is_dynamic=True)
_WEIGHT_SPEC = QuantizationSpec(bit_width=8, is_dynamic=True)
"""8 bits for the input and the weight of the second layer of a pair, with one scale each."""
_MIN_DB = -100.0
"""The lowest SQNR that is recorded, in dB."""
Record = Mapping[str, Any]
"""As quant_info.json has it: `batches`, and `layers`, by first layer, with both SQNRs and the
decision. Empty for a network without such layers, and for a calibration without data.
"""


@dataclass(frozen=True, eq=False)
class Absorption:
    """A shift of a layer's bias that the next layer can take up.

    Args:
        pair: both layers.
        high: what each output channel of the first is lowered by, float64 [channels], some of
            it above 0.
    """

    pair: LayerPair
    high: Tensor

    @property
    def high_inputs(self) -> Tensor:
        """Return by how much each input channel of the second layer is lowered, float64
        [channels].
        """
        return self.high[list(self.pair.channels)]


def find_absorptions(graph: Graph) -> Iterator[Absorption]:
    """Yield all shifts that are exact up to the values below them, in execution order."""
    for pair in find_pairs(graph):
        if pair.first.name not in graph.normal or not _passes_shift(pair):
            continue
        mean, std = graph.normal[pair.first.name]
        bottom = (mean - _STDS * std).clamp(min=0)
        top = mean + _STDS * std
        # A shift takes no more of a channel than lowers the range of all channels together.
        widest = (top - bottom).max()
        high = torch.minimum(bottom, (top - widest).clamp(min=0))
        if high.any():
            yield Absorption(pair, high)


def absorb_high_biases(graph: Graph, record: Record | None = None) -> Graph:
    """Return the graph with high biases moved to the layers after them.

    Args:
        graph: after the fold of batch norms, which state the range of values.
        record: which layers' biases stay, as was decided on data; by default all move.
    """
    refused = refused_layers(record or {})
    normal = dict(graph.normal)
    biases: dict[str, Tensor] = {}
    changes: list[PassChange] = []
    for absorption in find_absorptions(graph):
        first, second = absorption.pair.first, absorption.pair.second
        if first.name in refused:
            continue
        high = absorption.high
        mean, std = normal[first.name]
        normal[first.name] = mean - high, std
        for node in (first, second):
            if node.name not in biases:
                biases[node.name] = _bias(graph, node)
        biases[first.name] = biases[first.name] - high
        taps = by_channel(second, graph.weight(second)).sum(3, dtype=torch.float64)
        response = taps @ absorption.high_inputs.reshape(len(taps), -1, 1)
        biases[second.name] = biases[second.name] + response.flatten()
        count = int(high.count_nonzero())
        changes.append(PassChange(_PASS, (first.name, second.name), count))
    if not changes:
        return graph
    rounded: dict[str, dict[str, Tensor]] = {}
    for name, bias in biases.items():
        dtype = graph.weight(graph.by_name[name]).dtype
        rounded[name] = {"bias": bias.to(dtype)}
    changed = with_weights(graph, rounded)
    return changed.replaced(normal=normal, changes=(*graph.changes, *changes))


def _passes_shift(pair: LayerPair) -> bool:
    """Return whether a shift after the first layer passes through a ReLU and reaches every
    input of the second unchanged.
    """
    if is_padded(pair.second.attrs) or pair.second.row.transposed:
        return False
    others = [node for node in pair.between if not node.row.rectifies]
    return len(others) < len(pair.between) and all(map(passes_shifts, others))


def _bias(graph: Graph, node: Node) -> Tensor:
    """Return the layer's bias in float64, zeros if it has none."""
    if "bias" in node.params:
        return graph.tensors[node.params["bias"]].double()
    weight = graph.weight(node)
    count = by_channel(node, weight).shape[:2].numel()
    return torch.zeros(count, dtype=torch.float64, device=weight.device)


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


def decide_absorption(graph: Graph, batches: Iterable[Batch]) -> Record:
    """Return the layers that absorb high biases, and their effect on the first batches.

    Args:
        graph: before the pass.
        batches: calibration data on the graph's device. They are read only if a layer can
            absorb biases.

    Raises:
        DataError: the network cannot run a batch.
    """
    pairs = [(absorption, _Energies()) for absorption in find_absorptions(graph)]
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


def refused_layers(record: Record) -> frozenset[str]:
    """Return the layers whose high biases stay."""
    rows = record.get("layers", {})
    return frozenset(name for name, row in rows.items() if not row["absorbed"])


def _decide(request: CalibrationRequest, state: CalibrationState) -> Record:
    """Decide on the first batches which layers absorb high biases."""
    graph = graph_before(_PASS, state.target.original, request.config.settings)
    return decide_absorption(graph, request.read())


def _apply(
    request: CalibrationRequest, state: CalibrationState, record: Record
) -> CalibrationState:
    """Make the passes and the plan again if some layers may not absorb biases."""
    if not refused_layers(record):
        return state
    batches = counted(record["batches"], "calibration batch")
    for name, row in record["layers"].items():
        if not row["absorbed"]:
            absorbing = _ratio_text(row["absorbing_db"])
            eight_bits = _ratio_text(row["eight_bits_db"])
            sentence = (
                f"the high biases of {name} stay: on {batches}, the output of {row['into']} "
                f"has an SQNR of {absorbing} with absorbed biases, and of {eight_bits} with "
                "8 bits"
            )
            request.events.message(logging.INFO, sentence)
    target = state.target.prepared(request.config, state.kept)
    return replace(state, target=target, plan=target.plan(request.config))


def _check(record: Record, graph: Graph, path: Path | str) -> None:
    """Refuse a record for layers of another model.

    Raises:
        ResultError: naming the first.
    """
    for name, row in record.get("layers", {}).items():
        for layer in (name, row["into"]):
            if layer not in graph.by_name:
                where = f"header/absorption/layers/{name}"
                raise damaged(path, where, f"there is no layer {layer}")


def _differences(first: Record, other: Record) -> Iterator[str]:
    """Yield a sentence on each layer that only one of two calibrations let absorb biases."""
    refused = refused_layers(first) ^ refused_layers(other)
    for name in sorted(refused):
        yield f"only one of them absorbed the high biases of {name}"


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


ABSORPTION = Decision(
    _NAME,
    "the check of absorbed biases",
    decide=_decide,
    apply=_apply,
    check=_check,
    differences=_differences,
)
