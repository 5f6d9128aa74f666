"""Build the quantized network of a calibration, and the float graphs that it is compared with.
The calibration is of this process, or of a result folder, whose model and config have to be the
same.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from quantizer.calibration import fingerprint
from quantizer.calibration.fingerprint import input_shapes
from quantizer.calibration.fits_model import check_insertions, check_solution
from quantizer.calibration.request import decisions_of
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.config.algorithms import algorithm_entry
from quantizer.config.document.document import Document
from quantizer.config.forms.resolved import resolved_document
from quantizer.config.json_types import JsonMapping
from quantizer.config.load import check_document, default_config
from quantizer.config.model import ResolvedConfig, Settings
from quantizer.config.roles import is_parameter
from quantizer.config.run_options import LEVELS, with_dpu_accuracy
from quantizer.errors import DataError, ModelError, ResultError
from quantizer.graph.channels.output_parts import Output, parts_named_as
from quantizer.graph.edits import with_insertions, with_weights
from quantizer.graph.ir import Graph, Node
from quantizer.graph.passes import for_device, run_passes
from quantizer.graph.tracing.parameters import move_module
from quantizer.nn.network import Network
from quantizer.plan.joining.joins import with_decisions
from quantizer.plan.model import Plan
from quantizer.results.folder import (
    RESOLVED_CONFIG_FILE,
    OpenedResults,
    QuantInfo,
    stored_joins,
)
from quantizer.results.graph_file import trace_module
from quantizer.sources.arguments import call_with_shapes, shapes_text, window_length
from quantizer.sources.batches import Batch
from quantizer.storage.files import read_json

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibrated:
    """A calibration of a model, from which the quantized network is built.

    Args:
        original: the graph of the model as traced.
        settings: the global settings of the calibration.
        solution: how each tensor is quantized.
        config: the whole config, as config.resolved.json has it.
        data: the fingerprint of the data of the calibration; None if it needed none.
    """

    original: Graph
    settings: Settings
    solution: Solution
    config: JsonMapping = field(default_factory=dict)
    data: JsonMapping | None = None

    def with_solution(self, solution: Solution) -> "Calibrated":
        """Return another solution for the same network. Both share the weights."""
        other = replace(self, solution=solution)
        # Fills the cached property, as running the passes again would copy the weights
        vars(other)["graph_after_passes"] = self.graph_after_passes
        return other

    @cached_property
    def graph(self) -> Graph:
        """Return the graph of the quantized network, with the layers that algorithms
        inserted.
        """
        graph = with_insertions(self.graph_after_passes, self.solution.insertions)
        # One scale per position fixes the number of positions
        if _has_scales_of_positions(graph, self.solution):
            return graph.replaced(lengths=())
        return graph

    @cached_property
    def float_graph(self) -> Graph:
        """Return the float graph that `graph` is compared with node by node.

        Passes for a device are left out, as they change what the network computes. Weights are
        rescaled as in `graph`, so that values of the same layer can be compared.
        """
        if not for_device(self.settings):
            return self.float_as_run
        after_passes = run_passes(
            self.original, self.settings, device=False, kept=self.solution.kept
        )
        graph = with_insertions(after_passes, self.solution.insertions)
        return with_weights(graph, self.solution.rescaled)

    @cached_property
    def float_as_run(self) -> Graph:
        """Return the float graph after all passes, also those for a device."""
        graph = with_insertions(self.graph_after_passes, self.solution.insertions)
        return with_weights(graph, self.solution.rescaled)

    @cached_property
    def user_graph(self) -> Graph | None:
        """Return the graph of the model as traced if a pass has changed what the float graph
        computes. Then the outputs of the network are compared with those of this graph, and not
        of `float_graph`. Return None if both compute the same.
        """
        if self.float_graph.deviations:
            return self.original
        return None

    @cached_property
    def graph_after_passes(self) -> Graph:
        """Return the graph of the model after all passes. The quantized and the float graph
        share its weights, unless a pass is for a device.
        """
        return run_passes(self.original, self.settings, kept=self.solution.kept)

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """Return the outputs that are compared, with the names of the user's model."""
        return parts_named_as(self.user_graph or self.float_graph, self.original)

    def network(self) -> Network:
        """Return a new instance of the quantized network."""
        network = quantized_network(self.graph, self.solution)
        return move_module(network, self.original.device)


def reopen_calibration(
    module: nn.Module, batch: Batch, original: Graph, info: QuantInfo
) -> Calibrated:
    """Return the calibration in a result folder, for a model in memory.

    The inputs may have other sizes than in calibration, if the graph differs in sizes alone.

    Args:
        module: the user's model.
        batch: inputs of the model.
        original: the graph of the model, traced on `batch`.
        info: the open result folder.

    Raises:
        ResultError: the model is not the calibrated one. The first layer or tensor that differs
            is named.
    """
    calibrated = _trace_as_calibrated(module, batch, original, info)
    check_model(info, calibrated)
    _warn_of_other_torch(info.header.get("torch"))
    solution = info.solution
    if not original.is_deferred:
        solution = solution.in_memory()
    check_insertions(solution.insertions, calibrated, info.path)
    config = read_json(info.files[RESOLVED_CONFIG_FILE])
    data = info.header.get("data")
    result = Calibrated(calibrated, info.settings, solution, config, data)
    for name, decision in decisions_of(solution.kept).items():
        decision.check(solution.kept[name], result.graph_after_passes, info.path)
    graph = with_insertions(result.graph_after_passes, solution.insertions)
    check_solution(solution, info.entries, graph, info.path)
    if calibrated is original:
        if not _has_scales_of_positions(graph, info.solution):
            return result
        # A stored graph takes all lengths, but the scales are those of one length
        original = trace_module(module, batch)
        if input_shapes(original) == input_shapes(calibrated):
            return result
    _check_input_sizes(calibrated, original, info.solution)
    return replace(result, original=original)


def _trace_as_calibrated(
    module: nn.Module, batch: Batch, original: Graph, info: QuantInfo
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
        # If it is another model, say that instead
        check_model(info, original)
        raise ResultError(text, help="give data of that shape")
    if shapes == input_shapes(original):
        return original
    call = call_with_shapes(batch.args, batch.kwargs, shapes)
    if call is None:
        return original
    args, kwargs = call
    resized = replace(batch, args=args, kwargs=kwargs)
    is_fixed = not any(shape and None in shape for shape in shapes)
    try:
        return trace_module(module, resized, fixed=is_fixed)
    except (ModelError, DataError) as error:
        check_model(info, original)
        text += f", which the model cannot take: {error.message.marked}"
        raise ResultError(text, help="calibrate again") from error


def _warn_of_other_torch(stored: Any) -> None:
    """Warn if the calibration used another version of torch."""
    # What follows "+" is the build, such as cu128
    before = str(stored).partition("+")[0]
    now = str(torch.__version__).partition("+")[0]
    if before != now:
        _logger.warning(
            "calibrated with torch %s, and this is %s: outputs may differ in their last bits, "
            "codes by a step",
            before,
            now,
        )


def stored_config(opened: OpenedResults) -> ResolvedConfig:
    """Return the config of a calibration.

    Raises:
        ResultError: it is damaged.
    """
    file = opened.files[RESOLVED_CONFIG_FILE]
    stored = read_json(file)
    # The built-in default is not a valid file: it has a setting that no file can have
    for level in (None, *LEVELS):
        config = with_dpu_accuracy(default_config(), level)
        if stored == resolved_document(config):
            return config
    document = Document.of(stored, str(file.path))
    stored_level = opened.header.get("dpu_accuracy")
    return with_dpu_accuracy(check_document(document).require(), stored_level)


def _check_input_sizes(calibrated: Graph, now: Graph, solution: Solution) -> None:
    """Check that a calibration can be used for inputs of other sizes.

    Args:
        calibrated: the graph of the model for the input sizes of the calibration.
        now: the graph for the input sizes of this run.
        solution: of the calibration.

    Raises:
        ResultError: the graphs differ in more than sizes, or a size that differs is the number
            of scales of a tensor.
    """
    for why in _effects_of_sizes(calibrated, now, solution):
        stored_shapes = input_shapes(calibrated)
        stored = shapes_text(stored_shapes)
        present = shapes_text(input_shapes(now))
        remedy = f"give data of the shape {stored}"
        length = window_length(stored_shapes)
        if length:
            remedy = f"give <--seq_len {length}>, or data of that shape"
        raise ResultError(
            f"calibrated with inputs of the shape {stored}; this run has {present}, for which "
            f"{why}",
            help=remedy,
        )


def _effects_of_sizes(calibrated: Graph, now: Graph, solution: Solution) -> Iterator[str]:
    """Yield sentences about what other input sizes change besides sizes."""
    before = _float_structure(calibrated)
    after = _float_structure(now)
    for name in (*before, *after):
        if before.get(name) != after.get(name):
            yield f"layer {name} differs"
    for (layer, role), tensor in solution.tensors.items():
        axis = tensor.spec.ch_axis
        channels = tensor.scale.numel()
        if is_parameter(role) or axis is None or channels <= 1:
            continue
        shape = _quantized_node(now, layer, role).shape
        if shape is not None and shape[axis] != channels:
            yield f"{role} of layer {layer} has {shape[axis]} channels"


def _has_scales_of_positions(graph: Graph, solution: Solution) -> bool:
    """Return whether an activation has one scale per index of an axis whose size follows the
    length of an input.
    """
    for (layer, role), tensor in solution.tensors.items():
        if is_parameter(role) or tensor.spec.is_dynamic:
            continue
        if tensor.spec.ch_axis in _quantized_node(graph, layer, role).open_axes:
            return True
    return False


def _quantized_node(graph: Graph, layer: str, role: str) -> Node:
    """Return the node whose value is quantized under a role of a layer: the layer itself, or
    the layer whose output it reads.
    """
    node = graph.by_name[layer]
    if role == "activation" or node.op == "input":
        return node
    return graph.by_name[node.input_roles()[role]]


def _float_structure(graph: Graph) -> dict[str, tuple[Any, ...]]:
    """Return the operator, the parameters and the float inputs of each float layer, by its
    name.

    Sizes are left out. So are integer layers: they compute sizes and indices, and are not
    quantized.
    """
    float_nodes = {node.name: node for node in graph.nodes if node.is_float}
    structure: dict[str, tuple[Any, ...]] = {}
    for name, node in float_nodes.items():
        inputs = tuple(ref for ref in node.refs() if ref in float_nodes)
        parameters = tuple(node.params.items())
        structure[name] = (node.op, node.target, parameters, inputs)
    return structure


def check_model(info: QuantInfo, original: Graph) -> None:
    """Check that a model is the calibrated one.

    Args:
        info: the calibration.
        original: the graph of the model.

    Raises:
        ResultError: naming the first layer or tensor that differs.
    """
    layer = fingerprint.first_difference(
        info.header["layers"], fingerprint.layer_digests(original)
    )
    if layer is not None:
        raise ResultError(
            f"the model is not the calibrated one: layer {layer} differs",
            help="calibrate this model first",
        )
    path = fingerprint.first_difference(
        info.header["weights"], fingerprint.weight_digests(original)
    )
    if path is not None:
        owner = path
        for node in reversed(original.nodes):
            if path in node.params.values():
                owner = node.name
        raise ResultError(
            f"the weights are not those that were calibrated: {path} of layer {owner} differs",
            help="calibrate again, or give the weights that were calibrated",
        )


def check_plan(info: QuantInfo, config: ResolvedConfig, plan: Plan) -> Plan:
    """Return a plan with its joins quantized as in the calibration.

    Args:
        info: the calibration.
        config: of this run.
        plan: made from this config.

    Raises:
        ResultError: the config is not the calibrated one. The first setting or layer that
            differs is named.
    """
    plan = with_decisions(plan, stored_joins(info.header))
    for difference in _differences(info, config, plan.tensors):
        raise ResultError(
            f"the config is not the calibrated one: {difference}",
            help="calibrate with this config first, or leave out <--config_file>",
        )
    return plan


def _differences(
    info: QuantInfo, config: ResolvedConfig, planned: Mapping[tuple[str, str], Any]
) -> Iterator[str]:
    """Yield sentences about settings and tensors that differ from those of the calibration."""
    for name, stored in info.header["settings"].items():
        present = getattr(config.settings, name)
        if present != stored:
            yield f"{name} is {present!r}, calibrated with {stored!r}"
    algorithms = [algorithm_entry(algorithm.settings) for algorithm in config.algorithms]
    if algorithms != info.header["algorithms"]:
        yield "its algorithms differ"
    calibrated = info.solution.tensors
    for key in [*planned, *calibrated]:
        is_in_both = key in planned and key in calibrated
        if not is_in_both or planned[key].spec != calibrated[key].spec:
            layer, role = key
            yield f"{role} of layer {layer} differs"
