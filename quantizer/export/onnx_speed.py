"""How fast a session is, against one of the same network in float."""

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, helper

from quantizer.export.onnx_lowering import DOMAIN

LARGEST = 2**30
"""Bytes of float tensors above which the network in float is not run."""
ROUNDS, SECONDS = 7, 1.0
"""Each is run so often, or until so much time has gone."""


def float_model(marked: ModelProto) -> bytes | None:
    """The network without quantization, of torch.onnx's translation with marks; None if it is large."""
    if sum(len(tensor.raw_data) for tensor in marked.graph.initializer) > LARGEST:
        return None
    model = ModelProto()
    model.CopyFrom(marked)
    for index, node in enumerate(marked.graph.node):
        if node.domain == DOMAIN:
            model.graph.node[index].CopyFrom(helper.make_node("Identity", node.input, node.output, name=node.name))
    del model.graph.value_info[:]
    return bytes(model.SerializeToString())


def speed(session: onnxruntime.InferenceSession, floating: bytes, feed: Mapping[str, NDArray[Any]]) -> float:
    """How many times as fast `session` is as one of the model `floating`, by medians of runs in turn."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    sessions = session, onnxruntime.InferenceSession(floating, options, providers=["CPUExecutionProvider"])
    times: tuple[list[float], list[float]] = [], []
    begun = time.perf_counter()
    for index in range(ROUNDS + 1):
        for each, spent in zip(sessions, times, strict=True):
            start = time.perf_counter()
            each.run(None, feed)
            if index:  # the first prepares memory
                spent.append(time.perf_counter() - start)
        if index and time.perf_counter() - begun > SECONDS:
            break
    ours, floats = map(median, times)
    return floats / ours
