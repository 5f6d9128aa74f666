"""Decides after calibration which joins have one scale for all their parts, and which leave each part its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from quantizer.engine.calibrate import Calibration
from quantizer.observers import Observer
from quantizer.plan import joins
from quantizer.plan.joins import decide
from quantizer.plan.model import JoinDecision, JoinPlan, Key

def decided(calibration: Calibration) -> tuple[Calibration, dict[str, JoinDecision]]:
    """Return the calibration with a plan that has no open joins, and what was decided of each.

    What was observed of tensors that the plan does without stays, for whoever decides anew.
    """
    decisions: dict[str, JoinDecision] = {}
    for join in calibration.plan.joins:
        decisions[join.name] = decide(join, lost_bits(join, calibration.observers))
    plan = joins.decided(calibration.plan, decisions)
    return replace(calibration, plan=plan), decisions


def lost_bits(join: JoinPlan, observers: Mapping[Key, Observer]) -> dict[str, float]:
    """Return the base-2 logarithm of how much wider the range of the whole is, by the layer that makes a part.

    Formats with an exponent lose nothing, and neither do parts that are all zero.
    """
    whole = observers[join.single or join.inputs[0]]
    lost: dict[str, float] = {}
    for key in join.sources:
        part = observers.get(key)
        if part is None or whole.spec.dtype != "int" or part.spec.dtype != "int":
            continue
        is_zero = not bool((part.low != 0).any() or (part.high != 0).any())
        if not is_zero:
            lost[key[0]] = round(max(0.0, math.log2(_width(whole) / _width(part))), 3)
    return lost


def _width(observer: Observer) -> float:
    """How wide the range of all codes is, of the widest channel."""
    return float(observer.qparams().scale.max()) * 2.0**observer.spec.bit_width
