"""Gives weights their plain scales back where the range method `pair_safe` costs too much.

The errors of a layer's output come from three roundings: of its weights, of its input and of
its output. Only the first grows with the scales of weights. So a layer loses little if its
input and output are coarse, and most if the network returns its output.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from quantizer.calibration.observing import Calibration
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.config.wording import first_names
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.numerics.histogram import Histogram
from quantizer.observers.converted import restated
from quantizer.observers.methods import CENTRES
from quantizer.plan.groups import layout
from quantizer.plan.layout import Layout, quantization_point
from quantizer.plan.model import Key
from quantizer.storage.deferred_tensor import loaded

MOST_LOST_DB = 1.0
"""A layer whose output would lose more keeps the plain scales of its weights."""
_LATER_ROUNDING = (8 / 255) ** 2 / 12
"""The mean square error of rounding normal values to 8 bits, over four standard deviations to
both sides, as a share of their mean square. It stands for the rounding of outputs that are
rounded after a sum or a norm.
"""


@dataclass(frozen=True)
class _Values:
    """The values of a quantized activation.

    Attributes:
        mean, mean_square: of the values.
        rounding: the mean square error of rounding them over their whole range.
    """

    mean: float
    mean_square: float
    rounding: float


def keep_plain_scales(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Return the state with the plain scales of weights that would lose too much, or whose
    inputs stay float. No processor adds up products of floats wrong.

    An estimate reads the whole ranges of activations, with every range method. So a retuned
    activation leads to the same scales of weights.
    """
    solution = state.solution
    where = layout(state.plan.graph)
    lost: dict[str, float] = {}
    plain_qparams = {}
    for layer in _layers(state):
        key = (layer, "weights")
        tensor = solution.tensors[key]
        plain = replace(tensor.spec, method="maxmin")
        qparams = restated(state.calibration.observers[key], plain).qparams()
        if qparams.scale.equal(tensor.scale):
            continue
        lost_db = _lost_db(state, where, layer, tensor.with_qparams(qparams))
        if lost_db is not None and lost_db <= MOST_LOST_DB:
            continue
        plain_qparams[layer] = qparams
        if lost_db is not None:
            lost[layer] = lost_db
    if lost:
        layers = [f"{layer} ({decibels:.1f} dB)" for layer, decibels in lost.items()]
        names = first_names(layers, 3)
        text = (
            f"scales for pair_safe would cost over {MOST_LOST_DB:g} dB of a layer's output, so "
            f"weights keep their plain ones, and an .onnx stores them as uint8: {names}"
        )
        request.events.message(logging.INFO, text)
    notes = dict(solution.notes)
    for layer, lost_db in lost.items():
        note = f"not pair_safe, which would cost {lost_db:.1f} dB of the layer's output"
        notes[layer, "weights"] = (*notes.get((layer, "weights"), ()), note)
    solution = replace(solution.with_qparams(plain_qparams), notes=notes)
    return replace(state, solution=solution)


def _layers(state: CalibrationState) -> Iterator[str]:
    """Yield the layers whose weights have safe scales, and are not rounded by an algorithm."""
    for (layer, role), tensor in state.plan.tensors.items():
        is_safe = role == "weights" and tensor.spec.method == "pair_safe"
        if is_safe and layer not in state.adjustment.rounded:
            yield layer


def _lost_db(
    state: CalibrationState, where: Layout, layer: str, plain: QuantizedTensor
) -> float | None:
    """Return how many dB a layer's output loses with the safe scales of its weights.

    Return None if its input stays float, and 0 if the range of its input is found at run time.

    Args:
        where: the graph's layout.
        plain: its weights with their plain scales.
    """
    graph = state.plan.graph
    source = graph.source(graph.by_name[layer])
    input_key = None if source is None else _key_of(state, where, source.name, layer)
    if input_key is None:
        return None
    input_values = _values(state.calibration, input_key)
    if input_values is None:
        return 0.0
    output_key = _key_of(state, where, layer)
    output_values = None if output_key is None else _values(state.calibration, output_key)
    weight = loaded(state.plan.parameter((layer, "weights"))).detach()
    square = float(weight.double().square().sum())
    others = input_values.rounding * square
    if output_values is not None:
        others += output_values.rounding * len(weight)
    elif "" not in graph.consumers[layer]:
        others += _LATER_ROUNDING * input_values.mean_square * square
    power = input_values.mean_square
    if layer in state.plan.corrected:
        # What the mean of the input makes of errors is added to the bias
        power -= input_values.mean**2
    safe = state.solution.tensors[layer, "weights"]
    errors = [power * _error(tensor, weight) + others for tensor in (safe, plain)]
    if min(errors) == 0:
        return 0.0
    return 10 * math.log10(errors[0] / errors[1])


def _error(tensor: QuantizedTensor, weight: Tensor) -> float:
    """Return the sum of the squared errors of a weight."""
    rounded = TensorQuantizer.of(tensor)(weight)
    return float((rounded - weight).double().square().sum())


def _key_of(state: CalibrationState, where: Layout, value: str, reader: str = "") -> Key | None:
    """Return where a value is quantized: where it is made or moved, or at its reader."""
    point = quantization_point(state.plan.graph, where, value) or value
    keys = ((reader, "input"), (point, "activation"), (point, "input"))
    return next((key for key in keys if key in state.plan.tensors), None)


def _values(calibration: Calibration, key: Key) -> _Values | None:
    """Return the values of an activation that was observed."""
    observer = calibration.observers.get(key)
    tensor = calibration.plan.tensors[key]
    if observer is None or tensor.spec.is_dynamic:
        return None
    low = min(float(observer.low.min()), 0.0)
    high = max(float(observer.high.max()), 0.0)
    step = (high - low) / (2**tensor.spec.bit_width - 1)
    counted = observer if observer.has_histogram else calibration.histograms[tensor.place]
    tensors = counted.state_dict()
    del tensors["batches"]
    histogram = Histogram.from_tensors(tensors)
    values = CENTRES * histogram.width[:, None]
    count = histogram.counts.sum()
    mean = (histogram.counts * values).sum() / count
    mean_square = (histogram.counts * values.square()).sum() / count
    return _Values(float(mean), float(mean_square), step**2 / 12)
