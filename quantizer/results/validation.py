"""Results are data that anyone may have written: before a value is used, it is checked against
the schema, against itself, and against the graph of the model that it is for. What calibration
cannot have written is refused.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from quantizer.config.forms.form import Form
from quantizer.config.model import ROLES, QuantizationSpec, Settings
from quantizer.config.resources import load_resource
from quantizer.config.roles import base_role, is_parameter
from quantizer.config.rules.spec_rules import conflicts
from quantizer.config.typed_fields import fits
from quantizer.config.wording import first_names
from quantizer.numerics.formats import FLOAT_FORMATS
from quantizer.storage.files import damaged, read_json
from quantizer.storage.opened_files import OpenFile

AGAIN = "run --quant_mode calib again"
LARGEST = 1 << 31
"""Values of an input that a result may ask for."""
_PLAIN: list[tuple[dict[str, str], set[type]]] = [
    ({"type": "number"}, {int, float}),
    ({"type": "integer"}, {int}),
    ({"type": "string"}, {str}),
]
"""Schemas, and the types of Python that fit them: a list of no others is not gone through value
by value.
"""


def check_content(content: Any, path: Path) -> None:
    """Refuse content of quant_info.json that is not of its schema, or disagrees with itself.

    Raises:
        ResultError: with the file, the place in it and the reason.
    """
    _check_schema(content, path, "quant_info.schema.json")
    header = content["header"]
    hints = {name: hint for name, hint in get_type_hints(Settings).items() if name != "places"}
    if strange := header["settings"].keys() ^ hints.keys():
        raise damaged(
            path, "header/settings", f"it lacks or has {first_names(sorted(strange))}"
        )
    for name, value in header["settings"].items():
        if not fits(value, hints[name]):
            raise damaged(path, f"header/settings/{name}", f"{value!r} is no such setting")
    for index, shape in enumerate(header["inputs"]):
        if math.prod(size or 1 for size in shape or ()) > LARGEST:
            raise damaged(
                path, f"header/inputs/{index}", f"{shape} has more than {LARGEST} values"
            )
    first_sizes = {shape[0] for shape in header["inputs"] if shape}
    if first_sizes == {0}:
        raise damaged(path, "header/inputs", "a batch without samples")
    for layer, roles in content["tensors"].items():
        for role, entry in roles.items():
            if why := _misfit(entry, role):
                raise damaged(path, f"tensors/{layer}/{role}", why)


def checked_json(file: OpenFile) -> Any:
    """A JSON file of a result folder, checked against its schema if there is one for its name.

    Raises:
        ResultError: it is missing or damaged; the place in it is named.
    """
    path, content, schema = file.path, read_json(file), "result_files.schema.json"
    if path.name in load_resource("schemas", schema)["definitions"]:
        _check_schema(content, path, schema, path.name)
    return content


def _check_schema(content: Any, path: Path, schema: str, definition: str | None = None) -> None:
    for error in _validator(schema, definition).iter_errors(content):
        raise damaged(path, "/".join(map(str, error.absolute_path)), error.message)


@cache
def _validator(schema: str, definition: str | None) -> Any:
    # Takes as long to import as a fifteenth of torch
    from jsonschema import Draft7Validator, validators

    def is_integer(_: Any, value: object) -> bool:
        # To a schema 8.0 is one, to torch it is none
        return isinstance(value, int) and not isinstance(value, bool)

    whole = load_resource("schemas", schema)
    used = whole if definition is None else {**whole, "$ref": f"#/definitions/{definition}"}
    checker = Draft7Validator.TYPE_CHECKER.redefine("integer", is_integer)
    every = Draft7Validator.VALIDATORS["items"]

    def items(validator: Any, each: Any, instance: Any, around: Any) -> Iterator[Any]:
        types = next((types for schema, types in _PLAIN if schema == each), set())
        if not isinstance(instance, list) or not types.issuperset(map(type, instance)):
            yield from every(validator, each, instance, around)

    strict: Any = validators.extend(Draft7Validator, {"items": items}, type_checker=checker)  # type: ignore[no-untyped-call]
    return strict(used)


def _misfit(entry: Mapping[str, Any], role: str) -> str | None:
    """Why calibration cannot have written the entry of a tensor, whatever its model."""
    if why := spec_fault(entry["spec"], role):
        return why
    numbers = [
        value
        for name in ("scale", "observed_min", "observed_max")
        for value in _flat(entry.get(name, []))
    ]
    if not all(map(math.isfinite, numbers)):
        return "it holds numbers that are not finite"
    spec = QuantizationSpec(**entry["spec"])
    limits = {"quant_min": spec.quant_min, "quant_max": spec.quant_max}
    if spec.dtype == "int" and any(
        entry.get(name, value) != value for name, value in limits.items()
    ):
        return f"its codes are from {spec.quant_min} to {spec.quant_max}"
    return None


def spec_fault(words: Mapping[str, Any], role: str) -> str | None:
    """Why these cannot be the fields of a spec for a tensor in a role; None if they can."""
    hints = get_type_hints(QuantizationSpec)
    if words.keys() != hints.keys():
        return f"its spec lacks or has {first_names(sorted(words.keys() ^ hints.keys()))}"
    wrong = next((name for name, value in words.items() if not fits(value, hints[name])), None)
    if wrong is not None:
        return f"{words[wrong]!r} is no {wrong}"
    spec = QuantizationSpec(**words)
    if spec.dtype != "int" and spec.dtype not in FLOAT_FORMATS and spec.is_scaled:
        return f"there is no number format {spec.dtype!r}"
    if spec.dtype == "int" and not 2 <= spec.bit_width <= 32:
        return f"there are no integers of {spec.bit_width} bits"
    grouped = ["per_group"]
    if is_parameter(role):
        grouped.append("per_tensor")  # experts have a scale each
    if is_parameter(role) and spec.ch_axis:
        grouped.append("per_channel")  # of groups of transposed convolutions
    is_whole = spec.qscheme == "per_group" and spec.group_size == -1
    if (
        spec.group_size is not None
        and not is_whole
        and (spec.group_size < 1 or spec.qscheme not in grouped)
    ):
        return f"{spec.qscheme} has no groups of {spec.group_size}"
    if spec.qscheme in ("per_channel", "per_group") and spec.ch_axis is None:
        return f"{spec.qscheme} has no ch_axis"
    if (base := base_role(role)) not in ROLES:
        return f"there is no role {role!r}"
    broken = [
        {each.code: each for each in conflicts(spec, base, "CPU", form)}
        for form in get_args(Form)
    ]
    # One form may allow what the other does not
    for code in sorted(broken[0].keys() & broken[1].keys()):
        if broken[0][code].severity == "error":
            return f"{code}: {broken[0][code].message}"
    return None


def _flat(value: Any) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
