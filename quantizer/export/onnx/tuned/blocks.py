"""Divides the nodes of a file into blocks: a product and what follows it, up to the next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from onnx import ModelProto, NodeProto

from quantizer.export.onnx.marks import MULTIPLYING
from quantizer.export.onnx.passes.moves import MOVE_OPERATORS
from quantizer.export.onnx.tuned.meter import Kernel, Profile
from quantizer.plan.model import Key

START = ""
"""The block of what comes before the first product."""
_PRODUCTS = (*MULTIPLYING, "MatMulInteger", "MatMulNBits", "LSTM", "GRU", "RNN")
# What the package and ONNX Runtime's optimizer append to the name of a layer.
_ROW_CODES = re.compile(r"\.\d+\.MatMulInteger$")
_OF_OPTIMIZER = re.compile(r"(_nchwc|_nhwc|_token_\d+)+$")
# The optimizer puts them before what needs another layout.
_BEFORE_READERS = ("Transpose", "ReorderInput")
_PASSING = (*MOVE_OPERATORS, "Concat", "QuantizeLinear", "DequantizeLinear", "Clip", "Identity")


@dataclass(frozen=True)
class Point:
    """A place where a file quantizes an activation.

    Attributes:
        nodes: the names of the nodes that do it.
        block: of the value.
        readers: the names of nodes that read it, perhaps after it was moved.
    """

    key: Key
    nodes: frozenset[str]
    block: str
    readers: tuple[str, ...]


class BlockMap:
    """The blocks of a file, by node and by value.

    A node belongs to the block of the last product that it depends on. What depends on
    constants alone belongs to the block that reads it.

    Attributes:
        names: of all blocks, in order.
    """

    def __init__(
        self,
        model: ModelProto,
    ) -> None:
        self.nodes = list(model.graph.node)
        self.names = [START]
        self._places = {START: 0}
        self._block_of_node: dict[str, str] = {}
        self._block_of_value: dict[str, str] = {}
        for value in model.graph.input:
            self._block_of_value[value.name] = START
        for node in self.nodes:
            block = self._block_before(node)
            if block is None:
                continue
            if node.op_type in _PRODUCTS:
                block = _ROW_CODES.sub("", node.name)
                self._places.setdefault(block, len(self.names))
                self.names.append(block)
            self._put(node, block)
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        for node in reversed(self.nodes):
            if node.name in self._block_of_node:
                continue
            block = START
            for reader in self._readers_of(node):
                block = self._block_of_node[reader.name]
            self._put(node, block)

    def _block_before(
        self,
        node: NodeProto,
    ) -> str | None:
        """Return the last block that a node reads from; None if it reads constants alone."""
        last = -1
        for name in node.input:
            block = self._block_of_value.get(name)
            if block is not None:
                last = max(last, self._places[block])
        if last < 0:
            return None
        return self.names[last]

    def _put(
        self,
        node: NodeProto,
        block: str,
    ) -> None:
        self._block_of_node[node.name] = block
        for name in node.output:
            self._block_of_value[name] = block

    def _readers_of(
        self,
        node: NodeProto,
    ) -> list[NodeProto]:
        readers: list[NodeProto] = []
        for name in node.output:
            readers += self._readers.get(name, [])
        return readers

    def points(
        self,
        keys: Iterable[Key],
    ) -> list[Point]:
        """Return the places where activations are quantized."""
        nodes_by_key: dict[Key, list[NodeProto]] = {}
        for key in keys:
            nodes_by_key[key] = []
        for node in self.nodes:
            key_or_none = key_of_node(node.name)
            if key_or_none in nodes_by_key:
                nodes_by_key[key_or_none].append(node)
        points: list[Point] = []
        for key, nodes in nodes_by_key.items():
            if not nodes:
                continue
            names = frozenset(node.name for node in nodes)
            block = self._block_of_node[nodes[0].name]
            readers = self._final_readers(nodes)
            points.append(Point(key, names, block, readers))
        return points

    def _final_readers(
        self,
        nodes: Iterable[NodeProto],
    ) -> tuple[str, ...]:
        """Return the nodes that read values of nodes, past those that only move them."""
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

    def block_of_node(
        self,
        name: str,
    ) -> str:
        """Return the block of a node of the file."""
        return self._block_of_node[name]

    def blocks_of(
        self,
        profile: Profile,
    ) -> dict[str, str]:
        """Return the block of each node of the optimized graph.

        It keeps the name of a node, or the name of a value. What the optimizer added belongs to
        the block that needs it.
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
        block_of_reader: dict[str, str] = {}
        for node in reversed(nodes):
            if node.name not in blocks:
                output = node.output[0]
                blocks[node.name] = block_of_reader.get(output, START)
            for name in node.input:
                block_of_reader[name] = blocks[node.name]
        return blocks

    def _kept_block(
        self,
        node: NodeProto,
    ) -> str | None:
        """Return the block of a node whose name, or that of its value, is known."""
        name = own_name(node.name)
        if name in self._block_of_node:
            return self._block_of_node[name]
        # A kernel of several operators has the name of the last value
        for value in (name, *node.output):
            if value in self._block_of_value:
                return self._block_of_value[value]
        return None


def own_name(name: str) -> str:
    """Return the name of a node without what ONNX Runtime's optimizer appends.

    >>> own_name("conv2d_1_nchwc"), own_name("Net/conv_token_14")
    ('conv2d_1', 'Net/conv')
    """
    return _OF_OPTIMIZER.sub("", name)


def key_of_node(name: str) -> Key | None:
    """Return the activation that a node quantizes; its name is `<layer>.<role>.<n>.<type>`."""
    parts = name.rsplit(".", 3)
    if len(parts) < 4:
        return None
    return parts[0], parts[1]


def seconds_by_block(
    profile: Profile,
    blocks: Mapping[str, str],
    left_out: Iterable[Kernel] = (),
) -> dict[str, float]:
    """Return the time of each block, without some kernels."""
    skipped = {kernel.name for kernel in left_out}
    seconds: dict[str, float] = {}
    for kernel in profile.kernels:
        if kernel.name not in skipped:
            block = blocks.get(kernel.name, START)
            seconds[block] = seconds.get(block, 0.0) + kernel.seconds
    return seconds
