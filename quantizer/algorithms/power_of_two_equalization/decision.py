"""The decision on the channels that one scale cannot serve, of inputs and between layers. They
are multiplied with powers of two, which the weights that read them take back.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantizer.algorithms.power_of_two_equalization.inputs import decide_input_levels
from quantizer.algorithms.power_of_two_equalization.layers import (
    LARGEST_EXPONENT,
    Exponents,
    decide_levels,
    level_adjustment,
    level_sentence,
)
from quantizer.calibration.request import CalibrationRequest, CalibrationState, Decision
from quantizer.graph.edits import channels_of
from quantizer.graph.ir import Graph
from quantizer.layerwise.adjustment import Adjustment
from quantizer.layerwise.fold import fold_factors
from quantizer.plan.floating import input_values
from quantizer.plan.readers import input_readers
from quantizer.sources.batches import Batch
from quantizer.storage.files import damaged


def _decide(request: CalibrationRequest, state: CalibrationState) -> Exponents:
    """Return the exponents of the channels that one scale cannot serve, of inputs and between
    layers. Report them, and the channels of inputs that stay coarse.

    The DPU computes nothing in float and has one scale for all weights of a layer, so its
    channels stay as they are.
    """
    plan = state.plan
    can_scale = plan.settings.target_device != "DPU"
    early = _early_batches(request)
    of_inputs = decide_input_levels(plan, early, can_scale=can_scale)
    for level, text in of_inputs.remarks:
        request.events.message(level, text)
    if not can_scale:
        return {}
    of_layers = decide_levels(plan, request.read())
    if of_layers:
        text = level_sentence(of_layers)
        request.events.message(logging.INFO, text)
    return {**of_layers, **of_inputs.exponents}


def _early_batches(request: CalibrationRequest) -> Iterator[Batch]:
    """Yield the calibration data. The first batch is kept, so that reading it costs nothing."""
    yield request.first_batch()
    batches = request.read()
    next(batches, None)
    yield from batches


def _apply(
    request: CalibrationRequest, state: CalibrationState, levels: Exponents
) -> CalibrationState:
    """Scale the channels, and make the plan again."""
    adjustment = _adjustment_of(state.plan.graph, levels)
    target = state.target.adjusted(adjustment)
    plan = target.plan(request.config)
    return replace(state, target=target, plan=plan, adjustment=adjustment)


def _adjustment_of(graph: Graph, exponents: Exponents) -> Adjustment:
    """Return an adjustment with all factors: those of layers, as `layers` has them, and
    those of inputs, which are multiplied in float before they are quantized.
    """
    adjustment = level_adjustment(graph, exponents)
    names = input_values(graph)
    groups = {row.group.source: row.group for row in input_readers(graph)}
    for source, levels in exponents.items():
        if source in names:
            factors = torch.tensor(levels, dtype=torch.float32, device=graph.device)
            adjustment = fold_factors(graph, groups[source], torch.exp2(-factors), adjustment)
    return adjustment


def _check(levels: Exponents, passed: Graph, path: Path | str) -> None:
    """Refuse factors for channels that the model does not have.

    Raises:
        ResultError: naming the first layer.
    """
    readers = input_readers(passed) if levels else []
    inputs = {row.group.source: row.group.channels for row in readers}
    for name, exponents in levels.items():
        where = f"header/levels/{name}"
        node = passed.by_name.get(name)
        if name in inputs:
            channels = inputs[name]
        elif node is None or not node.is_multiplying:
            raise damaged(path, where, "there is no such layer with weights")
        else:
            channels, _ = channels_of(node, passed.weight(node))
        if not _are_exponents(exponents, channels):
            text = f"expected {channels} integers up to {LARGEST_EXPONENT}"
            raise damaged(path, where, text)


def _are_exponents(exponents: Any, channels: int) -> bool:
    if not isinstance(exponents, list) or len(exponents) != channels:
        return False
    for exponent in exponents:
        if type(exponent) is not int or abs(exponent) > LARGEST_EXPONENT:
            return False
    return True


def _differences(first: Exponents, other: Exponents) -> Iterator[str]:
    """Yield a sentence if two calibrations have scaled channels differently."""
    if first != other:
        yield "their channels were levelled by different factors"


POWER_OF_TWO_EQUALIZATION = Decision(
    "levels",
    "the ranges of channels",
    decide=_decide,
    apply=_apply,
    check=_check,
    differences=_differences,
)
