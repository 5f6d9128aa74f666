"""Trace a model, and write and read its graph in a result folder: graph.json, and
graph.safetensors with the tensors that the code of the model has as constants. A model of the
same code gets this graph without another trace.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.calibration import fingerprint
from quantizer.calibration.faithful import compare_with_model
from quantizer.config.wording import listed
from quantizer.errors import DAMAGE_ERRORS, DataError, ModelError, ResultError
from quantizer.graph.ir import Graph, Node, references
from quantizer.graph.names import Namer
from quantizer.graph.stored import (
    StoredGraph,
    graph_from_json,
    graph_to_json,
    short_class,
    with_output,
)
from quantizer.graph.tracing.batch_axes import has_open_batch
from quantizer.nn.network import inputs_of
from quantizer.results.folder import CONSTANTS_FILE, GRAPH_FILE, OpenedResults
from quantizer.results.graph_checks import check_graph, faults_of_graph
from quantizer.results.model_code import model_code
from quantizer.results.validation import checked_json
from quantizer.sources.arguments import with_batch_size
from quantizer.sources.batches import Batch
from quantizer.sources.models import materialize_lazy_layers
from quantizer.sources.module_state import preserve_module_state
from quantizer.storage.files import (
    damaged,
    json_parts,
    read_tensors,
    write_bytes,
    write_tensors,
)

_logger = logging.getLogger(__name__)

_SAMPLES_OF_EXAMPLE = 2
"""More than one: a trace would take a batch size of 1 for fixed."""
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
    except DAMAGE_ERRORS as error:
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


def trace_module(
    module: nn.Module,
    batch: Batch,
    *,
    compared: bool = False,
    sizes: Sequence[str] = (),
    fixed: bool = False,
) -> Graph:
    """Return the graph of a module. Lazy layers get their shapes first.

    If the module computes something else for some numbers of samples, only batches of this size
    can run.

    Args:
        module: the user's model.
        batch: the inputs to trace it on.
        compared: whether to check that graph and module have the same outputs.
        sizes: of the inputs that stay dynamic, besides batch and tokens; see `AXES`.
        fixed: whether the number of samples is that of the batch.

    Raises:
        ModelError: it cannot be traced, or the graph computes something else.
        DataError: it cannot run on the batch at all.
    """
    # This imports torch.export, which is slow. Commands that reuse a stored graph do not need
    # it
    from quantizer.graph.tracing.trace import trace

    materialize_lazy_layers(module, batch)
    with preserve_module_state(module):
        try:
            graph = trace(module, batch.args, batch.kwargs, sizes, fixed=fixed)
        except ModelError:
            # Few models need it
            from quantizer.sources.first_batch import try_first_batch

            try_first_batch(module, batch)
            raise
    if graph.output is None:
        raise ModelError(
            f"{graph.model} returns None", help="end forward() with `return` and the outputs"
        )
    differing = compare_with_model(module, graph, batch, twice=compared)
    if differing:
        _logger.warning(
            "%s computes something else for batches of %s than for others: its batch size is "
            "fixed at %d, and only such batches can run",
            graph.model,
            listed(differing),
            batch.size,
        )
        return trace_module(module, batch, compared=compared, sizes=sizes, fixed=True)
    code = model_code(module, graph, batch)
    if code is None:
        return graph
    return graph.replaced(code=code.digest)


def reuse_or_trace(module: nn.Module, batch: Batch, info: OpenedResults) -> Graph:
    """Return the graph of a calibrated model: the stored graph if the code of the model is what
    calibration has traced, else the graph of a new trace.

    Raises:
        ModelError: the model cannot be traced.
        DataError: the model cannot run on the batch.
        ResultError: the stored graph is damaged, or the model returns something else than the
            calibrated one.
    """
    file = read_graph(info)
    if file is None:
        return trace_module(module, batch)
    materialize_lazy_layers(module, batch)
    graph = bound_graph(file, module, batch)
    if graph is not None:
        return graph
    stored = file.stored.graph
    sizes: dict[str, None] = {}
    for length in stored.lengths:
        if length.is_asked_for:
            sizes[length.noun] = None
    is_fixed = not has_open_batch(stored)
    graph = trace_module(module, batch, sizes=list(sizes), fixed=is_fixed)
    _check_output(info, stored, graph)
    return graph


def _check_output(info: OpenedResults, stored: Graph, original: Graph) -> None:
    """Check that a model with the calibrated layers returns the same layers in the same order.

    Args:
        info: the calibration.
        stored: its graph.
        original: the graph of the model.

    Raises:
        ResultError: it returns the values of other layers, or in another order.
    """
    if info.header["layers"] != fingerprint.layer_digests(original):
        # `check_model` names the layer
        return
    before = references(stored.output)
    now = references(original.output)
    for layer, present in zip_longest(before, now, fillvalue="nothing"):
        if layer != present:
            raise ResultError(
                f"the model is not the calibrated one: it returns {present} where it returned "
                f"{layer}",
                help="calibrate this model first",
            )


def example_batch(header: Mapping[str, Any]) -> Batch:
    """Return a batch of two samples of zeros, with the shapes and dtypes that a model was
    calibrated with.

    Args:
        header: of quant_info.json. Its `call` has the path of each input in the arguments: 0
            and an index, or 1 and a name, then the keys of nested containers.

    Raises:
        ResultError: quant_info.json does not say how the model is called.
    """
    shapes = header["inputs"]
    call_paths = header.get("call", ())
    inputs = list(zip(shapes, call_paths, strict=False))
    if not inputs or any(shape is None for shape, _ in inputs):
        help_ = "give data: a batch to trace the model on"
        raise ResultError("the results do not say how the model is called", help=help_)
    # Positional arguments are under 0, keyword arguments under 1
    roots: dict[Any, Any] = {0: {}, 1: {}}
    for shape, (path, dtype) in inputs:
        parent = roots
        for key in path[:-1]:
            parent = parent.setdefault(key, {})
        sizes = with_batch_size(shape, _SAMPLES_OF_EXAMPLE)
        parent[path[-1]] = torch.zeros(sizes, dtype=getattr(torch, dtype))
    args = _with_tuples(roots[0])
    # Without keyword arguments, it is an empty tuple
    kwargs = dict(_with_tuples(roots[1]))
    return Batch(args, kwargs, target=None, raw=None)


def _with_tuples(value: Any) -> Any:
    """Return nested dicts, with a tuple instead of each dict whose keys are indices."""
    if not isinstance(value, dict):
        return value
    items = {}
    for key, item in value.items():
        items[key] = _with_tuples(item)
    if all(isinstance(key, int) for key in items):
        return tuple(items.values())
    return items
