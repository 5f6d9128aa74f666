"""Checks stored values against the graph of the model that they are for. Errors name the layer
that a value does not fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.calibration.solution import Solution, writes_inplace
from quantizer.config.json_types import fits
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter, parameter_name
from quantizer.graph.edits import Insertion, channels_of
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantizer import QuantizedTensor
from quantizer.numerics.codes import storage_dtype
from quantizer.numerics.formats import has_minimum
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.qparams import QParams
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.files import damaged

_Parameters = Mapping[str, Mapping[str, Tensor]]


def check_insertions(
    insertions: Sequence[Insertion], original: Graph, path: Path | str
) -> None:
    """Refuse layers that cannot be inserted into a graph.

    Raises:
        ResultError: naming the first.
    """
    shapes = {node.name: node.shape or () for node in original.nodes}
    for row in insertions:
        fault = _insertion_fault(row, shapes)
        if fault:
            raise damaged(path, f"header/insertions/{row.name}", fault)
        shapes[row.name] = shapes[row.source]


def _insertion_fault(
    row: Insertion, shapes: Mapping[str, tuple[int | None, ...]]
) -> str | None:
    """Return why a layer cannot be inserted into a graph whose values have these shapes."""
    for name in (row.source, *row.readers):
        if name not in shapes:
            return f"{name} does not fit the model"
    if row.name in shapes or not row.readers:
        return f"{row.name} does not fit the model"
    shape = shapes[row.source]
    axis = row.attrs.get("axis", -1)
    has_axis = fits(axis, int) and -len(shape) <= axis < len(shape)
    if not has_axis or tuple(row.weight.shape) != (shape[axis],):
        return "it does not have the channels of what it reads"
    return None if is_sound(row.weight) else "its weight is not finite"


def check_solution(
    solution: Solution, entries: Mapping[str, Any], graph: Graph, path: Path
) -> None:
    """Refuse values that do not fit their layers.

    Raises:
        ResultError: naming the first tensor, and why.
    """
    modules = {node.name: f"module_{index}" for index, node in enumerate(graph.nodes)}
    for (layer, role), tensor in solution.tensors.items():
        entry = entries[layer][role]
        fault = _tensor_fault(graph, layer, role, tensor)
        if fault is None and entry["module"] != modules[layer]:
            fault = f"the layer is {modules[layer]}, not {entry['module']}"
        if fault is None and entry["inplace"] != writes_inplace(graph, layer, role):
            fault = "inplace is another"
        if fault:
            raise damaged(path, f"tensors/{layer}/{role}", fault)
    replaced = {"weights": solution.weights, "rescaled": solution.rescaled}
    for kind, parameters in replaced.items():
        for layer, key, reason in parameter_faults(graph, parameters):
            raise damaged(path, f"header/replaced/{layer}/{kind}/{key}", reason)
    for layer, value in solution.corrections.items():
        if not _is_correction(graph, layer, value):
            file = path.with_name("bias_corr.safetensors")
            raise damaged(file, layer, "it is not a correction of a layer's bias")


def _tensor_fault(graph: Graph, layer: str, role: str, tensor: QuantizedTensor) -> str | None:
    """Return why a tensor cannot be one of this layer."""
    node = graph.by_name.get(layer)
    if node is None:
        return "there is no such layer"
    if is_parameter(role):
        path = node.params.get(parameter_name(role))
        if path is None:
            return "the layer has no such parameter"
        parameter = graph.tensors[path]
        fault = _codes_fault(tensor, parameter)
        if fault:
            return fault
        shape = tuple(parameter.shape)
    else:
        source: Node | None = node
        if role != "activation" and node.op != "input":
            source = graph.by_name.get(node.input_roles().get(role, ""))
        if source is None:
            return "the layer has no such input"
        # Open sizes count as 0
        shape = tuple(size or 0 for size in source.shape or ())
    return qparams_fault(tensor.spec, shape, QParams(tensor.scale, tensor.zero_point))


def _codes_fault(tensor: QuantizedTensor, parameter: Tensor) -> str | None:
    """Return why the codes of a tensor cannot be those of a parameter."""
    codes = tensor.codes
    if codes is None:
        return None
    if codes.shape != parameter.shape or tensor.dtype != parameter.dtype:
        return (
            f"its codes are {tuple(codes.shape)} of {tensor.dtype}, and the parameter is "
            f"{tuple(parameter.shape)} of {parameter.dtype}"
        )
    dtype = storage_dtype(tensor.spec)
    if codes.dtype != dtype:
        return f"its codes are stored as {codes.dtype}, not {dtype}"
    return None


def qparams_fault(
    spec: QuantizationSpec, shape: tuple[int, ...], qparams: QParams
) -> str | None:
    """Return why a tensor of this shape cannot have these scales and zero points."""
    if not spec.has_stored_scale:
        return None
    spec = spec.stored
    axis = spec.ch_axis
    if axis is not None and not -len(shape) <= axis < len(shape):
        return f"there is no axis {axis} of {len(shape)}"
    size = spec.group_size
    if spec.qscheme == "per_channel" and size is not None and shape[0] % size:
        return f"its first axis, {shape[0]} long, is not a stack of tensors {size} long"
    return scales_fault(spec, scale_shape(shape, spec.cut), qparams)


def scales_fault(
    spec: QuantizationSpec, expected: tuple[int, ...], qparams: QParams
) -> str | None:
    """Return why these cannot be the scales and zero points of a static tensor whose scales
    have the `expected` shape.
    """
    scale = qparams.scale
    zero_point = qparams.zero_point
    if tuple(scale.shape) != expected:
        return f"it has {tuple(scale.shape)} scales, not {expected}"
    if spec.has_signed_scale:
        scale = scale.abs()
    is_positive = scale.isfinite() & (scale > 0)
    if not bool(is_positive.all()):
        return "its scale is not finite and positive"
    if zero_point.shape != scale.shape:
        return f"it has {tuple(zero_point.shape)} zero points, not {expected}"
    if has_minimum(spec.dtype) and not bool((zero_point.isfinite() & (zero_point >= 0)).all()):
        return "a minimum is not finite, or above 0"
    if spec.dtype != "int" or not zero_point.numel():
        return None
    low = int(zero_point.min())
    high = int(zero_point.max())
    is_in_range = spec.quant_min <= low and high <= spec.quant_max
    must_be_zero = spec.symmetric and spec.signed
    if not is_in_range or (must_be_zero and (low or high)):
        return (
            f"its zero point is not between {spec.quant_min} and {spec.quant_max}, or not 0 "
            "where it has to be"
        )
    return None


def _is_correction(graph: Graph, layer: str, value: Tensor) -> bool:
    """Return whether a tensor can be added to the bias of a layer."""
    node = graph.by_name.get(layer)
    if node is None or tuple(value.shape) != _bias_shape(graph, node):
        return False
    return value.dtype == graph.weight(node).dtype and is_sound(value)


def _bias_shape(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """Return the shape of a layer's bias; None if it cannot have any.

    A batch norm that could not be folded has one.
    """
    if node.is_multiplying:
        return channels_of(node, graph.weight(node))[:1]
    if node.row.kind == "mac" and node.row.channels is not None and "weight" in node.params:
        return tuple(graph.weight(node).shape)
    return None


def parameter_faults(graph: Graph, parameters: _Parameters) -> Iterator[tuple[str, str, str]]:
    """Yield layer and key of each parameter that does not fit its layer, and why."""
    for layer, values in parameters.items():
        for key, value in values.items():
            fault = parameter_fault(graph, layer, key, value)
            if fault:
                yield layer, key, fault


def parameter_fault(graph: Graph, layer: str, key: str, value: Tensor) -> str | None:
    """Return why a tensor cannot replace a layer's parameter, or be the bias of a layer without
    one.
    """
    node = graph.by_name.get(layer)
    if node is None:
        return "there is no such layer"
    path = node.params.get(key)
    if path is not None:
        like = graph.tensors[path]
        if like.shape != value.shape:
            return f"it is {tuple(value.shape)}, and the parameter is {tuple(like.shape)}"
    elif key == "bias":
        like = graph.weight(node)
    else:
        return "the layer has no such parameter"
    if value.dtype != like.dtype:
        return f"it is of {value.dtype}, and the parameter of {like.dtype}"
    return None if is_sound(value) else "it is not finite"


def is_sound(value: Tensor) -> bool:
    """Return whether a tensor has finite values in a floating-point dtype of 16 bits or more.

    Of a deferred one, only the dtype is checked.
    """
    if not value.is_floating_point() or value.dtype.itemsize == 1:
        return False
    return isinstance(value, DeferredTensor) or bool(torch.isfinite(value).all())
