"""Stored values against the graph of the model that they are for: what does not fit a layer is
refused, by its name.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment
from quantizer.calibration.level_channels import LARGEST_EXPONENT
from quantizer.calibration.solution import Solution, writes_inplace
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.config.typed_fields import fits
from quantizer.graph.edits import Insertion, channels_of, inserted
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import storage_dtype
from quantizer.numerics.granularity import scale_shape
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.files import damaged


def check_absorption(absorption: Mapping[str, Any], original: Graph, path: Path | str) -> None:
    """Refuse decisions on the absorption of biases that are about layers of another model.

    Raises:
        ResultError: naming the first.
    """
    for name, row in absorption.get("layers", {}).items():
        strange = [layer for layer in (name, row["into"]) if layer not in original.by_name]
        if strange:
            raise damaged(
                path, f"header/absorption/layers/{name}", f"there is no layer {strange[0]}"
            )


def check_levels(levels: Mapping[str, Any], passed: Graph, path: Path | str) -> None:
    """Refuse factors for channels that the model does not have.

    Raises:
        ResultError: naming the first layer.
    """
    for name, exponents in levels.items():
        place = f"header/levels/{name}"
        node = passed.by_name.get(name)
        if node is None or not node.is_multiplying:
            raise damaged(path, place, "there is no such layer with weights")
        channels, _ = channels_of(node, passed.weight(node))
        is_list = isinstance(exponents, list) and all(
            type(exponent) is int for exponent in exponents
        )
        if (
            not is_list
            or len(exponents) != channels
            or max(map(abs, exponents)) > LARGEST_EXPONENT
        ):
            raise damaged(path, place, f"expected {channels} integers up to {LARGEST_EXPONENT}")


def check_insertions(
    insertions: Sequence[Insertion], original: Graph, path: Path | str
) -> None:
    """Refuse layers that cannot be inserted into a graph.

    Raises:
        ResultError: naming the first.
    """
    known = set(original.by_name)
    shapes = {node.name: node.shape or () for node in original.nodes}
    for row in insertions:
        strange = [name for name in (row.source, *row.readers) if name not in known]
        if strange or row.name in known or not row.readers:
            what = strange[0] if strange else row.name
            raise damaged(
                path, f"header/insertions/{row.name}", f"{what} does not fit the model"
            )
        shape = shapes[row.source]
        axis = row.attrs.get("axis", -1)
        if (
            not fits(axis, int)
            or not -len(shape) <= axis < len(shape)
            or tuple(row.weight.shape) != (shape[axis],)
        ):
            raise damaged(
                path,
                f"header/insertions/{row.name}",
                "it does not have the channels of what it reads",
            )
        if not _is_sound(row.weight):
            raise damaged(path, f"header/insertions/{row.name}", "its weight is not finite")
        known.add(row.name)
        shapes[row.name] = shape


def check_solution(
    solution: Solution, entries: Mapping[str, Any], graph: Graph, path: Path
) -> None:
    """Refuse values that do not fit the layers that they are for.

    Raises:
        ResultError: naming the first tensor, and why.
    """
    modules = {node.name: f"module_{index}" for index, node in enumerate(graph.nodes)}
    for (layer, role), tensor in solution.tensors.items():
        node, entry = graph.by_name.get(layer), entries[layer][role]
        why = "there is no such layer" if node is None else _unfit(graph, node, role, tensor)
        if why is None and entry["module"] != modules[layer]:
            why = f"the layer is {modules[layer]}, not {entry['module']}"
        if why is None and entry["inplace"] != writes_inplace(graph, layer, role):
            why = "inplace is another"
        if why:
            raise damaged(path, f"tensors/{layer}/{role}", why)
    for what, found in (("weights", solution.weights), ("rescaled", solution.rescaled)):
        for layer, own in found.items():
            for key, value in own.items():
                if why := _unlike(graph, layer, key, value):
                    raise damaged(path, f"header/replaced/{layer}/{what}/{key}", why)
    for layer, value in solution.corrections.items():
        node = graph.by_name.get(layer)
        fits_layer = node is not None and tuple(value.shape) == _channels(graph, node)
        if (
            node is None
            or not fits_layer
            or value.dtype != graph.weight(node).dtype
            or not _is_sound(value)
        ):
            raise damaged(
                path.with_name("bias_corr.safetensors"),
                layer,
                "it is no correction of a layer's bias",
            )


def _unfit(graph: Graph, node: Node, role: str, tensor: QuantizedTensor) -> str | None:
    """Why a tensor is not one of this layer."""
    spec, scale, zero_point = tensor.spec, tensor.scale, tensor.zero_point
    if is_parameter(role):
        path = node.params.get(parameter_name(role))
        if path is None:
            return "the layer has no such parameter"
        value = graph.tensors[path]
        shape = tuple(value.shape)
        if tensor.codes is not None and (
            tuple(tensor.codes.shape) != shape or tensor.dtype != value.dtype
        ):
            found = f"{tuple(tensor.codes.shape)} of {tensor.dtype}"
            return f"its codes are {found}, and the parameter is {shape} of {value.dtype}"
        if tensor.codes is not None and tensor.codes.dtype != storage_dtype(spec):
            return f"its codes are stored as {tensor.codes.dtype}, not {storage_dtype(spec)}"
    else:
        is_own = role == "activation" or node.op == "input"
        made = node if is_own else graph.by_name.get(node.input_roles().get(role, ""))
        if made is None:
            return "the layer has no such input"
        shape = tuple(0 if size is None else size for size in made.shape or ())
    return qparams_fault(spec, shape, scale, zero_point)


def qparams_fault(
    spec: QuantizationSpec, shape: tuple[int, ...], scale: Tensor, zero_point: Tensor
) -> str | None:
    """Why these cannot be the scale and the zero point of a tensor of this shape."""
    if not spec.is_scaled or spec.is_dynamic:
        return None
    axis = spec.ch_axis
    if axis is not None and not -len(shape) <= axis < len(shape):
        return f"there is no axis {axis} of {len(shape)}"
    size = spec.group_size
    if spec.qscheme == "per_channel" and size is not None and shape[0] % size:
        return f"its first axis, {shape[0]} long, is no stack of tensors {size} long"
    wanted = scale_shape(shape, spec.cut)
    if tuple(scale.shape) != wanted:
        return f"it has {tuple(scale.shape)} scales, not {wanted}"
    if not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
        return "its scale is not finite and positive"
    if zero_point.shape != scale.shape:
        return f"it has {tuple(zero_point.shape)} zero points, not {wanted}"
    if spec.dtype == "int" and zero_point.numel():
        low, high = int(zero_point.min()), int(zero_point.max())
        if (
            low < spec.quant_min
            or high > spec.quant_max
            or (spec.symmetric and spec.signed and (low or high))
        ):
            return (
                f"its zero point is not between {spec.quant_min} and {spec.quant_max}, or not "
                "0 where it has to be"
            )
    return None


def _channels(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The shape of a bias of a layer, a batch norm that could not fold included; None for one
    that cannot have any.
    """
    if node.is_multiplying:
        return channels_of(node, graph.weight(node))[:1]
    scales = (
        node.row.kind == "mac" and node.row.channels is not None and "weight" in node.params
    )
    return tuple(graph.weight(node).shape) if scales else None


def _unlike(graph: Graph, layer: str, key: str, value: Tensor) -> str | None:
    """Why a tensor cannot stand for a layer's parameter; one that an algorithm gave it is a
    bias.
    """
    node = graph.by_name.get(layer)
    if node is None:
        return "there is no such layer"
    path = node.params.get(key)
    if path is None and key != "bias":
        return "the layer has no such parameter"
    like = graph.tensors[path] if path is not None else graph.weight(node)
    if path is not None and like.shape != value.shape:
        return f"it is {tuple(value.shape)}, and the parameter is {tuple(like.shape)}"
    if value.dtype != like.dtype:
        return f"it is of {value.dtype}, and the parameter of {like.dtype}"
    return None if _is_sound(value) else "it is not finite"


def check_adjustment(
    found: Adjustment,
    graph: Graph,
    specs: Mapping[tuple[str, str], QuantizationSpec],
    what: str,
) -> None:
    """Refuse what a checkpoint says that algorithms have found, where it does not fit the
    model.

    Raises:
        ResultError: naming the layer.
    """
    check_insertions(found.insertions, graph, what)
    graph = inserted(graph, found.insertions)
    named = [
        (layer, key, value)
        for layer, own in found.parameters.items()
        for key, value in own.items()
    ]
    for layer, key, value in [
        *named,
        *((layer, "weight", row.weight) for layer, row in found.rounded.items()),
    ]:
        if why := _unlike(graph, layer, key, value):
            raise damaged(what, layer, why)
    if not all(
        math.isfinite(each)
        for row in found.rounded.values()
        for each in (row.before, row.after)
    ):
        raise damaged(what, "the errors of layers", "they are not finite")
    for layer, qparams in [
        *found.qparams.items(),
        *((layer, row.qparams) for layer, row in found.rounded.items()),
    ]:
        spec, node = specs.get((layer, "weights")), graph.by_name.get(layer)
        shape = (
            tuple(graph.weight(node).shape)
            if node is not None and "weight" in node.params
            else ()
        )
        why = (
            "its weights are not quantized"
            if spec is None
            else qparams_fault(spec, shape, *vars(qparams).values())
        )
        if why:
            raise damaged(what, layer, why)


def check_weight(graph: Graph, layer: str, value: Tensor, what: str) -> None:
    """Refuse what is no weight of a layer.

    Raises:
        ResultError: saying why.
    """
    if why := _unlike(graph, layer, "weight", value):
        raise damaged(what, layer, why)


def _is_sound(value: Tensor) -> bool:
    """Whether a tensor is of numbers, finite; of one that is deferred its dtype has to do."""
    return value.is_floating_point() and (
        isinstance(value, DeferredTensor) or bool(torch.isfinite(value).all())
    )
