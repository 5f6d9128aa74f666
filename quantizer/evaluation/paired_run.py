"""One batch on its way through a float and a quantized network, which run in step, so that each
pair of values is compared while it exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_comparison import ComparedNetworks, require_same_shape
from quantizer.comparison.output_figures import leaves
from quantizer.config.roles import is_parameter
from quantizer.evaluation.network_comparison import (
    InputEffects,
    LayerNoise,
    NetworkComparison,
    empty_effects,
)
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.nn.recorded_outputs import RecordedOutputs, digest_of
from quantizer.numerics.metrics import Approximation
from quantizer.plan.readers import useful_magnitude
from quantizer.sources.batches import Batch

_Taps = dict[str, list[tuple[TensorQuantizer, int, float]]]
"""For each node whose value is quantized, its quantizers. Each has the index of its
`LayerNoise` in a list, and the magnitude beyond which the node's readers saturate.
"""


@dataclass(frozen=True)
class NetworkPair:
    """A float and a quantized network that are compared.

    Args:
        reference: the float network, with the nodes of the quantized one.
        quantized: the network that is compared with it.
        outputs: compares their outputs.
        taps: the quantizers of activations.
        no_noise: a `LayerNoise` without a batch for each of them.
        inputs: the effects of input channels, without a batch.
        recorded: keeps the outputs of the quantized network; None if nothing will need them.
    """

    reference: Network
    quantized: Network
    outputs: ComparedNetworks
    taps: _Taps
    no_noise: Sequence[LayerNoise]
    inputs: Sequence[InputEffects]
    recorded: RecordedOutputs | None

    @classmethod
    def of(
        cls,
        reference: Network,
        quantized: Network,
        outputs: ComparedNetworks,
        recorded: RecordedOutputs | None = None,
    ) -> NetworkPair:
        """Return the pair of two networks."""
        no_noise, taps = _taps(quantized)
        inputs = empty_effects(quantized)
        return cls(reference, quantized, outputs, taps, no_noise, inputs, recorded)

    def empty(self) -> NetworkComparison:
        """Return a comparison without a batch."""
        layers = deepcopy(list(self.no_noise))
        return NetworkComparison(layers, *self.outputs.empty(), inputs=list(self.inputs))


class PairedRun:
    """One batch that both networks run in step.

    Args:
        pair: the networks.
        batch: of data, on their device.
    """

    def __init__(self, pair: NetworkPair, batch: Batch) -> None:
        self._pair = pair
        self._batch = batch
        self._result = pair.empty()
        self._float_run = pair.reference.start(batch.args, batch.kwargs)
        self._quantized_run = pair.quantized.start(batch.args, batch.kwargs)
        self._recorders = pair.outputs.recorders()
        self._digest: bytes | None = None
        if pair.recorded is not None:
            self._digest = digest_of(self._quantized_run.values.values())

    def advance(self, stop: int) -> None:
        """Run the nodes before index `stop` in both networks, and compare their values."""
        left, right = self._recorders
        while self._float_run.position < stop:
            name, x = self._float_run.step()
            _, y = self._quantized_run.step()
            left.see(name, x)
            right.see(name, y)
            self._see_input(name, x, y)
            for quantizer, index, most in self._pair.taps.get(name, ()):
                require_same_shape(name, x, y)
                noise = self._result.layers[index]
                expected = _clipped(x, most)
                actual = _clipped(y, most)
                # The cosine is that of the whole network
                local = _quantized(quantizer, expected, is_measured=False)
                accumulated = Approximation(actual)
                if noise.layer != name:
                    # The quantized network has not applied a quantizer of a layer's input yet
                    accumulated = _quantized(quantizer, actual)
                noise.add(expected, local, accumulated)

    def _see_input(self, name: str, x: object, y: object) -> None:
        """Add the values of a node to the effects of the channels that layers read from it."""
        rows = self._result.inputs
        for index, row in enumerate(rows):
            if row.source != name:
                continue
            expected = cast(Tensor, x)
            actual = cast(Tensor, y)
            rows[index] = row.with_batch(expected, actual)

    def finish(self) -> NetworkComparison:
        """Return the comparison of the batch, whose nodes have all run."""
        result = self._result
        executions = (self._float_run, self._quantized_run)
        expected, result.outputs, result.quantization = self._pair.outputs.figures(
            executions, self._recorders, self._batch
        )
        record_predictions(result, self._batch, expected, self._quantized_run.outputs())
        if self._pair.recorded is not None:
            self._pair.recorded.record(self._digest, self._quantized_run.output())
        return result


def _clipped(values: Tensor, most: float) -> Tensor:
    """Return the values clipped to magnitudes of at most `most`, which may be infinite."""
    if math.isinf(most):
        return values
    return values.clamp(-most, most)


def _quantized(
    quantizer: TensorQuantizer, values: Tensor, *, is_measured: bool = True
) -> Approximation:
    """Return what a quantizer makes of some values."""
    if quantizer.is_elementwise:
        return Approximation(values, quantizer.quantized_copy, is_measured)
    return Approximation(quantizer.quantized_copy(values), None, is_measured)


def _taps(quantized: Network) -> tuple[list[LayerNoise], _Taps]:
    """Return an empty `LayerNoise` for each activation that a network quantizes, and the nodes
    that have the values.
    """
    rows: list[LayerNoise] = []
    taps: _Taps = {}
    for name, role, quantizer in quantized.quantizers():
        if is_parameter(role):
            continue
        node = quantized.graph.by_name[name]
        source = name
        if role != "activation" and node.op != "input":
            # The input of a layer is the value of another node
            source = node.input_roles()[role]
        most = useful_magnitude(quantized.graph, source, quantizer.spec)
        if most is None:
            most = math.inf
        tap = (quantizer, len(rows), most)
        taps.setdefault(source, []).append(tap)
        is_bounded = node.row.kind == "nonlinear"
        row = LayerNoise(name, role, accumulated=Noise(), is_bounded=is_bounded)
        rows.append(row)
    return rows, taps


def record_predictions(
    result: NetworkComparison,
    batch: Batch,
    reference: Sequence[Tensor],
    quantized: Sequence[Tensor],
) -> None:
    """Record three things about one batch: whether the quantized outputs are finite, whether
    both networks rank the same class first, and how well they predict the targets.

    Classes and predictions are those of the first floating-point output.
    """
    result.batches = 1
    for part in leaves(result.outputs):
        if part.is_float and not math.isfinite(part.noise.error):
            result.spoiled = 0
    pairs = list(zip(reference, quantized, strict=True))
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    if not floats:
        result.rankable = False
        return
    x, y = floats[0]
    is_ranking = x.dim() == 2 and x.shape[1] > 1
    result.rankable &= is_ranking
    if is_ranking:
        classes = x.argmax(1)
        result.samples += len(classes)
        is_same = classes == y.argmax(1)
        result.agreeing += int(is_same.sum())
    target = batch.target
    is_index = target is not None and not target.is_floating_point()
    if is_index and (is_ranking or x.dim() == 3):
        result.float_score.add(x, batch)
        result.quantized_score.add(y, batch)
