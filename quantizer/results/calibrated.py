"""A calibrated network beside the float one: fresh from the pipeline, or from a result folder.
What test mode runs.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from quantizer.sources.models import materialize, try_first_batch
from quantizer.sources.module_state import left_alone
from quantizer.storage.files import read_json

logger = logging.getLogger(__name__)

Shapes = Sequence[Sequence[int | None] | None]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Calibrated:
    """`original` is the model as traced; `settings` and `solution` are what calibration ran
    with and found.
    """

    original: Graph
    settings: Settings
    solution: Solution

    def with_solution(self, solution: Solution) -> "Calibrated":
        """Another solution for the same network, whose weights both have in common."""
        other = replace(self, solution=solution)
        vars(other)["passed"] = self.passed
        return other

    @cached_property
    def graph(self) -> Graph:
        """The graph that was planned, with the layers that algorithms inserted; scales of
        positions fix lengths.
        """
        graph = inserted(self.passed, self.solution.insertions)
        return (
            graph.replaced(lengths=())
            if _has_scales_of_positions(graph, self.solution)
            else graph
        )

    @cached_property
    def float_graph(self) -> Graph:
        """The float graph that `graph` is compared with, node by node: rescaled as that is."""
        if not for_device(self.settings):
            return self.float_as_run
        refused = absorption.refused(self.solution.absorption)
        own = run_passes(self.original, self.settings, device=False, refused=refused)
        return with_weights(inserted(own, self.solution.insertions), self.solution.rescaled)

    @cached_property
    def float_as_run(self) -> Graph:
        """The float graph with all that passes change in the function, those for a device
        included.
        """
        graph = inserted(self.passed, self.solution.insertions)
        return with_weights(graph, self.solution.rescaled)

    @cached_property
    def user_graph(self) -> Graph | None:
        """The model as traced, where the function of `float_graph` is another; outputs are
        compared with its.
        """
        return self.original if self.float_graph.deviations else None

    @cached_property
    def passed(self) -> Graph:
        """The model's graph after the passes, which both have in common where no pass is for a
        device alone.
        """
        refused = absorption.refused(self.solution.absorption)
        return run_passes(self.original, self.settings, refused=refused)

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """What the network returns that outputs are compared with, by the names of the user's
        model.
        """
        return parts_named_as(self.user_graph or self.float_graph, self.original)

    def network(self) -> Network:
        """The quantized network, a new one."""
        return placed(quantized_network(self.graph, self.solution), self.original.device)


def traced(module: nn.Module, batch: Batch, *, compared: bool = False) -> Graph:
    """The module's graph, perhaps `compared` with the module; layers that wait for a first
    input get their shapes.

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
    """Return the graph of a calibrated model: the stored one, where the module still computes
    it on this batch, else that of a new trace.

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


def reopened(module: nn.Module, batch: Batch, original: Graph, info: QuantInfo) -> Calibrated:
    """The calibration of `info` for a model that `original` is a trace of, on `batch`.

    Its inputs may have other sizes than those calibrated with, if these change nothing but
    sizes.

    Raises:
        ResultError: the model is not the calibrated one; the first layer or tensor that differs
            is named.
    """
    shapes = info.header["inputs"]
    ranks = [leaf.dim() for _, leaf in batch.tensors()]
    if len(ranks) == len(shapes) and ranks != [len(shape or ()) for shape in shapes]:
        check_model(info, original)  # another model is said to be that
        raise ResultError(
            f"calibrated with inputs of the shapes {shapes}", help="give data of that shape"
        )
    call = (
        call_of_shapes(batch.args, batch.kwargs, shapes)
        if shapes != input_shapes(original)
        else None
    )
    calibrated = original
    if call is not None:
        try:
            calibrated = traced(module, replace(batch, args=call[0], kwargs=call[1]))
        except (ModelError, DataError) as error:
            check_model(info, original)
            said = (
                f"calibrated with inputs of the shapes {shapes}, which the model cannot take: "
                f"{error.message}"
            )
            raise ResultError(said, help="calibrate again") from error
    check_model(info, calibrated)
    _say_other_torch(info)
    solution = info.solution if original.is_deferred else info.solution.in_memory()
    check_absorption(solution.absorption, calibrated, info.path)
    check_insertions(solution.insertions, calibrated, info.path)
    found = Calibrated(calibrated, info.settings, solution)
    check_levels(solution.levels, found.passed, info.path)
    check_solution(
        solution, info.entries, inserted(found.passed, solution.insertions), info.path
    )
    if calibrated is original:
        return found
    check_sizes(calibrated, original, info.solution)
    return replace(found, original=original)


def _say_other_torch(info: QuantInfo) -> None:
    """Warn of a calibration by another version of torch; whether it was built for GPUs makes no
    difference.
    """
    then, now = (
        str(version).partition("+")[0]
        for version in (info.header.get("torch"), torch.__version__)
    )
    if then != now:
        logger.warning(
            "calibrated with torch %s, and this is %s: outputs may differ in their last bits, "
            "codes by a step",
            then,
            now,
        )


def stored_config(opened: OpenedResults) -> Config:
    """The config of a calibration.

    Raises:
        ResultError: it is damaged.
    """
    file = opened.files[RESOLVED]
    stored = read_json(file)
    for level in (None, *LEVELS):
        rules = with_dpu_accuracy(default_config(), level)
        # The built-in default is none that a file could state
        if stored == resolved_document(rules):
            return rules
    return check_document(Document.of(stored, str(file.path))).require()


def window_length(shapes: Shapes) -> int | None:
    """How many tokens the only input [b, s] had, if there was such a one; one number for each
    sample is no text.
    """
    only = shapes[0] if len(shapes) == 1 else None
    return only[1] if only is not None and len(only) == 2 and only[1] != 1 else None


def example_batch(header: Mapping[str, Any]) -> Batch:
    """Two samples of zeros, shaped like those that a model was calibrated with.

    Raises:
        ResultError: quant_info.json does not say enough to make one.
    """
    inputs = list(zip(header["inputs"], header.get("call", ()), strict=False))
    if not inputs or any(shape is None for shape, _ in inputs):
        help_ = "give data: a batch to trace the model on"
        raise ResultError("the results do not say how the model is called", help=help_)
    roots: dict[Any, Any] = {0: {}, 1: {}}
    for shape, (path, dtype) in inputs:
        inside = roots
        for key in path[:-1]:
            inside = inside.setdefault(key, {})
        inside[path[-1]] = torch.zeros(
            [2 if size is None else size for size in shape], dtype=getattr(torch, dtype)
        )
    return Batch(_nested(roots[0]), dict(_nested(roots[1])), None, None)


def _nested(value: Any) -> Any:
    """Dicts whose keys are indices as tuples."""
    if not isinstance(value, dict):
        return value
    items = {key: _nested(item) for key, item in value.items()}
    return tuple(items.values()) if all(isinstance(key, int) for key in items) else items


def call_of_shapes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Shapes
) -> Call | None:
    """The same call with zeros of other sizes; None if it has not as many inputs."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    if len(leaves) != len(shapes):
        return None
    resized = [
        leaf.new_zeros([len(leaf) if size is None else size for size in shape])
        if isinstance(leaf, Tensor) and shape is not None
        else leaf
        for leaf, shape in zip(leaves, shapes, strict=True)
    ]
    call: Call = pytree.tree_unflatten(resized, structure)
    return call


def check_sizes(calibrated: Graph, now: Graph, solution: Solution) -> None:
    """Refuse sizes of inputs that a calibration does not hold for, of one model traced with
    both.

    Raises:
        ResultError: they change more than sizes, or there is a scale for each of those that
            differ.
    """
    for why in _differences(calibrated, now, solution):
        shapes = [input_shapes(graph) for graph in (calibrated, now)]
        said, here = (
            " and ".join(_text(shape) for shape in some if shape is not None) for some in shapes
        )
        length = window_length(shapes[0])
        remedy = (
            f"give --seq_len {length}, or data of that shape"
            if length
            else f"give data of the shape {said}"
        )
        raise ResultError(
            f"calibrated with inputs of the shape {said}, this run has {here}: then {why}",
            help=remedy,
        )


def _differences(calibrated: Graph, now: Graph, solution: Solution) -> Iterator[str]:
    before, after = _structure(calibrated), _structure(now)
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            yield f"layer {name} is another"
    for (layer, role), tensor in solution.tensors.items():
        axis, channels = tensor.spec.ch_axis, tensor.scale.numel()
        if not is_parameter(role) and axis is not None and channels > 1:
            size = _value(now, layer, role).shape
            if size is not None and size[axis] != channels:
                yield f"{role} of layer {layer} has {size[axis]} channels"


def _has_scales_of_positions(graph: Graph, solution: Solution) -> bool:
    """Whether a value has a scale for each index of an axis that follows a length."""
    fixed = (
        (key, tensor.spec)
        for key, tensor in solution.tensors.items()
        if not tensor.spec.is_dynamic
    )
    return any(
        not is_parameter(role) and s.ch_axis in _value(graph, at, role).open_axes
        for (at, role), s in fixed
    )


def _value(graph: Graph, layer: str, role: str) -> Node:
    """The node that makes the activation in a role of a layer."""
    node = graph.by_name[layer]
    return (
        node
        if role == "activation" or node.op == "input"
        else graph.by_name[node.input_roles()[role]]
    )


def _structure(graph: Graph) -> dict[str, tuple[Any, ...]]:
    """Per layer what results hold on to: its operator, its parameters, whose values it reads.

    Sizes are free, and so are integers, as they index and are not quantized.
    """
    floats = {node.name: node for node in graph.nodes if node.is_float}
    return {
        name: (
            node.op,
            node.target,
            tuple(node.params.items()),
            tuple(ref for ref in node.refs() if ref in floats),
        )
        for name, node in floats.items()
    }


def _text(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('b' if size is None else str(size) for size in shape)}]"
