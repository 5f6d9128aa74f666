"""How fast a session is, against one of the same network in float."""

import math
import time
from collections.abc import Mapping
from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, helper

from quantizer.export.onnx.lowering import DOMAIN
from quantizer.export.speed import LEAST_ROUNDS, Speed

LARGEST = 2**30
"""Bytes of float tensors above which the network in float is not run."""
ROUNDS, SECONDS = 9, 1.0
"""So many rounds, or as many as begin in this time."""
SHORTEST, MOST_RUNS = 0.002, 100
"""Seconds that a measurement takes at least, of so many runs at most."""


def float_model(marked: ModelProto) -> bytes | None:
    """The network without quantization, of torch.onnx's translation with marks; None if it is
    large.
    """
    if sum(len(tensor.raw_data) for tensor in marked.graph.initializer) > LARGEST:
        return None
    model = ModelProto()
    model.CopyFrom(marked)
    for index, node in enumerate(marked.graph.node):
        if node.domain == DOMAIN:
            model.graph.node[index].CopyFrom(
                helper.make_node("Identity", node.input, node.output, name=node.name)
            )
    del model.graph.value_info[:]
    return bytes(model.SerializeToString())


def speed(
    session: onnxruntime.InferenceSession, floating: bytes, feed: Mapping[str, NDArray[Any]]
) -> Speed | None:
    """Return how fast `session` is against one of the model `floating`; None if it cannot be
    measured.

    Both run in each round and take turns to be first, so that what slows the machine down meets
    both.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    other = onnxruntime.InferenceSession(floating, options, providers=["CPUExecutionProvider"])
    sessions = (session, other)
    runs = [_runs_at_once(each, feed) for each in sessions]
    times: tuple[list[float], list[float]] = ([], [])
    begun = time.perf_counter()
    for index in range(ROUNDS):
        order = (0, 1) if index % 2 == 0 else (1, 0)
        for which in order:
            times[which].append(_seconds(sessions[which], feed, runs[which]))
        if index + 1 >= LEAST_ROUNDS and time.perf_counter() - begun > SECONDS:
            break
    return Speed.of(*times)


def _runs_at_once(
    session: onnxruntime.InferenceSession, feed: Mapping[str, NDArray[Any]]
) -> int:
    """How many runs make a measurement long enough for the clock and the scheduler."""
    # The first run prepares memory.
    session.run(None, feed)
    seconds = _seconds(session, feed, 1)
    return max(1, math.ceil(SHORTEST / max(seconds, SHORTEST / MOST_RUNS)))


def _seconds(
    session: onnxruntime.InferenceSession, feed: Mapping[str, NDArray[Any]], runs: int
) -> float:
    """Of one run, as the mean of several."""
    start = time.perf_counter()
    for _ in range(runs):
        session.run(None, feed)
    return (time.perf_counter() - start) / runs
