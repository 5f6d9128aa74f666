"""Translate a spec of the hierarchical form, merged over the levels, into the fields of
`QuantizationSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantizer.config.diagnostics import Place, Sourced
from quantizer.config.forms.types import (
    BLOCK_FORMATS,
    INTEGERS,
    RoundType,
    ScaleType,
    dtype_word,
)
from quantizer.config.json_types import JsonObject
from quantizer.config.model import (
    CAST_ONLY,
    POOLED,
    Fields,
    QuantizationSpec,
    Role,
    SymmetricScale,
)
from quantizer.config.rules.spec_rules import is_foreign, other_weight_axis
from quantizer.tables import RANGE_METHODS, SEARCHED

FIELDS_OF_KEYS: Mapping[str, str] = {
    "round_method": "round_mode",
    "observer_cls": "method",
    "scale_format": "scale_type",
    "scale_calculation_mode": "scale_mode",
}
"""The field of `QuantizationSpec` that a key decides, where its name differs."""

OBSERVER_METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    name: (method, observer.schemes)
    for method, row in RANGE_METHODS.items()
    for name, observer in row.observers.items()
}
"""The method of each observer, and the granularities that it supports. The first one is the
default.
"""

PARAMETERS = frozenset({"weights", "bias"})

USUAL_BLOCK = 128
"""The rows and columns of a block, if the file does not say: those of DeepSeek-V3."""

_FULL_BITS = 8
"""Symmetric integers with at least so many bits have the default scale "quant_max", which clips
nothing; shorter ones have "half_range".
"""

_GROUP_SIZES = {"e8m0": 32, "e4m3": 16}
"""The values that share a scale of a `scale_format`, where neither the file nor the dtype
says.
"""

_FORMAT_KEYS = frozenset(
    {
        "symmetric",
        "symmetric_scale",
        "round_method",
        "mx_element_dtype",
        "scale_calculation_mode",
        "scale_format",
    }
)
"""Keys that are not inherited from an integer format by a floating-point format, nor the other
way round. They apply to one of both only, or differ in meaning.
"""


def observer_word(spec: QuantizationSpec) -> str | None:
    """Return the observer with the spec's method whose default is the spec's granularity; None
    if there is none.
    """
    for name, (method, schemes) in OBSERVER_METHODS.items():
        if (method, schemes[0]) == (spec.method, spec.qscheme):
            return name
    return None


def specification(spec: QuantizationSpec) -> JsonObject:
    """Return the spec in the form's words, with every key, so that nothing is inherited from a
    wider level.

    >>> specification(QuantizationSpec(dtype="bfloat16"))
    {'dtype': 'bfloat16'}
    """
    if spec.dtype in CAST_ONLY:
        return {"dtype": spec.dtype}
    words: JsonObject = {
        "dtype": dtype_word(spec) if spec.dtype == "int" else spec.dtype,
        "observer_cls": observer_word(spec),
    }
    if spec.dtype == "int":
        words["symmetric"] = spec.symmetric
        words["round_method"] = RoundType(spec.round_mode).name
        if spec.has_symmetric_scale:
            words["symmetric_scale"] = spec.symmetric_scale
    if spec.scale_type in ("float", "poweroftwo"):
        words["scale_type"] = ScaleType(spec.scale_type).name
    words["qscheme"] = spec.qscheme
    words["is_dynamic"] = spec.is_dynamic
    if spec.method == "percentile":
        words["percentage"] = spec.percentage
    return words


@dataclass(frozen=True)
class Words:
    """A spec of one role in the form's words: `raw` are those in effect, `stated` those of one
    level, `wider` those that it inherits from.
    """

    role: Role
    raw: Fields
    stated: Fields = field(default_factory=dict)
    wider: Fields = field(default_factory=dict)

    @property
    def inherited(self) -> Words:
        """Return what would hold without the level."""
        return Words(self.role, self.wider)

    @property
    def stated_places(self) -> set[Place]:
        """Return where the level states something."""
        return {sourced.place for sourced in self.stated.values() if sourced.place}

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` where the file does not state it."""
        return self.raw[key].value if key in self.raw else default

    @property
    def dtype(self) -> Any:
        """Return the dtype as the file states it."""
        return self.value("dtype")

    @property
    def observer(self) -> Any:
        """Return the observer's name."""
        return self.value("observer_cls")

    @property
    def is_block(self) -> bool:
        """Return whether it is a format of blocks: one whose groups share a power-of-two
        exponent, or one of llama.cpp.
        """
        return self.dtype in BLOCK_FORMATS or self.value("scale_format") == "e8m0"

    @property
    def has_quantized_scales(self) -> bool:
        """Return whether each group's scale is itself a number of few bits."""
        return self.dtype not in BLOCK_FORMATS and self.value("scale_format") == "e4m3"

    @property
    def has_scale_mode(self) -> bool:
        """Return whether there are several ways to find the shared exponent."""
        if self.dtype in BLOCK_FORMATS:
            return BLOCK_FORMATS[self.dtype].scale_type == "e8m0"
        return self.is_block

    @property
    def scheme(self) -> str:
        """Return the granularity as the file states it, or as its observer or block format
        implies it.
        """
        implied = "per_tensor"
        if self.is_block or self.has_quantized_scales:
            implied = "per_group"
        elif self.observer in OBSERVER_METHODS:
            _, schemes = OBSERVER_METHODS[self.observer]
            implied = schemes[0]
        return str(self.value("qscheme", implied))

    @property
    def is_per_token(self) -> bool:
        """Return whether each row of an activation has a scale; "per_channel" means this too
        where it is dynamic.
        """
        is_dynamic = self.value("is_dynamic") is True and self.role not in PARAMETERS
        return self.scheme == "per_token" or (self.scheme == "per_channel" and is_dynamic)

    @property
    def is_channel_axis(self) -> bool:
        """Return whether `ch_axis` names the channels that are cut into groups, not the axis
        along which groups run.
        """
        return self.role in PARAMETERS and self.observer == "PerChannelMinMaxObserver"

    def fields(self) -> dict[str, Sourced]:
        """Return the fields that differ from a default `QuantizationSpec`, or that the file
        states.
        """
        if self.dtype in CAST_ONLY:
            return {"dtype": self.raw["dtype"]}
        fields = self._number() | self._scale() | self._granularity() | self._range()
        if self.dtype in INTEGERS:
            default_scale = usual_symmetric_scale(QuantizationSpec.of(fields))
            implied = _mapped(self.raw["dtype"], default_scale)
            fields["symmetric_scale"] = self.raw.get("symmetric_scale", implied)
        return fields

    def _number(self) -> dict[str, Sourced]:
        """Return the fields of the number format and of rounding."""
        fields: dict[str, Sourced] = {}
        if self.dtype in INTEGERS:
            source = self.raw["dtype"]
            bits, is_signed = INTEGERS[self.dtype]
            symmetric = self.raw.get("symmetric", _mapped(source, is_signed))
            fields["symmetric"] = symmetric
            fields["dtype"] = _mapped(source, "int")
            fields["bit_width"] = _mapped(source, bits)
            # Asymmetric codes begin at 0, whatever the sign in the dtype's name
            fields["signed"] = _mapped(source, is_signed and symmetric.value)
        elif self.dtype is not None:
            dtype = self.dtype
            if dtype == "mx":
                dtype = self.value("mx_element_dtype", "int8")
                dtype = "mx_int8" if dtype == "int8" else dtype
            fields["dtype"] = _mapped(self.raw["dtype"], dtype)
            if "symmetric" in self.raw:
                fields["symmetric"] = self.raw["symmetric"]
        if "round_method" in self.raw:
            stated = self.raw["round_method"]
            fields["round_mode"] = _mapped(stated, RoundType[stated.value].value)
        return fields

    def _scale(self) -> dict[str, Sourced]:
        """Return the fields of the scale's type."""
        if self.has_quantized_scales:
            return {"scale_type": self.raw["scale_format"]}
        if not self.is_block:
            if "scale_type" not in self.raw:
                return {}
            stated = self.raw["scale_type"]
            return {"scale_type": _mapped(stated, ScaleType[stated.value].value)}
        source = self.raw["dtype" if self.dtype in BLOCK_FORMATS else "scale_format"]
        usual = BLOCK_FORMATS.get(self.dtype, BLOCK_FORMATS["mx"])
        fields = {"scale_type": _mapped(source, usual.scale_type)}
        if self.has_scale_mode and "scale_calculation_mode" in self.raw:
            fields["scale_mode"] = self.raw["scale_calculation_mode"]
        elif usual.scale_mode != "floor":
            fields["scale_mode"] = _mapped(self.raw["dtype"], usual.scale_mode)
        return fields

    def _granularity(self) -> dict[str, Sourced]:
        """Return the fields of the granularity, with the first key that may decide it as their
        source.
        """
        scheme = self.scheme
        deciding = ("qscheme", "observer_cls", "dtype", "scale_format")
        source = next((self.raw[key] for key in deciding if key in self.raw), Sourced(None))
        if self.is_per_token:
            return {"qscheme": _mapped(source, "per_token")}
        fields: dict[str, Sourced] = {}
        if scheme != "per_tensor" or "qscheme" in self.raw:
            fields["qscheme"] = _mapped(source, scheme)
        if scheme in ("per_channel", "per_group") and "ch_axis" in self.raw:
            axis = self.raw["ch_axis"]
            if scheme == "per_group" and self.is_channel_axis:
                axis = other_weight_axis(axis, self.role) or axis
            fields["ch_axis"] = axis
        if scheme == "per_group":
            usual = _GROUP_SIZES.get(self.value("scale_format"))
            if self.dtype in BLOCK_FORMATS:
                usual = BLOCK_FORMATS[self.dtype].group_size
            if "group_size" in self.raw or usual:
                fields["group_size"] = self.raw.get("group_size", _mapped(source, usual))
        if scheme == "per_block":
            sides = self.raw.get("block_size", _mapped(source, [USUAL_BLOCK]))
            fields["group_size"] = _mapped(sides, int(sides.value[0]))
        return fields

    def _range(self) -> dict[str, Sourced]:
        """Return the fields of how the range is found.

        Parameters do not change, so their range is found once, even if `is_dynamic` is set.
        """
        fields: dict[str, Sourced] = {}
        is_parameter = self.role in PARAMETERS
        if "is_dynamic" in self.raw and not is_parameter:
            fields["is_dynamic"] = self.raw["is_dynamic"]
        if self.observer in OBSERVER_METHODS:
            source = self.raw["observer_cls"]
            method, _ = OBSERVER_METHODS[self.observer]
            fields["method"] = _mapped(source, method)
            if not is_parameter:
                fields["statistic"] = _mapped(source, usual_statistic(method))
        elif self.dtype in SEARCHED and is_parameter:
            fields["method"] = _mapped(self.raw["dtype"], "group_mse")
        if "percentage" in self.raw and self.observer == "PerTensorPercentileObserver":
            percentage = self.raw["percentage"]
            fields["percentage"] = _mapped(percentage, float(percentage.value))
        return fields

    def over(self, wider: Words) -> Words:
        """Return these words merged over those of a wider level, key by key.

        Keys that apply to another kind of format are not inherited. An inherited `ch_axis` goes
        on naming the same axis of the tensor. So it is changed if this level's granularity
        gives `ch_axis` the other meaning.
        """
        united = Words(self.role, {**wider.raw, **self.raw})
        foreign: set[str] = set()
        if is_foreign(wider._kind, united._kind):
            foreign |= _FORMAT_KEYS
        if wider.observer == "PlaceholderObserver" and united.dtype not in CAST_ONLY:
            foreign.add("observer_cls")
        merged = dict(united.raw)
        for key in foreign - self.raw.keys():
            merged.pop(key, None)
        if "ch_axis" in wider.raw and "ch_axis" not in self.raw:
            meanings = {wider._axis, Words(self.role, merged)._axis}
            if meanings == {"channels", "along"}:
                axis = other_weight_axis(merged.pop("ch_axis"), self.role)
                if axis:
                    merged["ch_axis"] = axis
        return Words(self.role, merged, stated=self.raw, wider=wider.raw)

    @property
    def _kind(self) -> str | None:
        return "int" if self.dtype in INTEGERS else self.dtype

    @property
    def _axis(self) -> str | None:
        """Return what `ch_axis` names: the "channels", or the axis "along" which groups run;
        None where nothing reads it.
        """
        if self.scheme not in ("per_channel", "per_group") or self.is_per_token:
            return None
        return "channels" if self.scheme == "per_channel" or self.is_channel_axis else "along"


def usual_symmetric_scale(spec: QuantizationSpec) -> SymmetricScale:
    """Return the symmetric scale of a spec whose file states none.

    With few bits, clipping half a step costs less than a larger scale.

    >>> usual_symmetric_scale(QuantizationSpec(bit_width=4))
    'half_range'
    >>> usual_symmetric_scale(QuantizationSpec(bit_width=8))
    'quant_max'
    """
    is_short = spec.has_symmetric_scale and spec.bit_width < _FULL_BITS
    return "half_range" if is_short else "quant_max"


def usual_statistic(method: str) -> str:
    """Return the statistic of activations for a range method.

    Methods other than "maxmin" need the distribution of all batches together.

    >>> usual_statistic("percentile"), usual_statistic("maxmin")
    ('pooled', 'max')
    """
    return "max" if method == "maxmin" else POOLED


def _mapped(source: Sourced, value: Any) -> Sourced:
    return Sourced(value, source.place)
