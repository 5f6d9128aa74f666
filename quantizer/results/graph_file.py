"""Write and read the traced graph of a result folder: graph.json, and graph.safetensors with
the tensors that the code of the model has as constants. Bind it to a model of the same code.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from quantizer.calibration import fingerprint
from quantizer.errors import DataError
from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import Namer
from quantizer.graph.stored import (
    StoredGraph,
    graph_from_json,
    graph_to_json,
    short_class,
    with_output,
)
from quantizer.nn.network import inputs_of
from quantizer.results.folder import CONSTANTS_FILE, GRAPH_FILE, OpenedResults
from quantizer.results.graph_checks import check_graph, faults_of_graph
from quantizer.results.model_code import model_code
from quantizer.results.validation import checked_json
from quantizer.sources.batches import Batch
from quantizer.storage.files import (
    damaged,
    json_parts,
    read_tensors,
    write_bytes,
    write_tensors,
)

_logger = logging.getLogger(__name__)

_SEAL = "traced_code"
"""The key of what `GraphFile.is_of` compares. Earlier versions wrote another one."""


@dataclass(frozen=True)
class GraphFile:
    """The graph in a result folder.

    Attributes:
        stored: the graph.
        constants: the tensors that only the code of the model holds, by path.
        seal: identifies the graph and the code that was traced; empty if the file has none.
        content: the digest of the graph and its constants.
    """

    stored: StoredGraph
    constants: Mapping[str, Tensor]
    seal: str
    content: str

    def is_of(self, code: str) -> bool:
        """Return whether calibration has traced this graph from code with this digest.

        Who edits the graph cannot write the seal without the code.
        """
        return self.seal == _seal(code, self.content)


def write_graph(folder: Path, graph: Graph) -> dict[str, str]:
    """Write a traced graph, and return the sha256 of each file by its name.

    A graph that `read_graph` would refuse is not written. Its model is traced again instead.
    """
    constants = {path: graph.tensors[path] for path in graph.constants}
    try:
        content = graph_to_json(graph)
        _check_storable(content, constants)
    except (TypeError, ValueError) as error:
        _logger.debug("the graph of %s is not stored: %s", graph.model, error)
        return {}
    if graph.code:
        content[_SEAL] = _seal(graph.code, _content_digest(content, constants))
    # Not sorted: the order of keys is the order of an operator's arguments
    digests = {
        GRAPH_FILE: write_bytes(folder / GRAPH_FILE, json_parts(content, sort_keys=False))
    }
    if constants:
        digests[CONSTANTS_FILE] = write_tensors(folder / CONSTANTS_FILE, constants)
    return digests


def _check_storable(content: Mapping[str, Any], constants: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` if a graph in JSON has something that no stored graph may have."""
    if any(tensor.is_complex() for tensor in constants.values()):
        raise ValueError("a constant holds complex numbers")
    for place, why in faults_of_graph(graph_from_json(content)):
        raise ValueError(f"{place}: {why}")


def _seal(code: str, content: str) -> str:
    """Return what identifies a graph and the code that it was traced from."""
    return hashlib.sha256(f"{code} {content}".encode()).hexdigest()


def _content_digest(content: Mapping[str, Any], constants: Mapping[str, Tensor]) -> str:
    """Return the digest of a graph in JSON and its constants."""
    values: dict[str, str] = {}
    for path, tensor in constants.items():
        values[path] = fingerprint.tensor_digest(tensor)
    return fingerprint.value_digest([content, values])


def read_graph(opened: OpenedResults) -> GraphFile | None:
    """Return the graph of a calibration and its constants, or None if there is no graph.

    Raises:
        ResultError: a file is damaged, or holds what tracing cannot have written.
    """
    if GRAPH_FILE not in opened.files:
        return None
    file = opened.files[GRAPH_FILE]
    content = checked_json(file)
    try:
        seal = content.pop(_SEAL, "")
        stored = graph_from_json(content)
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise damaged(file.path, "a value", f"{type(error).__name__}: {error}") from error
    # Without a seal no operator of it runs, and earlier versions took others
    if seal:
        check_graph(stored, opened.header, file.path)
    constants: Mapping[str, Tensor] = {}
    if stored.graph.constants:
        constants = read_tensors(opened.files[CONSTANTS_FILE])
    if constants.keys() != set(stored.graph.constants):
        raise damaged(
            opened.files[CONSTANTS_FILE].path, "names", f"they are not those of {GRAPH_FILE}"
        )
    return GraphFile(stored, constants, seal, _content_digest(content, constants))


def bound_graph(file: GraphFile, module: nn.Module, batch: Batch) -> Graph | None:
    """Return the stored graph with the tensors of a module.

    Return None if the code of the module is not the traced one, or if the graph does not take
    the batch.
    """
    graph = file.stored.bound(module, file.constants)
    if graph is None or not file.seal:
        return None
    try:
        graph = _with_classes(graph, module)
        inputs_of(graph, batch.args, batch.kwargs)
    except (DataError, LookupError, ValueError) as error:
        _logger.debug("the stored graph is not used: %s", error)
        return None
    code = model_code(module, graph, batch)
    if code is None or not file.is_of(code.digest):
        _logger.debug("the stored graph is not used: its code is not that of the model")
        return None
    if code.output.num_leaves != len(graph.output):
        return None
    return with_output(graph, graph.output, code.output).replaced(code=code.digest)


def _with_classes(graph: Graph, module: nn.Module) -> Graph:
    """Return the graph with the full class names of the modules instead of short ones.

    Raises:
        ValueError: a node was traced in a module of another class.
        LookupError: there is no such module.
    """
    namer = Namer(module)
    if namer.model != graph.model:
        raise ValueError(f"the model is {namer.model}")
    nodes: list[Node] = []
    for node in graph.nodes:
        classes = node.classes
        if classes:
            classes = namer.classes(node.scope)
        if tuple(map(short_class, classes)) != node.classes:
            raise ValueError(f"{node.name} is in another module")
        nodes.append(replace(node, classes=classes))
    return graph.replaced(nodes=tuple(nodes))
