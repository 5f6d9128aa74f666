"""Measures files in ONNX Runtime: kernel by kernel with its profiler, or whole, in turns."""

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import ModelProto

from quantizer.export.onnx.executed import kernel_events, profiled
from quantizer.export.onnx.speed import mean_seconds, speeds_in_turns, timed_session
from quantizer.export.speed import Speed

Feed = Mapping[str, NDArray[Any]]
"""Inputs of a file by name."""
# A profile has at least so many runs, and more as long as they fit in these seconds.
_MIN_RUNS = 5
_MAX_PROFILED_RUNS = 50
_PROFILE_SECONDS = 1.0
# Files are compared in rounds for so many seconds, for each file.
_SECONDS_FOR_EACH = 1.5
# A round of a file takes at least so many seconds, so that short disturbances hardly count.
_SHORTEST = 0.02


@dataclass(frozen=True)
class Kernel:
    """A kernel that a session ran.

    Attributes:
        name: of the node in the optimized graph.
        seconds: of its fastest run.
        elements: of its first output.
    """

    name: str
    op_type: str
    seconds: float
    elements: int


@dataclass(frozen=True)
class Profile:
    """The kernels of a session, and the graph that the optimizer made for it."""

    optimized: ModelProto
    kernels: tuple[Kernel, ...]

    @property
    def seconds(self) -> float:
        """Return the time of all kernels."""
        return sum(kernel.seconds for kernel in self.kernels)


class RuntimeMeter:
    """Measures with ONNX Runtime, on as many threads as torch has."""

    def __init__(self) -> None:
        self.threads = torch.get_num_threads()

    @property
    def conditions(self) -> Mapping[str, Any]:
        """Return what the times hold for."""
        return {
            "runtime": f"ONNX Runtime {onnxruntime.__version__}",
            "processor": _processor(),
            "threads": self.threads,
            "vnni": torch.cpu._is_vnni_supported(),
        }

    def _options(self) -> onnxruntime.SessionOptions:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        return options

    def profile(self, model: bytes, feed: Feed) -> Profile:
        """Return the time of each kernel in its fastest run."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            options = self._options()
            profiled(options, name)
            optimized = folder / "optimized.onnx"
            options.optimized_model_filepath = str(optimized)
            session = timed_session(model, options)
            start = time.perf_counter()
            for index in range(_MAX_PROFILED_RUNS):
                is_long = time.perf_counter() - start > _PROFILE_SECONDS
                if is_long and index >= _MIN_RUNS:
                    break
                session.run(None, feed)
            return Profile(onnx.load(optimized), _fastest(kernel_events(session)))

    def speeds(self, models: Sequence[bytes], floating: bytes, feed: Feed) -> list[Speed]:
        """Return the speed of each model against the float network, measured in turns."""
        first, *others = models
        sessions = []
        for model in (first, floating, *others):
            sessions.append(timed_session(model, self._options()))
        timers = [partial(mean_seconds, session, feed) for session in sessions]
        speeds = speeds_in_turns(
            timers, seconds=_SECONDS_FOR_EACH * len(timers), shortest=_SHORTEST
        )
        return [speed for speed in speeds if speed is not None]


def _fastest(events: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[Kernel, ...]:
    """Return the kernels of a profile, each with its fastest run."""
    kernels: dict[str, Kernel] = {}
    for name, event in events:
        # The profiler counts microseconds
        seconds = event["dur"] / 1e6
        if name in kernels and kernels[name].seconds <= seconds:
            continue
        elements = 0
        for shapes in event["args"].get("output_type_shape", ())[:1]:
            for shape in shapes.values():
                elements = prod(shape)
        kernels[name] = Kernel(name, event["args"]["op_name"], seconds, elements)
    return tuple(kernels.values())


def _processor() -> str:
    """Return the name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        word, _, value = line.partition(":")
        if word.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
