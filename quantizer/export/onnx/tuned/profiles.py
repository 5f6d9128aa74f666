"""Measures files in ONNX Runtime, whole in turns or kernel by kernel, and divides their nodes
into blocks. A block is one product and all nodes after it, up to the next product.

A product is a node that most of the time goes to: a convolution, a matrix product or a
recurrent layer. ONNX Runtime computes it in integers or in float, and what follows it with it.
A block has the name of its product.
"""

import platform
import re
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
from onnx import ModelProto, NodeProto

from quantizer.export.onnx.executed import (
    OPTIMIZER_SUFFIXES,
    kernel_events,
    key_of_node,
    profiled,
)
from quantizer.export.onnx.lowering import PRODUCTS
from quantizer.export.onnx.passes.moves import MOVE_OPERATORS
from quantizer.export.onnx.speed import (
    Feed,
    cpu_session,
    mean_seconds,
    no_wait_counts,
    speeds_in_turns,
)
from quantizer.export.performance import Speed, waited_seconds
from quantizer.plan.model import Key

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
    """Measures with ONNX Runtime.

    Args:
        threads: None for as many as torch has. The processor time of one thread is measured,
            the time that passes with several.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or torch.get_num_threads()
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        self.waited = no_wait_counts if threads == 1 else waited_seconds

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
            session = cpu_session(model, options)
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
        timers = [
            partial(mean_seconds, cpu_session(model, self._options()), feed, clock=self.clock)
            for model in (first, floating, *others)
        ]
        speeds = speeds_in_turns(
            timers,
            seconds=_SECONDS_FOR_EACH * len(timers),
            shortest=_SHORTEST,
            waited=self.waited,
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


START = ""
"""The name of the block before the first product."""
_PRODUCTS = (*PRODUCTS, "MatMulInteger", "MatMulNBits")
# What the export appends to a layer's name if its input is quantized row by row
_INTEGER_SUFFIX = re.compile(r"\.\d+\.MatMulInteger$")
# The optimizer puts them before a node that needs another layout, so they belong to its block
_BEFORE_READERS = ("Transpose", "ReorderInput")
# They hand on an activation, moved, converted or clipped
_PASSING = (*MOVE_OPERATORS, "Concat", "QuantizeLinear", "DequantizeLinear", "Clip", "Identity")


@dataclass(frozen=True)
class QuantizationPoint:
    """A place where a file quantizes an activation.

    Attributes:
        key: the layer and role of the activation.
        nodes: the names of the nodes that quantize it.
        block: the block that computes it.
        readers: the names of the nodes that read it, directly or after nodes that only move it.
    """

    key: Key
    nodes: frozenset[str]
    block: str
    readers: tuple[str, ...]


class BlockMap:
    """Finds the block of each node and each value of a file.

    A node belongs to the block of the last product that it depends on. A node that depends on
    constants alone belongs to the block that reads it.

    Args:
        model: the file before ONNX Runtime optimizes it. Its nodes are in order of computation.

    Attributes:
        nodes: of the file.
        names: of all blocks, in order of computation.
        block_of_node: the block of each node, by their names.
    """

    def __init__(self, model: ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.names = [START]
        self._position_of_block = {START: 0}
        self.block_of_node: dict[str, str] = {}
        self._block_of_value: dict[str, str] = {}
        for value in model.graph.input:
            self._block_of_value[value.name] = START
        for node in self.nodes:
            block = self._block_before(node)
            if block is None:
                continue
            if node.op_type in _PRODUCTS:
                # Without the suffix, several products of a layer may have one name
                block = _INTEGER_SUFFIX.sub("", node.name)
                self._position_of_block.setdefault(block, len(self.names))
                self.names.append(block)
            self._put(node, block)
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        # The nodes left depend on constants. From the last, so that their readers have a block
        for node in reversed(self.nodes):
            if node.name in self.block_of_node:
                continue
            block = START
            for reader in self._readers_of(node):
                block = self.block_of_node[reader.name]
            self._put(node, block)

    def _block_before(self, node: NodeProto) -> str | None:
        """Return the last of the blocks that a node reads from; None if it reads constants
        alone.
        """
        last = -1
        for name in node.input:
            block = self._block_of_value.get(name)
            if block is not None:
                last = max(last, self._position_of_block[block])
        if last < 0:
            return None
        return self.names[last]

    def _put(self, node: NodeProto, block: str) -> None:
        """Assign a node and its outputs to a block."""
        self.block_of_node[node.name] = block
        for name in node.output:
            self._block_of_value[name] = block

    def _readers_of(self, node: NodeProto) -> list[NodeProto]:
        """Return the nodes that read an output of a node."""
        return [reader for name in node.output for reader in self._readers.get(name, [])]

    def points(self, keys: Iterable[Key]) -> list[QuantizationPoint]:
        """Return the places where the file quantizes these activations.

        An activation that it does not quantize has none.
        """
        nodes_by_key: dict[Key, list[NodeProto]] = {key: [] for key in keys}
        for node in self.nodes:
            key = key_of_node(node.name)
            if key in nodes_by_key:
                nodes_by_key[key].append(node)
        points: list[QuantizationPoint] = []
        for key, nodes in nodes_by_key.items():
            if not nodes:
                continue
            names = frozenset(node.name for node in nodes)
            block = self.block_of_node[nodes[0].name]
            readers = self._final_readers(nodes)
            points.append(QuantizationPoint(key, names, block, readers))
        return points

    def _final_readers(self, nodes: Iterable[NodeProto]) -> tuple[str, ...]:
        """Return the names of the nodes that read outputs of `nodes`.

        After a node that only hands a value on, its readers follow.
        """
        readers: dict[str, None] = {}
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            for reader in self._readers_of(node):
                is_new = reader.name not in readers
                readers[reader.name] = None
                if is_new and reader.op_type in _PASSING:
                    waiting.append(reader)
        return tuple(readers)

    def seconds(self, profile: Profile, left_out: Iterable[Kernel] = ()) -> dict[str, float]:
        """Return the seconds that each block takes in a profile of this file.

        Args:
            profile: of the file.
            left_out: kernels that do not count.
        """
        blocks = self._blocks_of_optimized(profile)
        skipped = {kernel.name for kernel in left_out}
        seconds: dict[str, float] = {}
        for kernel in profile.kernels:
            if kernel.name not in skipped:
                block = blocks.get(kernel.name, START)
                seconds[block] = seconds.get(block, 0.0) + kernel.seconds
        return seconds

    def _blocks_of_optimized(self, profile: Profile) -> dict[str, str]:
        """Return the block of each node of the optimized graph, by the node's name.

        The optimizer merges and adds nodes. A merged node keeps the name of a node or of a
        value of the file. An added node belongs to the block before it, or to the one after it
        if it prepares an input.
        """
        nodes = list(profile.optimized.graph.node)
        blocks: dict[str, str] = {}
        block_of_value = dict(self._block_of_value)
        for node in nodes:
            block = self._kept_block(node)
            if block is None and node.op_type not in _BEFORE_READERS:
                for name in node.input:
                    block = block_of_value.get(name, block)
            if block is None:
                continue
            blocks[node.name] = block
            for name in node.output:
                block_of_value.setdefault(name, block)
        # The nodes left prepare an input. From the last, so that their readers have a block
        block_of_reader: dict[str, str] = {}
        for node in reversed(nodes):
            if node.name not in blocks:
                output = node.output[0]
                blocks[node.name] = block_of_reader.get(output, START)
            for name in node.input:
                block_of_reader[name] = blocks[node.name]
        return blocks

    def _kept_block(self, node: NodeProto) -> str | None:
        """Return the block of an optimized node; None if the file has neither its name nor the
        names of its outputs.
        """
        name = original_name(node.name)
        if name in self.block_of_node:
            return self.block_of_node[name]
        # A kernel that was merged from several nodes has the name of their last value
        for value in (name, *node.output):
            if value in self._block_of_value:
                return self._block_of_value[value]
        return None


def original_name(name: str) -> str:
    """Return the name of a node without what ONNX Runtime's optimizer appends.

    >>> original_name("conv2d_1_nchwc"), original_name("Net/conv_token_14")
    ('conv2d_1', 'Net/conv')
    """
    return OPTIMIZER_SUFFIXES.sub("", name)
