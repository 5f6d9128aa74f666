"""Measures how fast a session is against one of the same network in float."""

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from quantizer.export.onnx.marks import MARK_DOMAIN
from quantizer.export.speed import MIN_ROUNDS, Speed

Timer = Callable[[int], float]
"""Runs a network so many times and returns the seconds of one run, as their mean."""
# The float network is not run if its tensors have more bytes.
_MAX_FLOAT_BYTES = 2**30
# So many rounds, or as many as begin in this time.
_ROUNDS = 9
_ROUND_SECONDS = 1.0
# A measurement takes at least so many seconds, of at most so many runs.
_MIN_SECONDS = 0.002
_MAX_RUNS = 100


def float_model(
    model: ir.Model,
) -> bytes | None:
    """Return a translated network with marks without quantization; None if it is large."""
    size = 0
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            size += value.const_value.nbytes
    if size > _MAX_FLOAT_BYTES:
        return None
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        if node.domain == MARK_DOMAIN:
            identity = onnx.helper.make_node("Identity", node.input, node.output, node.name)
            node.CopyFrom(identity)
    del proto.graph.value_info[:]
    return bytes(proto.SerializeToString())


def measured_speed(
    session: onnxruntime.InferenceSession,
    floating: bytes,
    feed: Mapping[str, NDArray[Any]],
) -> Speed | None:
    """Return how fast `session` is against the model `floating`; None if that is unknown."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    other = onnxruntime.InferenceSession(floating, options, providers=["CPUExecutionProvider"])
    timers = [partial(_seconds, session, feed), partial(_seconds, other, feed)]
    return speed_in_turns(*timers)


def speed_in_turns(
    ours: Timer,
    floats: Timer,
) -> Speed | None:
    """Return how fast one network is against another; None if it cannot be measured.

    Both run in each round and take turns to be first, so that what slows the machine down slows
    both.
    """
    timers = (ours, floats)
    runs = [_runs_at_once(timer) for timer in timers]
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    for index in range(_ROUNDS):
        order = (0, 1) if index % 2 == 0 else (1, 0)
        for which in order:
            times[which].append(timers[which](runs[which]))
        if index + 1 >= MIN_ROUNDS and time.perf_counter() - start > _ROUND_SECONDS:
            break
    return Speed.of(*times)


def _runs_at_once(
    timer: Timer,
) -> int:
    """Return how many runs make a measurement long enough for the clock and the scheduler."""
    # The first run prepares memory.
    timer(1)
    seconds = timer(1)
    return max(1, math.ceil(_MIN_SECONDS / max(seconds, _MIN_SECONDS / _MAX_RUNS)))


def _seconds(
    session: onnxruntime.InferenceSession,
    feed: Mapping[str, NDArray[Any]],
    runs: int,
) -> float:
    """Return the seconds of one run, as the mean of several."""
    start = time.perf_counter()
    for _ in range(runs):
        session.run(None, feed)
    return (time.perf_counter() - start) / runs
