"""Write and read the traced graph of a result folder: graph.json, and graph.safetensors with
the tensors that the code of the model has as constants.
"""

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from quantizer.graph.ir import Graph
from quantizer.graph.stored import StoredGraph, graph_from_json, graph_to_json
from quantizer.results.folder import CONSTANTS_FILE, GRAPH_FILE, OpenedResults
from quantizer.results.graph_checks import check_graph, operator_fault
from quantizer.results.validation import checked_json
from quantizer.storage.files import (
    damaged,
    json_parts,
    read_tensors,
    write_bytes,
    write_tensors,
)

_logger = logging.getLogger(__name__)


def write_graph(folder: Path, graph: Graph) -> dict[str, str]:
    """Write a traced graph, and return the sha256 of each file by its name.

    A graph that `read_graph` would refuse is not written. Its model is traced again instead.
    """
    constants = {path: graph.tensors[path] for path in graph.constants}
    faults = [operator_fault(node) for node in graph.nodes]
    if any(tensor.is_complex() for tensor in constants.values()):
        faults.append("a constant holds complex numbers")
    try:
        content = graph_to_json(graph)
    except TypeError as error:
        faults.append(str(error))
    for fault in filter(None, faults):
        _logger.debug("the graph of %s is not stored: %s", graph.model, fault)
        return {}
    # Not sorted: the order of keys is the order of an operator's arguments
    digests = {
        GRAPH_FILE: write_bytes(folder / GRAPH_FILE, json_parts(content, sort_keys=False))
    }
    if constants:
        digests[CONSTANTS_FILE] = write_tensors(folder / CONSTANTS_FILE, constants)
    return digests


def read_graph(opened: OpenedResults) -> tuple[StoredGraph, Mapping[str, Tensor]] | None:
    """Return the graph of a calibration and its constants, or None if there is no graph.

    Raises:
        ResultError: a file is damaged, or holds what tracing cannot have written.
    """
    if GRAPH_FILE not in opened.files:
        return None
    file = opened.files[GRAPH_FILE]
    content = checked_json(file)
    try:
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
    check_graph(stored, opened.header, file.path)
    if not stored.graph.constants:
        return stored, {}
    constants = read_tensors(opened.files[CONSTANTS_FILE])
    if constants.keys() != set(stored.graph.constants):
        raise damaged(
            opened.files[CONSTANTS_FILE].path, "names", f"they are not those of {GRAPH_FILE}"
        )
    return stored, constants
