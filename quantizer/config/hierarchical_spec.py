"""A spec of the hierarchical form, merged over the levels, in the fields of `QuantizationSpec`. Checks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantizer.config.model import CAST_ONLY, Fields, QuantizationSpec, Role, Sourced
from quantizer.config.types import RoundType, ScaleType

FIELDS_OF_KEYS: Mapping[str, str] = {
    "round_method": "round_mode",
    "observer_cls": "method",
    "scale_format": "scale_type",
    "scale_calculation_mode": "scale_mode",
}
"""The field of `QuantizationSpec` that a key decides, where its name differs."""

INTEGERS = {
    f"{sign}int{bits}": (bits, not sign)
    for sign, widths in (("", (2, 3, 4, 8, 16, 32)), ("u", (4, 8, 16)))
    for bits in widths
}
"""Bits and sign of each integer dtype."""


def dtype_word(spec: QuantizationSpec) -> str | None:
    """The word for integer codes, if there is one; codes from 0 to 2^b-1 have the unsigned one where it exists.

    >>> dtype_word(QuantizationSpec(bit_width=3, symmetric=False)), dtype_word(QuantizationSpec(bit_width=5))
    ('int3', None)
    """
    is_signed = spec.signed and spec.symmetric
    words = [f"int{spec.bit_width}"] if is_signed else [f"uint{spec.bit_width}"]
    words += [f"int{spec.bit_width}"] if not spec.symmetric else []
    return next((word for word in words if word in INTEGERS), None)


GROUP_SIZES = {"mx": 32, "bfp16": 8}
"""The block formats, and the values that share an exponent where the file does not say. Source of 32: OCP
Microscaling Formats v1.0, section 5."""

METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "PerTensorMinMaxObserver": ("maxmin", ("per_tensor",)),
    "PerChannelMinMaxObserver": ("maxmin", ("per_channel", "per_group", "per_token")),
    "PerGroupMinMaxObserver": ("maxmin", ("per_group",)),
    "PerTensorPercentileObserver": ("percentile", ("per_tensor",)),
    "PerTensorMSEObserver": ("mse", ("per_tensor",)),
    "PerBlockMXObserver": ("maxmin", ("per_group",)),
    "PerBlockBFPObserver": ("maxmin", ("per_group",)),
}
"""Each observer's method, and the schemes that it supports; the first is meant where the file names none."""


def observer_word(spec: QuantizationSpec) -> str | None:
    """The observer that stands for a method and a granularity, if there is one."""
    known = ((method, schemes[0], name) for name, (method, schemes) in METHODS.items())
    return next((name for method, scheme, name in known if (method, scheme) == (spec.method, spec.qscheme)), None)


def specification(spec: QuantizationSpec) -> dict[str, Any]:
    """The spec in the form's words, every key written, so that nothing of a wider level shows through.

    >>> specification(QuantizationSpec(dtype="bfloat16"))
    {'dtype': 'bfloat16'}
    """
    if spec.dtype in CAST_ONLY:
        return {"dtype": spec.dtype}
    integers = {"symmetric": spec.symmetric, "round_method": RoundType(spec.round_mode).name}
    scales = {} if spec.scale_type == "e8m0" else {"scale_type": ScaleType(spec.scale_type).name}
    return {
        "dtype": dtype_word(spec) if spec.dtype == "int" else spec.dtype,
        "observer_cls": observer_word(spec),
        **(integers if spec.dtype == "int" else {}),
        **scales,
        "qscheme": spec.qscheme,
        "is_dynamic": spec.is_dynamic,
        **({"percentage": spec.percentage} if spec.method == "percentile" else {}),
    }


PARAMETERS = frozenset({"weights", "bias"})

KINDRED = frozenset({"symmetric", "round_method", "mx_element_dtype", "scale_calculation_mode", "scale_format"})
"""Keys that mean something for integers only, or for floating-point formats only, or not the same for both."""


def value_of(raw: Fields, key: str, default: Any = None) -> Any:
    """The value of a key, or what holds where the file does not say."""
    return raw[key].value if key in raw else default


def is_block(raw: Fields) -> bool:
    """Whether groups of values share a power-of-two exponent."""
    return value_of(raw, "dtype") in GROUP_SIZES or value_of(raw, "scale_format") == "e8m0"


def scheme(raw: Fields) -> str:
    """The granularity as the file says it, or as its observer or block format implies it."""
    observer = value_of(raw, "observer_cls")
    implied = METHODS[observer][1][0] if observer in METHODS else "per_tensor"
    return str(value_of(raw, "qscheme", "per_group" if is_block(raw) else implied))


def is_per_token(raw: Fields, role: Role) -> bool:
    """Whether each row of an activation has a scale; "per_channel" means this too where it is dynamic."""
    found = scheme(raw)
    dynamic_channels = found == "per_channel" and value_of(raw, "is_dynamic") is True and role not in PARAMETERS
    return found == "per_token" or dynamic_channels


def is_channel_axis(raw: Fields, role: Role) -> bool:
    """Whether `ch_axis` names the channels that are cut into groups, not the axis along which groups run."""
    return role in PARAMETERS and value_of(raw, "observer_cls") == "PerChannelMinMaxObserver"


def over(own: Fields, wider: Fields, role: Role) -> dict[str, Sourced]:
    """What holds where a level states `own`, key by key over a wider one.

    Words about another kind of format are not inherited, and an inherited axis stays the axis that the wider level
    means, whatever `ch_axis` names in this one.
    """
    kept = {**wider, **own}
    foreign = KINDRED if is_foreign(_kind(wider), _kind(kept)) else frozenset()
    if value_of(wider, "observer_cls") == "PlaceholderObserver" and value_of(kept, "dtype") not in CAST_ONLY:
        foreign |= {"observer_cls"}
    merged = {key: sourced for key, sourced in kept.items() if key in own or key not in foreign}
    meant, read = _axis_of(wider, role), _axis_of(merged, role)
    if "ch_axis" in wider and "ch_axis" not in own and meant and read and meant != read:
        axis = turned(merged.pop("ch_axis"), role)
        merged |= {"ch_axis": axis} if axis else {}
    return merged


def is_foreign(dtype: str | None, other: str | None) -> bool:
    """Whether one of two internal dtypes is an integer format and the other a scaled floating-point format.

    >>> is_foreign("int", "fp8_e4m3"), is_foreign("fp4", "fp8_e4m3"), is_foreign("int", "float16")
    (True, False, False)
    """
    scaled = {dtype, other} - CAST_ONLY - {None}
    return len(scaled) == 2 and "int" in scaled


def turned(axis: Sourced, role: Role) -> Sourced | None:
    """For the channel axis of a weight the axis along which its groups run, and back; None where that is open."""
    known = role == "weights" and axis.value in (0, 1)
    return Sourced(1 - axis.value, axis.place) if known else None


def _kind(raw: Fields) -> str | None:
    dtype = value_of(raw, "dtype")
    return "int" if dtype in INTEGERS else dtype


def _axis_of(raw: Fields, role: Role) -> str | None:
    """What `ch_axis` names: the "channels", or the axis "along" which groups run; None where nothing reads it."""
    found = scheme(raw)
    if found not in ("per_channel", "per_group") or is_per_token(raw, role):
        return None
    return "channels" if found == "per_channel" or is_channel_axis(raw, role) else "along"


def normalized(raw: Fields, role: Role) -> dict[str, Sourced]:
    """The fields that differ from the defaults of `QuantizationSpec`, or that the file states, each from its key."""
    if value_of(raw, "dtype") in CAST_ONLY:
        return {"dtype": raw["dtype"]}
    return {**_number(raw), **_scale(raw), **_granularity(raw, role), **_range(raw, role)}


def _number(raw: Fields) -> dict[str, Sourced]:
    """Number format and rounding."""
    fields: dict[str, Sourced] = {}
    dtype = value_of(raw, "dtype")
    if dtype in INTEGERS:
        place = raw["dtype"].place
        bits, signed = INTEGERS[dtype]
        fields["symmetric"] = raw.get("symmetric", Sourced(signed, place))
        # Asymmetric codes begin at 0, whatever the sign in the dtype's name.
        words = {"dtype": "int", "bit_width": bits, "signed": signed and fields["symmetric"].value}
        fields |= {name: Sourced(value, place) for name, value in words.items()}
    elif dtype is not None:
        element = value_of(raw, "mx_element_dtype")
        word = ("mx_int8" if element == "int8" else element or "mx_int8") if dtype == "mx" else dtype
        fields["dtype"] = Sourced(word, raw["dtype"].place)
        fields |= {key: raw[key] for key in ("symmetric",) if key in raw}
    if "round_method" in raw:
        fields["round_mode"] = _mapped(raw["round_method"], RoundType[raw["round_method"].value].value)
    return fields


def _scale(raw: Fields) -> dict[str, Sourced]:
    if is_block(raw):
        fields = {"scale_type": _mapped(raw.get("scale_format") or raw["dtype"], "e8m0")}
        if "scale_calculation_mode" in raw:
            fields["scale_mode"] = raw["scale_calculation_mode"]
        elif value_of(raw, "dtype") == "bfp16":  # its exponent is one up where the largest value would round beyond it
            fields["scale_mode"] = _mapped(raw["dtype"], "even")
        return fields
    stated = raw.get("scale_type")
    return {"scale_type": _mapped(stated, ScaleType[stated.value].value)} if stated else {}


def _granularity(raw: Fields, role: Role) -> dict[str, Sourced]:
    found = scheme(raw)
    causes = ("qscheme", "observer_cls", "dtype", "scale_format")
    cause = next((raw[key] for key in causes if key in raw), Sourced(None))
    if is_per_token(raw, role):
        return {"qscheme": _mapped(cause, "per_token")}
    fields = {"qscheme": _mapped(cause, found)} if found != "per_tensor" or "qscheme" in raw else {}
    if found in ("per_channel", "per_group") and "ch_axis" in raw:
        axis = raw["ch_axis"]
        across = turned(axis, role) if found == "per_group" and is_channel_axis(raw, role) else None
        fields["ch_axis"] = across or axis
    if found == "per_group":
        default = GROUP_SIZES.get(value_of(raw, "dtype"), 32 if is_block(raw) else None)
        size = raw.get("group_size", _mapped(cause, default) if default else None)
        fields |= {"group_size": size} if size else {}
    return fields


def _range(raw: Fields, role: Role) -> dict[str, Sourced]:
    """How the range is found; parameters do not change, so theirs is found once, whatever `is_dynamic` says."""
    fields = {}
    if "is_dynamic" in raw and role not in PARAMETERS:
        fields["is_dynamic"] = raw["is_dynamic"]
    if value_of(raw, "observer_cls") in METHODS:
        fields["method"] = _mapped(raw["observer_cls"], METHODS[raw["observer_cls"].value][0])
    if "percentage" in raw and value_of(raw, "observer_cls") == "PerTensorPercentileObserver":
        fields["percentage"] = _mapped(raw["percentage"], float(raw["percentage"].value))
    return fields


def _mapped(source: Sourced, value: Any) -> Sourced:
    return Sourced(value, source.place)
