"""Results are data that anyone may have written: before a value is used, it is checked against the schema, against
itself, and against the graph of the model that it is for. What calibration cannot have written is refused.
"""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor

from quantizer.config.form import Form
from quantizer.config.model import ROLES, QuantizationSpec, Settings
from quantizer.config.resources import load_resource
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.config.rules import conflicts
from quantizer.config.typed_fields import fits
from quantizer.config.wording import shortened
from quantizer.engine.result_files import read_json
from quantizer.engine.solution import Solution, writes_inplace
from quantizer.errors import ResultError
from quantizer.graph.edits import by_channel
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.numerics.codes import storage_dtype
from quantizer.numerics.deferred import DeferredTensor
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.numerics.granularity import scale_shape

AGAIN = "run --quant_mode calib again"
LARGEST = 1 << 31
"""Values of an input that a result may ask for."""


def check_content(content: Any, path: Path) -> None:
    """Refuse content of quant_info.json that is not of its schema, or disagrees with itself.

    Raises:
        ResultError: with the file, the place in it and the reason.
    """
    _check_schema(content, path, "quant_info.schema.json")
    header = content["header"]
    hints = {name: hint for name, hint in get_type_hints(Settings).items() if name != "places"}
    if strange := header["settings"].keys() ^ hints.keys():
        raise damaged(path, "header/settings", f"it lacks or has {shortened(sorted(strange))}")
    for name, value in header["settings"].items():
        if not fits(value, hints[name]):
            raise damaged(path, f"header/settings/{name}", f"{value!r} is no such setting")
    for index, shape in enumerate(header["inputs"]):
        if math.prod(size or 1 for size in shape or ()) > LARGEST:
            raise damaged(path, f"header/inputs/{index}", f"{shape} has more than {LARGEST} values")
    for layer, roles in content["tensors"].items():
        for role, entry in roles.items():
            if why := _misfit(entry, role):
                raise damaged(path, f"tensors/{layer}/{role}", why)


def checked_json(path: Path) -> Any:
    """A JSON file of a result folder, checked against its schema if there is one for its name.

    Raises:
        ResultError: it is missing or damaged; the place in it is named.
    """
    content = read_json(path)
    _check_schema(content, path, "result_files.schema.json", path.name)
    return content


def checked_statistics(tensors: Mapping[str, Tensor], path: Path) -> Mapping[str, Tensor]:
    """Statistics as they were read, if calibration can have written them.

    Raises:
        ResultError: naming the tensor.
    """
    for name, tensor in tensors.items():
        if name.count("|") < 2:
            raise damaged(path, name, "it says of no tensor")
        values = tensor.double()
        if name.endswith(("|counts", "|count")):
            if tensor.dtype != torch.int64 or bool((tensor < 0).any()):
                raise damaged(path, name, "it counts nothing")
        elif bool(values.isnan().any()):
            raise damaged(path, name, "it holds NaN")
    return tensors


def _check_schema(content: Any, path: Path, schema: str, definition: str | None = None) -> None:
    for error in _validator(schema, definition).iter_errors(content):
        raise damaged(path, "/".join(map(str, error.absolute_path)), error.message)


@cache
def _validator(schema: str, definition: str | None) -> Any:
    from jsonschema import Draft7Validator, validators  # takes as long to import as a fifteenth of torch

    def is_integer(_: Any, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)  # to a schema 8.0 is one, to torch it is none

    whole = load_resource("schemas", schema)
    used = whole if definition is None else {**whole, "$ref": f"#/definitions/{definition}"}
    checker = Draft7Validator.TYPE_CHECKER.redefine("integer", is_integer)
    strict: Any = validators.extend(Draft7Validator, type_checker=checker)  # type: ignore[no-untyped-call]
    return strict(used)


def damaged(path: Path, where: str, why: str) -> ResultError:
    """The error about a place in a file; long values are cut."""
    short = why if len(why) <= 200 else f"{why[:200]}…"
    return ResultError(f"{path} is damaged: {where}: {short}", help=AGAIN)


def _misfit(entry: Mapping[str, Any], role: str) -> str | None:
    """Why calibration cannot have written the entry of a tensor, whatever its model."""
    if why := spec_fault(entry["spec"], role):
        return why
    numbers = [value for name in ("scale", "observed_min", "observed_max") for value in _flat(entry.get(name, []))]
    if not all(map(math.isfinite, numbers)):
        return "it holds numbers that are not finite"
    spec = QuantizationSpec(**entry["spec"])
    limits = {"quant_min": spec.quant_min, "quant_max": spec.quant_max}
    if spec.dtype == "int" and any(entry.get(name, value) != value for name, value in limits.items()):
        return f"its codes are from {spec.quant_min} to {spec.quant_max}"
    return None


def spec_fault(words: Mapping[str, Any], role: str) -> str | None:
    """Why these cannot be the fields of a spec for a tensor in a role; None if they can."""
    hints = get_type_hints(QuantizationSpec)
    if words.keys() != hints.keys():
        return f"its spec lacks or has {shortened(sorted(words.keys() ^ hints.keys()))}"
    wrong = next((name for name, value in words.items() if not fits(value, hints[name])), None)
    if wrong is not None:
        return f"{words[wrong]!r} is no {wrong}"
    spec = QuantizationSpec(**words)
    if spec.dtype != "int" and spec.dtype not in FLOAT_FORMATS and spec.is_scaled:
        return f"there is no number format {spec.dtype!r}"
    if spec.dtype == "int" and not 2 <= spec.bit_width <= 32:
        return f"there are no integers of {spec.bit_width} bits"
    if (base := base_role(role)) not in ROLES:
        return f"there is no role {role!r}"
    broken = [{each.code: each for each in conflicts(spec, base, "CPU", form)} for form in get_args(Form)]
    for code in sorted(
        broken[0].keys() & broken[1].keys()
    ):  # what one form allows, and the devices' own defaults, may be
        if broken[0][code].severity == "error":
            return f"{code}: {broken[0][code].message}"
    return None


def _flat(value: Any) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_insertions(solution: Solution, original: Graph, path: Path) -> None:
    """Refuse layers that cannot be inserted into a graph.

    Raises:
        ResultError: naming the first.
    """
    known = set(original.by_name)
    shapes = {node.name: node.shape or () for node in original.nodes}
    for row in solution.insertions:
        strange = [name for name in (row.source, *row.readers) if name not in known]
        if strange or row.name in known or not row.readers:
            what = strange[0] if strange else row.name
            raise damaged(path, f"header/insertions/{row.name}", f"{what} does not fit the model")
        shape = shapes[row.source]
        axis = row.attrs.get("axis", -1)
        if not fits(axis, int) or not -len(shape) <= axis < len(shape) or tuple(row.weight.shape) != (shape[axis],):
            raise damaged(path, f"header/insertions/{row.name}", "it does not have the channels of what it reads")
        if not _is_sound(row.weight):
            raise damaged(path, f"header/insertions/{row.name}", "its weight is not finite")
        known.add(row.name)
        shapes[row.name] = shape


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
        fits_layer = node is not None and tuple(value.shape) == _channels(graph, node)
        if node is None or not fits_layer or value.dtype != graph.weight(node).dtype or not _is_sound(value):
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
    like = graph.tensors[path] if path is not None else graph.weight(node)
    if path is not None and like.shape != value.shape:
        return f"it is {tuple(value.shape)}, and the parameter is {tuple(like.shape)}"
    if value.dtype != like.dtype:
        return f"it is of {value.dtype}, and the parameter of {like.dtype}"
    return None if _is_sound(value) else "it is not finite"


def _is_sound(value: Tensor) -> bool:
    """Whether a tensor is of numbers, finite; of one that is deferred its dtype has to do."""
    return value.is_floating_point() and (isinstance(value, DeferredTensor) or bool(torch.isfinite(value).all()))
