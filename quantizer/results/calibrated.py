"""Build a calibrated network beside the float one, from the pipeline or from a result folder.
Test mode runs both.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.calibration import absorption
from quantizer.calibration.faithful import compare_with_model
from quantizer.calibration.fingerprint import input_shapes
from quantizer.calibration.fits_model import (
    check_absorption,
    check_insertions,
    check_levels,
    check_solution,
)
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.document.document import Document
from quantizer.config.dpu_accuracy import LEVELS, with_dpu_accuracy
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.json_types import JsonMapping
from quantizer.config.load import check_document, default_config
from quantizer.config.model import Config, Settings
from quantizer.config.roles import is_parameter
from quantizer.errors import DataError, ModelError, ResultError
from quantizer.graph.edits import inserted, with_weights
from quantizer.graph.ir import Graph, Node
from quantizer.graph.output_parts import Output, parts_named_as
from quantizer.graph.parameters import placed
from quantizer.graph.passes import for_device, run_passes
from quantizer.nn.network import Network
from quantizer.results.folder import RESOLVED, OpenedResults, QuantInfo
from quantizer.results.graph_file import read_graph
from quantizer.results.reused_graph import reused_graph
from quantizer.results.same_calibration import check_model
from quantizer.sources.batches import Batch
from quantizer.sources.first_batch import try_first_batch
from quantizer.sources.models import materialize
from quantizer.sources.module_state import left_alone
from quantizer.storage.files import read_json

_logger = logging.getLogger(__name__)

_Shapes = Sequence[Sequence[int | None] | None]
"""The shapes of inputs; None for a batch size, and for an input that is no tensor."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Calibrated:
    """A calibrated network, and the graphs that it is compared with.

    Args:
        original: the graph of the model as traced.
        settings: those of the calibration.
        solution: how each tensor is quantized.
        config: the whole config, as config.resolved.json has it.
    """

    original: Graph
    settings: Settings
    solution: Solution
    config: JsonMapping = field(default_factory=dict)

    def with_solution(self, solution: Solution) -> "Calibrated":
        """Return another solution for the same network. Both share the weights."""
        other = replace(self, solution=solution)
        vars(other)["passed"] = self.passed
        return other

    @cached_property
    def graph(self) -> Graph:
        """Return the planned graph, with the layers that algorithms inserted."""
        graph = inserted(self.passed, self.solution.insertions)
        # A scale for each position holds for one length only.
        if _has_scales_of_positions(graph, self.solution):
            return graph.replaced(lengths=())
        return graph

    @cached_property
    def float_graph(self) -> Graph:
        """Return the float graph that `graph` is compared with node by node: without passes for
        a device, and rescaled as `graph` is.
        """
        if not for_device(self.settings):
            return self.float_as_run
        refused = absorption.refused(self.solution.absorption)
        passed = run_passes(self.original, self.settings, device=False, refused=refused)
        graph = inserted(passed, self.solution.insertions)
        return with_weights(graph, self.solution.rescaled)

    @cached_property
    def float_as_run(self) -> Graph:
        """Return the float graph with all passes, those for a device included."""
        graph = inserted(self.passed, self.solution.insertions)
        return with_weights(graph, self.solution.rescaled)

    @cached_property
    def user_graph(self) -> Graph | None:
        """Return the model as traced, with whose outputs those of the network are compared;
        None if `float_graph` computes the same.
        """
        if self.float_graph.deviations:
            return self.original
        return None

    @cached_property
    def passed(self) -> Graph:
        """Return the model's graph after all passes. The quantized and the float graph share it
        unless a pass is for a device.
        """
        refused = absorption.refused(self.solution.absorption)
        return run_passes(self.original, self.settings, refused=refused)

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """Return the outputs that are compared, by the names of the user's model."""
        return parts_named_as(self.user_graph or self.float_graph, self.original)

    def network(self) -> Network:
        """Return a new instance of the quantized network."""
        network = quantized_network(self.graph, self.solution)
        return placed(network, self.original.device)


def traced(module: nn.Module, batch: Batch, *, compared: bool = False) -> Graph:
    """Return the module's graph. Lazy layers get their shapes.

    Args:
        module: the user's model.
        batch: the inputs to trace it on.
        compared: whether the graph's outputs are compared with the module's.

    Raises:
        ModelError: it cannot be traced, or the graph computes something else.
        DataError: it cannot run on the batch at all.
    """
    # It imports torch.export, and whoever reads results has a graph already
    from quantizer.graph.trace import trace

    materialize(module, batch)
    with left_alone(module):
        try:
            graph = trace(module, batch.args, batch.kwargs)
        except ModelError:
            try_first_batch(module, batch)
            raise
    if compared:
        compare_with_model(module, graph, batch)
    return graph


def recalled(module: nn.Module, batch: Batch, info: OpenedResults) -> Graph:
    """Return the graph of a calibrated model: the stored one if the module still computes it on
    this batch, else that of a new trace.

    Raises:
        ModelError: the model cannot be traced.
        DataError: the model cannot run on the batch.
        ResultError: the stored graph is damaged.
    """
    stored = read_graph(info)
    if stored is not None:
        materialize(module, batch)
        graph = reused_graph(*stored, module, batch)
        if graph is not None:
            return graph
    return traced(module, batch)


def reopened(
    module: nn.Module,
    batch: Batch,
    original: Graph,
    info: QuantInfo,
) -> Calibrated:
    """Return the calibration of a result folder for a model.

    Its inputs may have other sizes than in calibration, if these change nothing but sizes.

    Args:
        module: the user's model.
        batch: inputs of the model.
        original: the graph of the model, traced on `batch`.
        info: the result folder.

    Raises:
        ResultError: the model is not the calibrated one; the first layer or tensor that differs
            is named.
    """
    calibrated = _trace_as_calibrated(module, batch, original, info)
    check_model(info, calibrated)
    _warn_of_other_torch(info.header.get("torch"))
    solution = info.solution
    if not original.is_deferred:
        solution = solution.in_memory()
    check_absorption(solution.absorption, calibrated, info.path)
    check_insertions(solution.insertions, calibrated, info.path)
    config = read_json(info.files[RESOLVED])
    result = Calibrated(calibrated, info.settings, solution, config)
    check_levels(solution.levels, result.passed, info.path)
    graph = inserted(result.passed, solution.insertions)
    check_solution(solution, info.entries, graph, info.path)
    if calibrated is original:
        return result
    _check_sizes(calibrated, original, info.solution)
    return replace(result, original=original)


def _trace_as_calibrated(
    module: nn.Module,
    batch: Batch,
    original: Graph,
    info: QuantInfo,
) -> Graph:
    """Return the graph of a model on inputs of the sizes that it was calibrated with.

    Raises:
        ResultError: the model does not take inputs of those shapes.
    """
    shapes = info.header["inputs"]
    text = f"calibrated with inputs of the shapes {shapes}"
    ranks = [leaf.dim() for _, leaf in batch.tensors()]
    stored_ranks = [len(shape or ()) for shape in shapes]
    if len(ranks) == len(shapes) and ranks != stored_ranks:
        # The message about another model comes first.
        check_model(info, original)
        raise ResultError(text, help="give data of that shape")
    if shapes == input_shapes(original):
        return original
    call = call_of_shapes(batch.args, batch.kwargs, shapes)
    if call is None:
        return original
    args, kwargs = call
    resized = replace(batch, args=args, kwargs=kwargs)
    try:
        return traced(module, resized)
    except (ModelError, DataError) as error:
        check_model(info, original)
        text += f", which the model cannot take: {error.message}"
        raise ResultError(text, help="calibrate again") from error


def _warn_of_other_torch(stored: Any) -> None:
    """Warn if another version of torch calibrated. A build for GPUs is no other version."""
    before = str(stored).partition("+")[0]
    now = str(torch.__version__).partition("+")[0]
    if before != now:
        _logger.warning(
            "calibrated with torch %s, and this is %s: outputs may differ in their last bits, "
            "codes by a step",
            before,
            now,
        )


def stored_config(opened: OpenedResults) -> Config:
    """Return the config of a calibration.

    Raises:
        ResultError: it is damaged.
    """
    file = opened.files[RESOLVED]
    stored = read_json(file)
    # The built-in default cannot be stated in a file.
    for level in (None, *LEVELS):
        rules = with_dpu_accuracy(default_config(), level)
        if stored == resolved_document(rules):
            return rules
    document = Document.of(stored, str(file.path))
    return check_document(document).require()


def window_length(shapes: _Shapes) -> int | None:
    """Return how many tokens the only input [b, s] had; None if there was no such input."""
    if len(shapes) != 1 or shapes[0] is None or len(shapes[0]) != 2:
        return None
    length = shapes[0][1]
    # An input [b, 1] is a number for each sample.
    return None if length == 1 else length


def example_batch(header: Mapping[str, Any]) -> Batch:
    """Return two samples of zeros, in the shapes of the inputs that a model was calibrated
    with.


    Raises:
        ResultError: quant_info.json does not say enough to make one.
    """
    inputs = list(zip(header["inputs"], header.get("call", ()), strict=False))
    if not inputs or any(shape is None for shape, _ in inputs):
        help_ = "give data: a batch to trace the model on"
        raise ResultError("the results do not say how the model is called", help=help_)
    # The arguments by position, and by name.
    roots: dict[Any, Any] = {0: {}, 1: {}}
    for shape, (path, dtype) in inputs:
        parent = roots
        for key in path[:-1]:
            parent = parent.setdefault(key, {})
        sizes = [2 if size is None else size for size in shape]
        parent[path[-1]] = torch.zeros(sizes, dtype=getattr(torch, dtype))
    args = _with_tuples(roots[0])
    kwargs = dict(_with_tuples(roots[1]))
    return Batch(args, kwargs, None, None)


def _with_tuples(value: Any) -> Any:
    """Return nested dicts with tuples in place of those whose keys are indices."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_tuples(item) for key, item in value.items()}
    if all(isinstance(key, int) for key in items):
        return tuple(items.values())
    return items


def call_of_shapes(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shapes: _Shapes,
) -> _Call | None:
    """Return the same call with zeros of other sizes; None if `shapes` are not as many."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    if len(leaves) != len(shapes):
        return None
    resized: list[Any] = []
    for leaf, shape in zip(leaves, shapes, strict=True):
        if isinstance(leaf, Tensor) and shape is not None:
            sizes = [len(leaf) if size is None else size for size in shape]
            resized.append(leaf.new_zeros(sizes))
        else:
            resized.append(leaf)
    call: _Call = pytree.tree_unflatten(resized, structure)
    return call


def _check_sizes(calibrated: Graph, now: Graph, solution: Solution) -> None:
    """Refuse sizes of inputs that a calibration does not hold for.

    Args:
        calibrated: the model's graph on inputs of the calibration's sizes.
        now: the same on inputs of this run's sizes.
        solution: of the calibration.

    Raises:
        ResultError: they change more than sizes, or there is a scale for each of those that
            differ.
    """
    for why in _differences(calibrated, now, solution):
        stored_shapes = input_shapes(calibrated)
        stored = _shapes_in_words(stored_shapes)
        present = _shapes_in_words(input_shapes(now))
        remedy = f"give data of the shape {stored}"
        length = window_length(stored_shapes)
        if length:
            remedy = f"give --seq_len {length}, or data of that shape"
        raise ResultError(
            f"calibrated with inputs of the shape {stored}; this run has {present}, for which "
            f"{why}",
            help=remedy,
        )


def _differences(
    calibrated: Graph,
    now: Graph,
    solution: Solution,
) -> Iterator[str]:
    """Yield what other sizes of inputs change, in sentences."""
    before = _structure(calibrated)
    after = _structure(now)
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            yield f"layer {name} differs"
    for (layer, role), tensor in solution.tensors.items():
        axis = tensor.spec.ch_axis
        channels = tensor.scale.numel()
        if is_parameter(role) or axis is None or channels <= 1:
            continue
        shape = _value(now, layer, role).shape
        if shape is not None and shape[axis] != channels:
            yield f"{role} of layer {layer} has {shape[axis]} channels"


def _has_scales_of_positions(graph: Graph, solution: Solution) -> bool:
    """Return whether a value has a scale for each index of an axis that follows a length."""
    for (layer, role), tensor in solution.tensors.items():
        if is_parameter(role) or tensor.spec.is_dynamic:
            continue
        if tensor.spec.ch_axis in _value(graph, layer, role).open_axes:
            return True
    return False


def _value(graph: Graph, layer: str, role: str) -> Node:
    """Return the node whose value is the activation in a role of a layer."""
    node = graph.by_name[layer]
    if role == "activation" or node.op == "input":
        return node
    return graph.by_name[node.input_roles()[role]]


def _structure(graph: Graph) -> dict[str, tuple[Any, ...]]:
    """Return what results depend on, by layer: its operator, its parameters and the layers that
    it reads.

    Sizes may differ, and so may integers, which index and are not quantized.
    """
    floats = {node.name: node for node in graph.nodes if node.is_float}
    structure: dict[str, tuple[Any, ...]] = {}
    for name, node in floats.items():
        read = tuple(ref for ref in node.refs() if ref in floats)
        parameters = tuple(node.params.items())
        structure[name] = (node.op, node.target, parameters, read)
    return structure


def _shapes_in_words(shapes: _Shapes) -> str:
    """Return the shapes of inputs with the batch size as b.

    >>> _shapes_in_words([[None, 3, 8, 8], [None, 4]])
    '[b, 3, 8, 8] and [b, 4]'
    """
    texts: list[str] = []
    for shape in shapes:
        if shape is not None:
            sizes = ["b" if size is None else str(size) for size in shape]
            texts.append(f"[{', '.join(sizes)}]")
    return " and ".join(texts)
