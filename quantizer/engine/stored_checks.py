"""Results are data that anyone may have written: before a value is used, it is checked against the schema, against
itself, and against the graph of the model that it is for. What calibration cannot have written is refused.
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec, Settings
from quantizer.config.resources import load_resource
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.config.rules import conflicts
from quantizer.config.typed_fields import fits
from quantizer.config.wording import shortened
from quantizer.engine.solution import Solution, writes_inplace
from quantizer.errors import ResultError
from quantizer.graph.edits import by_channel
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import storage_dtype
from quantizer.numerics.deferred import DeferredTensor
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.numerics.granularity import scale_shape

FORMS = ("layered", "hierarchical")
AGAIN = "run --quant_mode calib again"
LARGEST = 1 << 31
"""Values of an input that a result may ask for."""


def check_content(content: Any, path: Path) -> None:
    """Refuse content of quant_info.json that is not of its schema, or disagrees with itself.

    Raises:
        ResultError: with the file, the place in it and the reason.
    """
    for error in _validator().iter_errors(content):
        where = "/".join(map(str, error.absolute_path))
        raise damaged(path, where, error.message)
    header = content["header"]
    for name, value in header["settings"].items():
        hint = get_type_hints(Settings).get(name)
        if hint is None or name == "places" or not fits(value, hint):
            raise damaged(path, f"header/settings/{name}", f"{value!r} is no such setting")
    for index, shape in enumerate(header["inputs"]):
        if math.prod(size or 1 for size in shape or ()) > LARGEST:
            raise damaged(path, f"header/inputs/{index}", f"{shape} has more than {LARGEST} values")
    for layer, roles in content["tensors"].items():
        for role, entry in roles.items():
            if why := _misfit(entry, role):
                raise damaged(path, f"tensors/{layer}/{role}", why)


@cache
def _validator() -> Any:
    from jsonschema import Draft7Validator  # takes as long to import as a fifteenth of torch

    return Draft7Validator(load_resource("schemas", "quant_info.schema.json"))


def damaged(path: Path, where: str, why: str) -> ResultError:
    """The error about a place in a file; long values are cut."""
    short = why if len(why) <= 200 else f"{why[:200]}…"
    return ResultError(f"{path} is damaged: {where}: {short}", help=AGAIN)


def _misfit(entry: Mapping[str, Any], role: str) -> str | None:
    """Why calibration cannot have written the entry of a tensor, whatever its model."""
    spec = entry["spec"]
    hints = get_type_hints(QuantizationSpec)
    if spec.keys() != hints.keys():
        return f"its spec lacks or has {shortened(sorted(spec.keys() ^ hints.keys()))}"
    wrong = next((name for name, value in spec.items() if not fits(value, hints[name])), None)
    if wrong is not None:
        return f"{spec[wrong]!r} is no {wrong}"
    read = QuantizationSpec(**spec)
    if read.dtype != "int" and read.dtype not in FLOAT_FORMATS and read.is_scaled:
        return f"there is no number format {read.dtype!r}"
    if read.dtype == "int" and not 2 <= read.bit_width <= 32:
        return f"there are no integers of {read.bit_width} bits"
    if base_role(role) not in ("input", "weights", "bias", "activation"):
        return f"there is no role {role!r}"
    forms = (
        [each for each in conflicts(read, base_role(role), "CPU", form) if each.severity == "error"] for form in FORMS
    )
    broken = [{each.code: each for each in found} for found in forms]
    if both := sorted(broken[0].keys() & broken[1].keys()):  # the device's rules leave its own default out
        return f"{both[0]}: {broken[0][both[0]].message}"
    numbers = [value for name in ("scale", "observed_min", "observed_max") for value in _flat(entry.get(name, []))]
    if not all(map(math.isfinite, numbers)):
        return "it holds numbers that are not finite"
    limits = {"quant_min": read.quant_min, "quant_max": read.quant_max}
    if read.dtype == "int" and any(entry.get(name, value) != value for name, value in limits.items()):
        return f"its codes are from {read.quant_min} to {read.quant_max}"
    return None


def _flat(value: Any) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_insertions(solution: Solution, original: Graph, path: Path) -> None:
    """Refuse layers that cannot be inserted into a graph.

    Raises:
        ResultError: naming the first.
    """
    known = set(original.by_name)
    for row in solution.insertions:
        strange = [name for name in (row.source, *row.readers) if name not in known]
        if strange or row.name in known or not row.readers:
            what = strange[0] if strange else row.name
            raise damaged(path, f"header/insertions/{row.name}", f"{what} does not fit the model")
        known.add(row.name)


def check_solution(solution: Solution, entries: Mapping[str, Any], graph: Graph, path: Path) -> None:
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
        if node is None or tuple(value.shape) != _channels(graph, node) or not _is_sound(value):
            raise damaged(path.with_name("bias_corr.safetensors"), layer, "it is no correction of a layer's bias")


def _unfit(graph: Graph, node: Node, role: str, tensor: QuantizedTensor) -> str | None:
    """Why a tensor is not one of this layer."""
    spec, scale, zero_point = tensor.spec, tensor.scale, tensor.zero_point
    if is_parameter(role):
        path = node.params.get(parameter_name(role))
        if path is None:
            return "the layer has no such parameter"
        value = graph.tensors[path]
        shape = tuple(value.shape)
        if tensor.codes is not None and (tuple(tensor.codes.shape) != shape or tensor.dtype != value.dtype):
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
    if not spec.is_scaled or spec.is_dynamic:
        return None
    axis = spec.ch_axis
    if axis is not None and not -len(shape) <= axis < len(shape):
        return f"there is no axis {axis} of {len(shape)}"
    wanted = scale_shape(shape, *spec.cut)
    if tuple(scale.shape) != wanted:
        return f"it has {tuple(scale.shape)} scales, not {wanted}"
    if not bool(torch.isfinite(scale).all()) or not bool((scale > 0).all()):
        return "its scale is not finite and positive"
    if zero_point.shape != scale.shape:
        return "it has as many zero points as scales, but not here"
    if spec.dtype == "int" and zero_point.numel():
        low, high = int(zero_point.min()), int(zero_point.max())
        if low < spec.quant_min or high > spec.quant_max or (spec.symmetric and spec.signed and (low or high)):
            return f"its zero point is not between {spec.quant_min} and {spec.quant_max}, or not 0 where it has to be"
    return None


def _channels(graph: Graph, node: Node) -> tuple[int, ...] | None:
    """The shape of a bias of a layer; None for one that cannot have any."""
    return (by_channel(node, graph.weight(node)).shape[:2].numel(),) if node.is_multiplying else None


def _unlike(graph: Graph, layer: str, key: str, value: Tensor) -> str | None:
    """Why a tensor cannot stand for a layer's parameter; one that an algorithm gave it is a bias."""
    node = graph.by_name.get(layer)
    if node is None:
        return "there is no such layer"
    path = node.params.get(key)
    if path is None and key != "bias":
        return "the layer has no such parameter"
    if path is not None and graph.tensors[path].shape != value.shape:
        return f"it is {tuple(value.shape)}, and the parameter is {tuple(graph.tensors[path].shape)}"
    return None if _is_sound(value) else "it is not finite"


def _is_sound(value: Tensor) -> bool:
    """Whether a tensor is of numbers, finite; of one that is deferred its dtype has to do."""
    return value.is_floating_point() and (isinstance(value, DeferredTensor) or bool(torch.isfinite(value).all()))
