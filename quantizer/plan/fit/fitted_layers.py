"""Fit a config to single layers of a model: those that few bits spoil most, and heads whose
channels are outputs of different ranges. These layers follow from the graph alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantizer.config.document.document import value_at
from quantizer.config.forms.level_edits import specified, with_entries
from quantizer.config.json_types import JsonObject
from quantizer.config.model import ROLES, QuantizationSpec, Role
from quantizer.config.roles import base_role
from quantizer.config.wording import first_names
from quantizer.graph.ir import Graph, Node, references
from quantizer.numerics.codes import bits_of
from quantizer.plan.fit.fitting import Fitting, eight_bits
from quantizer.plan.floating import derived_layers, normalizes

_AFFINE = ("mul", "add")
_CUTS = ("slice", "split", "chunk", "unbind", "select")
_FEW_BITS = 4
_HEAD = "kind:head"


@dataclass(frozen=True)
class SensitiveLayers:
    """Layers with weights, in execution order.

    Attributes:
        heads: they make the outputs, and nothing else in the network multiplies what they make.
        divided: those of `heads` whose outputs are cut into parts, or joined with those of
            other heads.
        routers: the largest of their values choose what is computed or returned.
    """

    heads: tuple[str, ...]
    divided: tuple[str, ...]
    routers: tuple[str, ...]


def sensitive_layers(graph: Graph) -> SensitiveLayers:
    """Return the heads and routers of a network."""
    makers = _makers(graph)
    read_inside: set[str] = set()
    routers: set[str] = set()
    cut: set[str] = set()
    for node in graph.nodes:
        layers = _union(makers, node.refs())
        if node.row.orders:
            routers |= layers
        is_opaque = _may_hold_floats(node) and not makers[node.name]
        if is_opaque or node.is_multiplying:
            read_inside |= layers
        if node.op in _CUTS:
            cut |= layers
    heads = _union(makers, references(graph.output)) - read_inside
    divided = heads & cut
    if len(heads) > 1:
        divided = heads
    return SensitiveLayers(
        _in_execution_order(graph, heads),
        _in_execution_order(graph, divided),
        _in_execution_order(graph, routers),
    )


def behind_norms(graph: Graph) -> list[str]:
    """Return the linear layers that read the output of a normalization over channels, as those
    of transformers do.

    A normalization may be one operator, or written by hand with `rsqrt`.
    """
    fixed: set[str] = set()
    normalized: set[str] = set()
    layers = []
    for node in graph.nodes:
        operands = _values_read(graph, node)
        varying = operands - fixed
        if node.is_tensor or (operands and not varying):
            fixed.add(node.name)
        elif normalizes(graph, node):
            normalized.add(node.name)
        elif len(varying) != 1 or varying.isdisjoint(normalized):
            continue
        elif node.row.spatial == 0:
            layers.append(node.name)
        elif node.row.kind == "passthrough" or node.op in _AFFINE:
            normalized.add(node.name)
    return layers


def _values_read(graph: Graph, node: Node) -> set[str]:
    """Return the nodes whose floating-point values a node reads, not only their shape."""
    inputs = dict(node.inputs)
    if node.row.shape_of:
        inputs.pop(node.row.shape_of, None)
    names: set[str] = set()
    for name in references(inputs):
        if _may_hold_floats(graph.by_name[name]):
            names.add(name)
    return names


def _may_hold_floats(node: Node) -> bool:
    """Return whether the node makes a floating-point tensor, or several results."""
    has_results = node.dtype is None and node.row.kind != "structural"
    return node.is_float or has_results


def _makers(graph: Graph) -> dict[str, frozenset[str]]:
    """Return for each node the layers with weights that make its value without others.

    A join has those of its parts. A value that is computed from those of several layers, such
    as the sum of a residual connection, has none, and neither has that of a normalization.
    """
    makers: dict[str, frozenset[str]] = {}
    constants = derived_layers(graph)
    for node in graph.nodes:
        if node.is_multiplying:
            makers[node.name] = frozenset({node.name})
            continue
        makers[node.name] = frozenset()
        if node.row.kind in ("mac", "structural") or node.row.normalizes:
            continue
        operands = set()
        for name in _values_read(graph, node):
            if name not in constants and graph.by_name[name].op != "parameter":
                operands.add(makers[name])
        if node.is_join:
            makers[node.name] = frozenset().union(*operands)
        elif len(operands) == 1:
            makers[node.name] = operands.pop()
    return makers


def _union(makers: dict[str, frozenset[str]], names: Iterable[str]) -> set[str]:
    layers: set[str] = set()
    for name in names:
        layers |= makers[name]
    return layers


def _in_execution_order(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=graph.index.__getitem__))


def spare_sensitive_layers(fitting: Fitting) -> None:
    """Leave embeddings, routers and heads in float where they would have few bits, as long as
    other layers have few bits.
    """
    coarse = _coarse_layers(fitting)
    if not coarse and not fitting.plan.tensors:
        _quantize_only_layer(fitting)
        return
    sensitive = sensitive_layers(fitting.graph)
    routers = [name for name in coarse if name in sensitive.routers]
    heads = [name for name in coarse if name in sensitive.heads]
    layers_by_reason = {
        "an error in a row of an embedding is averaged with no other": _embeddings(
            fitting, coarse
        ),
        "the largest outputs choose what is computed or returned, and few bits would choose "
        "otherwise": routers,
        "few bits lose most where outputs are made": heads,
    }
    spared: set[str] = set()
    for reason, layers in layers_by_reason.items():
        added = [name for name in layers if name not in spared]
        remaining = coarse.keys() - spared - set(added)
        if not added or not remaining:
            continue
        spared.update(added)
        names = fitting.names(added, kinds=True)
        fitting.leave_float(names, f"{first_names(names)} left in float: {reason}")


def _coarse_layers(fitting: Fitting) -> dict[str, QuantizationSpec]:
    """Return the layers whose weights have few bits, with a spec of theirs."""
    layers: dict[str, QuantizationSpec] = {}
    for (layer, role), tensor in fitting.plan.tensors.items():
        if base_role(role) == "weights" and _has_few_bits(tensor.spec):
            layers.setdefault(layer, tensor.spec)
    return layers


def _has_few_bits(spec: QuantizationSpec) -> bool:
    return spec.is_scaled and bits_of(spec) <= _FEW_BITS


def _embeddings(fitting: Fitting, coarse: dict[str, QuantizationSpec]) -> list[str]:
    """Return the embeddings with few bits, and with them those that groups do not fit yet: the
    size of groups may still change.
    """
    by_name = fitting.graph.by_name
    embeddings = [name for name in coarse if by_name[name].row.looks_up]
    if embeddings:
        for name, _ in fitting.plan.ungrouped:
            if by_name[name].row.looks_up:
                embeddings.append(name)
    return embeddings


def _quantize_only_layer(fitting: Fitting) -> None:
    """Quantize the head after all, if it is the only layer with a weight to multiply."""
    excluded = fitting.document.get("exclude") or []
    multiplying = [node for node in fitting.graph.nodes if node.is_multiplying]
    if _HEAD not in excluded or len(multiplying) != 1:
        return
    path = ("exclude", excluded.index(_HEAD))
    sentence = f"{_HEAD} left out of exclude: it is the only layer that multiplies"
    fitting.remove(path, sentence)


def give_recurrent_layers_eight_bits(fitting: Fitting) -> None:
    """Give recurrent layers 8 bits where they would have few: their errors add up from step to
    step, and no algorithm finds better codes for them.
    """
    if not fitting.is_hierarchical:
        return
    layers: dict[str, QuantizationSpec] = {}
    for layer, spec in _coarse_layers(fitting).items():
        row = fitting.graph.by_name[layer].row
        is_recurrent = row.kind == "mac" and row.channels is None
        if is_recurrent and spec.dtype == "int":
            layers[layer] = spec
    if not layers:
        return
    names = fitting.names(layers)
    spec = next(iter(layers.values()))
    sentence = (
        f"int8 for {first_names(names)}: errors of recurrent layers add up from step to step"
    )
    fitting.give_weights(names, eight_bits(spec), sentence)
    words = _words_of_coarse_inputs(fitting, layers)
    if words:
        fitting.give_inputs(names, {**words, "dtype": "int8"})


def _words_of_coarse_inputs(
    fitting: Fitting, layers: dict[str, QuantizationSpec]
) -> JsonObject:
    """Return what the document states of the inputs of some layers, if these have few bits."""
    for tensor in fitting.plan.tensors.values():
        if tensor.layer not in layers or base_role(tensor.role) != "input":
            continue
        path = fitting.path_of(tensor, "dtype")
        if path is not None and _has_few_bits(tensor.spec):
            words: JsonObject = value_at(fitting.document, path[:-1])
            return words
    return {}


def give_divided_heads_channels(fitting: Fitting) -> None:
    """Give heads a scale for each output channel in the layered form, where one scale for all
    weights would serve outputs of different ranges.
    """
    if fitting.is_hierarchical or fitting.is_for_dpu:
        return
    entries: dict[str, JsonObject] = {}
    for layer in sensitive_layers(fitting.graph).divided:
        specs: dict[Role, QuantizationSpec] = {}
        for role in ROLES:
            tensor = fitting.plan.of_layer(layer).get(role)
            if tensor is not None:
                specs[role] = tensor.spec
        weights = specs.get("weights")
        if weights is None or weights.dtype != "int":
            continue
        if weights.qscheme == "per_tensor":
            specs["weights"] = replace(weights, qscheme="per_channel", group_size=None)
            entries[layer] = specified(fitting.document, specs)
    if entries:
        names = first_names(fitting.names(entries))
        fitting.change(
            with_entries(fitting.document, entries),
            f"per_channel for the weights of {names}: their channels are outputs of different "
            "ranges",
        )
