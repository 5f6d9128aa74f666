"""A spec of the hierarchical form, merged over the levels, in the fields of `QuantizationSpec`.
Checks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantizer.config.forms.dtypes import (
    BLOCK_FORMATS,
    GROUP_SIZES,
    INTEGERS,
    BlockFormat,
    dtype_word,
)
from quantizer.config.forms.types import RoundType, ScaleType
from quantizer.config.model import (
    CAST_ONLY,
    POOLED,
    Fields,
    QuantizationSpec,
    Role,
    Sourced,
    SymmetricScale,
)

FIELDS_OF_KEYS: Mapping[str, str] = {
    "round_method": "round_mode",
    "observer_cls": "method",
    "scale_format": "scale_type",
    "scale_calculation_mode": "scale_mode",
}
"""The field of `QuantizationSpec` that a key decides, where its name differs."""

FULL_BITS = 8
"""From so many bits on, the largest magnitude has a code of its own unless the file says
otherwise.
"""

METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "PerTensorMinMaxObserver": ("maxmin", ("per_tensor",)),
    "PerChannelMinMaxObserver": ("maxmin", ("per_channel", "per_group", "per_token")),
    "PerGroupMinMaxObserver": ("maxmin", ("per_group",)),
    "PerTensorPercentileObserver": ("percentile", ("per_tensor",)),
    "PerTensorMSEObserver": ("mse", ("per_tensor",)),
    "PerBlockMXObserver": ("maxmin", ("per_group",)),
    "PerBlockBFPObserver": ("maxmin", ("per_group",)),
}
"""Each observer's method, and the schemes that it supports; the first is meant where the file
names none.
"""


def observer_word(spec: QuantizationSpec) -> str | None:
    """The observer that stands for a method and a granularity, if there is one."""
    known = ((method, schemes[0], name) for name, (method, schemes) in METHODS.items())
    return next(
        (
            name
            for method, scheme, name in known
            if (method, scheme) == (spec.method, spec.qscheme)
        ),
        None,
    )


def specification(spec: QuantizationSpec) -> dict[str, Any]:
    """The spec in the form's words, every key written, so that nothing of a wider level shows
    through.

    >>> specification(QuantizationSpec(dtype="bfloat16"))
    {'dtype': 'bfloat16'}
    """
    if spec.dtype in CAST_ONLY:
        return {"dtype": spec.dtype}
    integers = {"symmetric": spec.symmetric, "round_method": RoundType(spec.round_mode).name}
    integers |= {"symmetric_scale": spec.symmetric_scale} if spec.has_symmetric_scale else {}
    is_plain = spec.scale_type in ("float", "poweroftwo")
    scales = {"scale_type": ScaleType(spec.scale_type).name} if is_plain else {}
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

INTEGERS_ONLY = frozenset({"symmetric", "symmetric_scale", "round_method"})
KINDRED = INTEGERS_ONLY | {"mx_element_dtype", "scale_calculation_mode", "scale_format"}
"""Keys that mean something for integers only, or for floating-point formats only, or not the
same for both.
"""


@dataclass(frozen=True)
class Words:
    """A spec of one role in the form's words: what a level states, or what holds where levels
    are merged.
    """

    role: Role
    raw: Fields

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key, or what holds where the file does not say."""
        return self.raw[key].value if key in self.raw else default

    @property
    def dtype(self) -> Any:
        """As the file says it."""
        return self.value("dtype")

    @property
    def observer(self) -> Any:
        """The observer's name."""
        return self.value("observer_cls")

    @property
    def is_block(self) -> bool:
        """Whether groups of values share a power-of-two exponent."""
        return self.dtype in BLOCK_FORMATS or self.value("scale_format") == "e8m0"

    @property
    def has_quantized_scales(self) -> bool:
        """Whether each group's scale is itself a number of few bits."""
        return self.dtype not in BLOCK_FORMATS and self.value("scale_format") == "e4m3"

    @property
    def has_scale_mode(self) -> bool:
        """Whether there are several ways to find the shared exponent."""
        return self.is_block and (
            self.dtype not in BLOCK_FORMATS or BLOCK_FORMATS[self.dtype].scale_type == "e8m0"
        )

    @property
    def scheme(self) -> str:
        """The granularity as the file says it, or as its observer or block format implies
        it.
        """
        implied = METHODS[self.observer][1][0] if self.observer in METHODS else "per_tensor"
        return str(
            self.value(
                "qscheme",
                "per_group" if self.is_block or self.has_quantized_scales else implied,
            )
        )

    @property
    def is_per_token(self) -> bool:
        """Whether each row of an activation has a scale; "per_channel" means this too where it
        is dynamic.
        """
        is_dynamic = self.value("is_dynamic") is True and self.role not in PARAMETERS
        return self.scheme == "per_token" or (self.scheme == "per_channel" and is_dynamic)

    @property
    def is_channel_axis(self) -> bool:
        """Whether `ch_axis` names the channels that are cut into groups, not the axis along
        which groups run.
        """
        return self.role in PARAMETERS and self.observer == "PerChannelMinMaxObserver"

    def fields(self) -> dict[str, Sourced]:
        """The fields that differ from those of a default `QuantizationSpec`, or that the file
        states.
        """
        if self.dtype in CAST_ONLY:
            return {"dtype": self.raw["dtype"]}
        return self._with_symmetric_scale(
            {**self._number(), **self._scale(), **self._granularity(), **self._range()}
        )

    def _number(self) -> dict[str, Sourced]:
        """Number format and rounding."""
        fields: dict[str, Sourced] = {}
        if self.dtype in INTEGERS:
            place = self.raw["dtype"].place
            bits, signed = INTEGERS[self.dtype]
            fields["symmetric"] = self.raw.get("symmetric", Sourced(signed, place))
            # Asymmetric codes begin at 0, whatever the sign in the dtype's name.
            words = {
                "dtype": "int",
                "bit_width": bits,
                "signed": signed and fields["symmetric"].value,
            }
            fields |= {name: Sourced(value, place) for name, value in words.items()}
        elif self.dtype is not None:
            element = self.value("mx_element_dtype")
            block = "mx_int8" if element in ("int8", None) else element
            fields["dtype"] = _mapped(
                self.raw["dtype"], block if self.dtype == "mx" else self.dtype
            )
            fields |= {key: self.raw[key] for key in ("symmetric",) if key in self.raw}
        if stated := self.raw.get("round_method"):
            fields["round_mode"] = _mapped(stated, RoundType[stated.value].value)
        return fields

    def _scale(self) -> dict[str, Sourced]:
        fields: dict[str, Sourced]
        if self.is_block:
            usual = BLOCK_FORMATS.get(self.dtype, BlockFormat(GROUP_SIZES["e8m0"]))
            source = self.raw["dtype" if self.dtype in BLOCK_FORMATS else "scale_format"]
            fields = {"scale_type": _mapped(source, usual.scale_type)}
            if self.has_scale_mode and "scale_calculation_mode" in self.raw:
                fields["scale_mode"] = self.raw["scale_calculation_mode"]
            elif usual.scale_mode != "floor":
                fields["scale_mode"] = _mapped(self.raw["dtype"], usual.scale_mode)
            return fields
        if self.has_quantized_scales:
            return {"scale_type": self.raw["scale_format"]}
        stated = self.raw.get("scale_type")
        return {"scale_type": _mapped(stated, ScaleType[stated.value].value)} if stated else {}

    def _with_symmetric_scale(self, fields: dict[str, Sourced]) -> dict[str, Sourced]:
        """The fields, and for integers the rule for symmetric scales, which the file states or
        the dtype implies.
        """
        if self.dtype not in INTEGERS:
            return fields
        usual = _mapped(self.raw["dtype"], usual_symmetric_scale(QuantizationSpec.of(fields)))
        return fields | {"symmetric_scale": self.raw.get("symmetric_scale", usual)}

    def _granularity(self) -> dict[str, Sourced]:
        found = self.scheme
        causes = ("qscheme", "observer_cls", "dtype", "scale_format")
        cause = next((self.raw[key] for key in causes if key in self.raw), Sourced(None))
        if self.is_per_token:
            return {"qscheme": _mapped(cause, "per_token")}
        fields = (
            {"qscheme": _mapped(cause, found)}
            if found != "per_tensor" or "qscheme" in self.raw
            else {}
        )
        if found in ("per_channel", "per_group") and "ch_axis" in self.raw:
            axis = self.raw["ch_axis"]
            across = (
                turned(axis, self.role)
                if found == "per_group" and self.is_channel_axis
                else None
            )
            fields["ch_axis"] = across or axis
        if found == "per_group":
            default = GROUP_SIZES.get(self.value("scale_format"))
            default = (
                BLOCK_FORMATS[self.dtype].group_size if self.dtype in BLOCK_FORMATS else default
            )
            size = self.raw.get("group_size", _mapped(cause, default) if default else None)
            fields |= {"group_size": size} if size else {}
        return fields

    def _range(self) -> dict[str, Sourced]:
        """How the range is found; parameters do not change, so theirs is found once, whatever
        `is_dynamic` says.
        """
        fields = {}
        if "is_dynamic" in self.raw and self.role not in PARAMETERS:
            fields["is_dynamic"] = self.raw["is_dynamic"]
        if self.observer in METHODS:
            method = METHODS[self.observer][0]
            fields["method"] = _mapped(self.raw["observer_cls"], method)
            if self.role not in PARAMETERS:
                fields["statistic"] = _mapped(self.raw["observer_cls"], usual_statistic(method))
        if "percentage" in self.raw and self.observer == "PerTensorPercentileObserver":
            fields["percentage"] = _mapped(
                self.raw["percentage"], float(self.raw["percentage"].value)
            )
        return fields

    def over(self, wider: Words) -> Words:
        """What holds where a level states these words, key by key over a wider one.

        Words about another kind of format are not inherited, and an inherited axis stays the
        axis that the wider level means, whatever `ch_axis` names in this one.
        """
        kept = Words(self.role, {**wider.raw, **self.raw})
        foreign = KINDRED if is_foreign(wider._kind, kept._kind) else frozenset()
        if wider.observer == "PlaceholderObserver" and kept.dtype not in CAST_ONLY:
            foreign |= {"observer_cls"}
        merged = {
            key: sourced
            for key, sourced in kept.raw.items()
            if key in self.raw or key not in foreign
        }
        meant, read = wider._axis, Words(self.role, merged)._axis
        if (
            "ch_axis" in wider.raw
            and "ch_axis" not in self.raw
            and meant
            and read
            and meant != read
        ):
            axis = turned(merged.pop("ch_axis"), self.role)
            merged |= {"ch_axis": axis} if axis else {}
        return Words(self.role, merged)

    @property
    def _kind(self) -> str | None:
        return "int" if self.dtype in INTEGERS else self.dtype

    @property
    def _axis(self) -> str | None:
        """What `ch_axis` names: the "channels", or the axis "along" which groups run; None
        where nothing reads it.
        """
        if self.scheme not in ("per_channel", "per_group") or self.is_per_token:
            return None
        return "channels" if self.scheme == "per_channel" or self.is_channel_axis else "along"


def usual_symmetric_scale(spec: QuantizationSpec) -> SymmetricScale:
    """The rule for a spec whose file states none: with few bits the last half step costs more
    than it is worth.

    >>> (
    ...     usual_symmetric_scale(QuantizationSpec(bit_width=4)),
    ...     usual_symmetric_scale(QuantizationSpec(bit_width=8)),
    ... )
    ('half_range', 'quant_max')
    """
    return (
        "half_range" if spec.has_symmetric_scale and spec.bit_width < FULL_BITS else "quant_max"
    )


def usual_statistic(method: str) -> str:
    """What the observers of activations do with several batches: those that need counts see all
    batches as one.

    >>> usual_statistic("percentile"), usual_statistic("maxmin")
    ('pooled', 'max')
    """
    return "max" if method == "maxmin" else POOLED


def is_foreign(dtype: str | None, other: str | None) -> bool:
    """Whether one of two internal dtypes is an integer format and the other a scaled
    floating-point format.

    >>> (
    ...     is_foreign("int", "fp8_e4m3"),
    ...     is_foreign("fp4", "fp8_e4m3"),
    ...     is_foreign("int", "float16"),
    ... )
    (True, False, False)
    """
    scaled = {dtype, other} - CAST_ONLY - {None}
    return len(scaled) == 2 and "int" in scaled


def turned(axis: Sourced, role: Role) -> Sourced | None:
    """For the channel axis of a weight the axis along which its groups run, and back; None
    where that is open.
    """
    known = role == "weights" and axis.value in (0, 1)
    return Sourced(1 - axis.value, axis.place) if known else None


def _mapped(source: Sourced, value: Any) -> Sourced:
    return Sourced(value, source.place)
