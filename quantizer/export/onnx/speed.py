"""Measures how fast a file is against the same network in float, also with int8 weights."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from quantizer.export.onnx.lowering import MARK_DOMAIN
from quantizer.export.performance import MIN_ROUNDS, Speed, waited_seconds
from quantizer.option_words import Sentence

Feed = Mapping[str, NDArray[Any]]
"""The tensors of a call, of inputs or outputs, by name."""
Timer = Callable[[int], float]
"""Runs a network so many times and returns the seconds of one run, as their mean."""
# The threads of a session wait for its next run in a loop. Those of one session would slow
# the next session down, where a user has only one. With this entry they wait until a run ends.
_STOP_SPINNING = "session.force_spinning_stop"
# The float network is not run if its tensors have more bytes.
_MAX_FLOAT_BYTES = 2**30
# So many rounds, or as many as begin in this time.
_ROUNDS = 25
_ROUND_SECONDS = 1.0
# A measurement takes at least so many seconds, of at most so many runs.
_MIN_SECONDS = 0.02
_MAX_RUNS = 100
# By so much int8 weights have to be faster to be mentioned.
_FASTER = 1.1
# The difference between unsigned and signed codes of 8 bits: the highest bit.
_HIGHEST_BIT = np.uint8(128)


def float_model(model: ir.Model) -> bytes | None:
    """Return a translated network with marks without quantization; None if it is large."""
    values = [value.const_value for value in model.graph.initializers.values()]
    size = sum(value.nbytes for value in values if value is not None)
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
    file: bytes | str, floating: bytes, feed: Feed, *, with_int8: bytes | None = None
) -> Speed | None:
    """Return how fast a file is against the model `floating`; None if that is unknown.

    Both have one thread, whose processor time is measured. Other programs hardly change it,
    while they may double the time that passes.

    Args:
        file: the serialized model, or its place.
        floating: the network in float, serialized.
        feed: of the call that is measured.
        with_int8: the same file with int8 weights. If it is faster, its speed is returned, too.
    """
    models = [file, floating] if with_int8 is None else [file, floating, with_int8]
    timers: list[Timer] = []
    for model in models:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = cpu_session(model, options)
        timers.append(partial(mean_seconds, session, feed, clock=time.thread_time))
    speed, *others = speeds_in_turns(timers, waited=no_wait_counts)
    if speed is None:
        return None
    speed = replace(speed, threads=1)
    for other in others:
        if other is not None and other.is_clear and other.low > _FASTER * speed.ratio:
            return replace(speed, faster=(Sentence("<--onnx_weights int8>"), other))
    return speed


def no_wait_counts() -> float:
    """Return 0: a thread that waits for a processor uses none."""
    return 0.0


def cpu_session(
    model: bytes | str, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """Return a session that does not disturb the one that runs after it. What goes wrong is an
    exception.
    """
    options.log_severity_level = 4
    options.add_session_config_entry(_STOP_SPINNING, "1")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def speeds_in_turns(
    timers: Sequence[Timer],
    *,
    seconds: float = _ROUND_SECONDS,
    shortest: float = _MIN_SECONDS,
    waited: Callable[[], float] = waited_seconds,
) -> list[Speed | None]:
    """Return how fast the first network is against the second one, the float network, and so
    are the third and later ones; None for each that cannot be measured.

    All run in each round and take turns to be first, so that what slows the machine down slows
    all of them.

    Args:
        timers: of the networks.
        seconds: in which rounds begin.
        shortest: the seconds that a measurement takes at least, of at most 100 runs.
        waited: returns for how many seconds the threads that run the networks have waited for a
            processor until now.
    """
    runs = [_runs_at_once(timer, shortest) for timer in timers]
    times: list[list[float]] = [[] for _ in timers]
    order = list(range(len(timers)))
    waited_before = waited()
    start = time.perf_counter()
    for index in range(_ROUNDS):
        for which in order:
            if runs[which] > 1:
                # Wakes the threads of the session, and brings its tensors into the cache.
                timers[which](1)
            times[which].append(timers[which](runs[which]))
        order.reverse()
        if index + 1 >= MIN_ROUNDS and time.perf_counter() - start > seconds:
            break
    elapsed = time.perf_counter() - start
    share = (waited() - waited_before) / elapsed
    ours, floats, *others = times
    return [Speed.of(rounds, floats, waited=share) for rounds in (ours, *others)]


def _runs_at_once(timer: Timer, shortest: float) -> int:
    """Return how many runs make a measurement long enough for the clock and the scheduler."""
    # The first run prepares memory.
    timer(1)
    seconds = timer(1)
    return max(1, math.ceil(shortest / max(seconds, shortest / _MAX_RUNS)))


def mean_seconds(
    session: onnxruntime.InferenceSession,
    feed: Feed,
    runs: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of one run, as the mean of several.

    Args:
        clock: returns seconds, of the time that passes or of a processor.
    """
    start = clock()
    for _ in range(runs):
        session.run(None, feed)
    return (clock() - start) / runs


def with_int8_weights(model: ModelProto) -> bytes | None:
    """Return a model with int8 instead of uint8 weights, which computes the same.

    Returns None if it has none, if something else reads them, or if this processor does not
    multiply int8 weights right.
    """
    if not torch.cpu._is_vnni_supported():
        return None
    changed = deepcopy(model)
    tensors = {tensor.name: tensor for tensor in changed.graph.initializer}
    unsigned: set[str] = set()
    of_others: set[str] = set()
    for node in changed.graph.node:
        if not _dequantizes_uint8(node, tensors):
            of_others.update(node.input)
            continue
        codes_name, _, zero_point_name = node.input
        unsigned |= {codes_name, zero_point_name}
    if not unsigned or unsigned & of_others:
        return None
    for name in unsigned:
        tensor = tensors[name]
        codes = onnx.numpy_helper.to_array(tensor)
        # The highest bit changes: 128 becomes 0.
        flipped = codes ^ _HIGHEST_BIT
        signed = flipped.view(np.int8)
        tensor.CopyFrom(onnx.numpy_helper.from_array(signed, name))
    return bytes(changed.SerializeToString())


def _dequantizes_uint8(node: NodeProto, tensors: Mapping[str, TensorProto]) -> bool:
    """Return whether a node dequantizes a constant of uint8."""
    if node.op_type != "DequantizeLinear":
        return False
    codes = tensors.get(node.input[0])
    return codes is not None and codes.data_type == TensorProto.UINT8
