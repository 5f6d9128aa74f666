"""Merge the fields of several rules into one spec."""

import dataclasses
from collections.abc import Mapping, Sequence

from quantizer.config.model import AUTO_METHOD, POOLED, Fields, QuantizationSpec, Role, Sourced
from quantizer.config.roles import is_parameter
from quantizer.config.rules.spec_rules import is_foreign, other_weight_axis
from quantizer.numerics.formats import SHARED_EXPONENTS
from quantizer.plan.match import MatchedRule

MergedSpec = tuple[QuantizationSpec | None, dict[str, Sourced]]
"""A spec and the origin of each field that a rule sets."""

_KINDRED = frozenset(
    {
        "bit_width",
        "signed",
        "symmetric",
        "narrow_range",
        "symmetric_scale",
        "round_mode",
        "scale_mode",
    }
)
"""Fields that integers do not inherit from floating-point formats, nor these from integers."""
_QSCHEMES_WITH_AXIS = {"per_channel", "per_group"}
_SPEC_FIELDS = tuple(field.name for field in dataclasses.fields(QuantizationSpec))
_DERIVED_FIELDS = ("ch_axis", "finest_position")
"""Fields whose default depends on the layer or on the device, so that their origin is not
"default".
"""


def merge_fields(blocks: Sequence[Fields], role: Role) -> dict[str, Sourced]:
    """Return each field from the strongest rule that sets it. `blocks` are the rules' fields
    for one role, weakest first.

    A shared exponent belongs to the format that states it, just as the symmetry and the
    rounding of integers belong to integers. The axis changes if channels with a scale each
    become groups, or groups become channels.

    >>> words = {"dtype": Sourced("int"), "symmetric": Sourced(False)}
    >>> merge_fields([words, {"dtype": Sourced("fp4")}], "weights")
    {'dtype': Sourced(value='fp4', place=None)}
    """
    last_dtype = None
    for fields in blocks:
        if "dtype" in fields:
            last_dtype = fields["dtype"].value
    values: dict[str, Sourced] = {}
    dtype: str | None = None
    for fields in blocks:
        if "dtype" in fields:
            new_dtype = fields["dtype"].value
            if _ends_scale_type(_value(values, "scale_type"), dtype, new_dtype):
                del values["scale_type"]
            dtype = new_dtype
        qscheme = _value(values, "qscheme")
        axis = values.get("ch_axis")
        is_inherited = not is_foreign(dtype, last_dtype)
        for name, sourced in fields.items():
            if is_inherited or name not in _KINDRED:
                values[name] = sourced
        qschemes = {qscheme, _value(values, "qscheme")}
        if axis and "ch_axis" not in fields and qschemes == _QSCHEMES_WITH_AXIS:
            del values["ch_axis"]
            new_axis = other_weight_axis(axis, role)
            if new_axis:
                values["ch_axis"] = new_axis
    return values


def _ends_scale_type(scale_type: object, dtype: str | None, new_dtype: str) -> bool:
    """Return whether a scale type does not apply to the format that replaces its own."""
    if scale_type == "e4m3":
        return is_foreign(dtype, new_dtype)
    return scale_type == "superblock" or scale_type in SHARED_EXPONENTS


def _value(values: Fields, name: str) -> object:
    return values[name].value if name in values else None


def merged_spec(rules: Sequence[MatchedRule], role: Role, device: str) -> MergedSpec:
    """Return the effective spec with the origin of each field, taken from the strongest rule
    that sets it. `rules` are sorted weakest first. The spec is None if the last rule about the
    role says float.
    """
    is_quantized = True
    for row in rules:
        is_quantized = row.quantizes(role, is_quantized)
    if not is_quantized:
        return None, {}
    values = merge_fields([row.rule.fields.get(role, {}) for row in rules], role)
    spec = with_finest_position(QuantizationSpec.of(values), device)
    # A parameter is one batch with all values
    if spec.method == AUTO_METHOD and not is_parameter(role):
        spec = dataclasses.replace(spec, statistic=POOLED)
    return spec, values


def count_effects(rules: Sequence[MatchedRule], role: Role) -> None:
    """Count for each rule that it set something for this tensor."""
    for row in rules:
        row.effects += bool(row.rule.fields.get(role))


def count_silenced(rules: Sequence[MatchedRule], role: Role) -> None:
    """Count for each rule for some layers that it leaves this tensor float, which weaker rules
    quantize.
    """
    is_quantized = True
    for row in rules:
        was_quantized = is_quantized
        is_quantized = row.quantizes(role, was_quantized)
        if row.match.rank and was_quantized and not is_quantized:
            row.effects += 1


def with_finest_position(spec: QuantizationSpec, device: str) -> QuantizationSpec:
    """Return the spec with the limit of `device` on its scales. The DPU's have at most 12
    fraction bits up to 8 bits, 15 above. Other devices have no limit.

    Source: pytorch_nndct 3.5.
    """
    if device != "DPU" or spec.dtype != "int" or spec.scale_type != "poweroftwo":
        return spec
    finest_position = 12 if spec.bit_width <= 8 else 15
    return dataclasses.replace(spec, finest_position=finest_position)


def field_origins(sources: Mapping[str, Sourced]) -> dict[str, str]:
    """Return where the value of each field of a spec came from."""
    origins: dict[str, str] = {}
    for name in _SPEC_FIELDS:
        if name in sources:
            origins[name] = sources[name].origin
        elif name not in _DERIVED_FIELDS:
            origins[name] = "default"
    return origins
