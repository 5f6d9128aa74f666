"""Check the content of a result folder's files: against their schemas, and by rules that
schemas cannot express. Anybody may have written these files.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from quantizer.config.forms.form import Form
from quantizer.config.json_types import fits
from quantizer.config.model import ROLES, QuantizationSpec, Role, Settings
from quantizer.config.resources import load_resource
from quantizer.config.roles import base_role, is_parameter
from quantizer.config.rules.spec_rules import Conflict, conflicts
from quantizer.config.wording import first_names
from quantizer.errors import ResultError
from quantizer.plugins import remedy_for_absent
from quantizer.storage.files import damaged, read_json
from quantizer.storage.opened_files import OpenFile
from quantizer.tables import NUMBER_FORMATS, RANGE_METHODS

_MAX_INPUT_VALUES = 1 << 31
_SPEC_HINTS = get_type_hints(QuantizationSpec)
"""The types of the fields of a spec. Evaluating them takes longer than checking one spec."""
_SETTINGS_HINTS = get_type_hints(Settings)
del _SETTINGS_HINTS["places"]
_WORDS: Mapping[str, Mapping[str, Any]] = {"method": RANGE_METHODS, "dtype": NUMBER_FORMATS}
"""The tables of words of specs, by key. Plain integers have no row."""
_SIMPLE_SCHEMAS: list[tuple[dict[str, str], set[type]]] = [
    ({"type": "number"}, {int, float}),
    ({"type": "integer"}, {int}),
    ({"type": "string"}, {str}),
]
"""Schemas of single numbers and texts, with the Python types of the values that fit them."""


def check_content(content: Any, path: Path) -> None:
    """Check that the content of quant_info.json fits its schema, and that calibration can have
    written its values together.

    Raises:
        ResultError: naming the file, the place in it and the reason.
    """
    _check_schema(content, path, "quant_info.schema.json")
    header = content["header"]
    fault = _field_fault(header["settings"], _SETTINGS_HINTS)
    if fault is not None:
        raise damaged(path, "header/settings", fault)
    for index, shape in enumerate(header["inputs"]):
        sizes = [size or 1 for size in shape or ()]
        if math.prod(sizes) > _MAX_INPUT_VALUES:
            why = f"{shape} has more than {_MAX_INPUT_VALUES} values"
            raise damaged(path, f"header/inputs/{index}", why)
    first_sizes = {shape[0] for shape in header["inputs"] if shape}
    if first_sizes == {0}:
        raise damaged(path, "header/inputs", "a batch without samples")
    for layer, roles in content["tensors"].items():
        for role, entry in roles.items():
            _require_words(f"tensors/{layer}/{role} of {path}", entry["spec"])
            fault = spec_fault(entry["spec"], role) or _number_fault(entry)
            if fault is not None:
                raise damaged(path, f"tensors/{layer}/{role}", fault)


def _require_words(place: object, fields: Mapping[str, Any]) -> None:
    """Refuse a spec with a word that a plug-in may have added.

    Raises:
        ResultError: naming the word.
    """
    for key, known in _WORDS.items():
        word = fields.get(key)
        if isinstance(word, str) and word != "int" and word not in known:
            raise ResultError(
                f"{place} has the {key} {word!r}, which is not there",
                help=[remedy_for_absent(word), "or run <--quant_mode calib> again"],
            )


def _field_fault(values: Mapping[str, Any], hints: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the values of a dataclass by name, or None if they have the
    names and types of its fields.
    """
    unexpected = sorted(values.keys() ^ hints.keys())
    if unexpected:
        return f"it lacks or has {first_names(unexpected)}"
    for name, value in values.items():
        if not fits(value, hints[name]):
            return f"{value!r} is not a valid {name}"
    return None


def checked_json(file: OpenFile) -> Any:
    """Return the content of a JSON file of a result folder, checked against the schema for its
    name if there is one.

    Raises:
        ResultError: the file is missing or damaged; the place in it is named.
    """
    name = file.path.name
    content = read_json(file)
    if name in load_resource("schemas", _RESULT_FILES)["definitions"]:
        check_result_file(content, file.path, name)
    return content


def check_result_file(content: Any, path: Path, name: str) -> None:
    """Check the content of a file against the schema for a name.

    Raises:
        ResultError: naming the first place that does not fit.
    """
    _check_schema(content, path, _RESULT_FILES, name)


_RESULT_FILES = "result_files.schema.json"


def _check_schema(content: Any, path: Path, schema: str, definition: str | None = None) -> None:
    """Check content against a schema.

    Args:
        content: of the file.
        path: the file, for errors.
        schema: the file of the schema.
        definition: the part of the schema to use, or None for all of it.

    Raises:
        ResultError: naming the first place that does not fit.
    """
    for error in _validator(schema, definition).iter_errors(content):
        place = "/".join(map(str, error.absolute_path))
        raise damaged(path, place, error.message)


@cache
def _validator(schema: str, definition: str | None) -> Any:
    """Return a validator for a schema, or for a definition in it.

    It is stricter than the standard for integers, and faster for lists of numbers or texts.
    """
    # Imported here, as it is slow
    from jsonschema import Draft7Validator, validators

    def is_integer(_: Any, value: object) -> bool:
        # For JSON Schema, 8.0 is an integer. torch refuses it as a size
        return isinstance(value, int) and not isinstance(value, bool)

    check_items = Draft7Validator.VALIDATORS["items"]

    def items(
        validator: Any, item_schema: Any, values: Any, parent_schema: Any
    ) -> Iterator[Any]:
        # The library checks each value, which takes long for the scales of a network
        if not isinstance(values, list) or not _fits_plainly(item_schema, values):
            yield from check_items(validator, item_schema, values, parent_schema)

    document = load_resource("schemas", schema)
    if definition is not None:
        document = {**document, "$ref": f"#/definitions/{definition}"}
    type_checker = Draft7Validator.TYPE_CHECKER.redefine("integer", is_integer)
    strict: Any = validators.extend(  # type: ignore[no-untyped-call]
        Draft7Validator, {"items": items}, type_checker=type_checker
    )
    return strict(document)


def _fits_plainly(item_schema: Any, values: list[Any]) -> bool:
    """Return whether an item schema is one of `_SIMPLE_SCHEMAS`, and all values fit it."""
    types = set(map(type, values))
    for schema, accepted in _SIMPLE_SCHEMAS:
        if schema == item_schema:
            return types <= accepted
    return False


def _number_fault(entry: Mapping[str, Any]) -> str | None:
    """Return why calibration cannot have written the numbers of a tensor's entry, or None if it
    can.
    """
    for name in ("scale", "observed_min", "observed_max"):
        numbers = entry.get(name, [])
        if not isinstance(numbers, (list, tuple)):
            numbers = [numbers]
        if not all(map(math.isfinite, numbers)):
            return "it holds numbers that are not finite"
    spec = QuantizationSpec(**entry["spec"])
    if spec.dtype != "int":
        return None
    least = entry.get("quant_min", spec.quant_min)
    most = entry.get("quant_max", spec.quant_max)
    if (least, most) != (spec.quant_min, spec.quant_max):
        return f"its codes are from {spec.quant_min} to {spec.quant_max}"
    return None


def spec_fault(fields: Mapping[str, Any], role: str) -> str | None:
    """Return why these cannot be the fields of a spec for a tensor in a role, or None if they
    can.
    """
    fault = _field_fault(fields, _SPEC_HINTS)
    if fault is not None:
        return fault
    spec = QuantizationSpec(**fields)
    return _format_fault(spec) or _granularity_fault(spec, role) or _rule_fault(spec, role)


def _format_fault(spec: QuantizationSpec) -> str | None:
    """Return what is wrong with a spec's number format."""
    if spec.dtype == "int":
        if 2 <= spec.bit_width <= 32:
            return None
        return f"there are no integers of {spec.bit_width} bits"
    if spec.dtype in NUMBER_FORMATS:
        return None
    return f"there is no number format {spec.dtype!r}"


def _granularity_fault(spec: QuantizationSpec, role: str) -> str | None:
    """Return what is wrong with the groups and channels of a spec."""
    with_groups = ["per_group"]
    if is_parameter(role):
        # A layer of experts has one scale per expert, which is a group
        with_groups += ["per_tensor", "per_block"]
        if spec.ch_axis:
            # A transposed convolution with groups has its channels group by group
            with_groups.append("per_channel")
    size = spec.group_size
    if size == -1 and spec.qscheme == "per_group":
        # -1 stands for one group per channel
        size = None
    if size is not None and (size < 1 or spec.qscheme not in with_groups):
        return f"{spec.qscheme} has no groups of {size}"
    if spec.qscheme == "per_block" and size is None:
        return "per_block has no group_size"
    if spec.qscheme in ("per_channel", "per_group") and spec.ch_axis is None:
        return f"{spec.qscheme} has no ch_axis"
    return None


def _rule_fault(spec: QuantizationSpec, role: str) -> str | None:
    """Return the rule that a spec breaks in both forms of the config, or None if there is none.

    One form may allow what the other forbids, and quant_info.json does not say which one the
    user's config has.
    """
    base = base_role(role)
    if base not in ROLES:
        return f"there is no role {role!r}"
    layered, hierarchical = (_conflicts_by_code(spec, base, form) for form in get_args(Form))
    for code in sorted(layered.keys() & hierarchical.keys()):
        conflict = layered[code]
        if conflict.severity == "error":
            return f"{code}: {conflict.message}"
    return None


def _conflicts_by_code(spec: QuantizationSpec, role: Role, form: str) -> dict[str, Conflict]:
    broken = conflicts(spec, role, "CPU", form)
    return {conflict.code: conflict for conflict in broken}
