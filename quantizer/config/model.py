"""A config as immutable values in the field's words, without tensors, files or the spelling of
a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from quantizer.config.algorithms import Algorithm
from quantizer.config.diagnostics import Place, Sourced
from quantizer.config.forms.form import Form
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.resources import load_resource
from quantizer.tables import NUMBER_FORMATS

Role = Literal["input", "weights", "bias", "activation"]
ROLES: tuple[Role, ...] = get_args(Role)
Device = Literal["DPU", "CPU", "GPU", "IPU"]
QScheme = Literal["per_tensor", "per_channel", "per_group", "per_token", "per_block"]
ScaleKind = Literal["float", "e4m3", "poweroftwo", "e8m0", "microexponent", "superblock"]
ScaleMode = Literal["floor", "even", "ceil"]
SymmetricScale = Literal["quant_max", "half_range", "quant_min"]
DynamicRange = bool | Literal["local"]

if TYPE_CHECKING:
    _RangeMethod = str
    _RoundMode = str
    _Statistic = str
else:
    # These words name functions of registries. The schema is their only list in this package
    _SPEC_FIELDS = load_resource("schemas", "quantization_spec.schema.json")["properties"]
    _RangeMethod = Literal[tuple(_SPEC_FIELDS["method"]["enum"])]
    _RoundMode = Literal[tuple(_SPEC_FIELDS["round_mode"]["enum"])]
    _Statistic = Literal[tuple(_SPEC_FIELDS["statistic"]["enum"])]

AUTO_METHOD: Literal["auto"] = "auto"
"""The method that reads one histogram of all batches, with any statistic."""

POOLED: Literal["pooled"] = "pooled"
"""The statistic that finds one range over the values of all batches."""

PAIR = 2
"""Values that share a microexponent."""

SUPERBLOCK = 256
"""Consecutive values whose groups share the factor of their scales, with scales of type
"superblock".
"""

_SIGNED_SCALES = frozenset(name for name, row in NUMBER_FORMATS.items() if row.has_signed_scale)
"""Formats whose scales may be negative, because one more value is."""
CAST_ONLY = frozenset(name for name, row in NUMBER_FORMATS.items() if row.is_cast)
"""Formats that need no scale: a value is cast to them and back."""


@dataclass(frozen=True)
class QuantizationSpec:
    """How one tensor is quantized. The choices below are independent of each other.

    Number format: `dtype` is "int" or the name of another format. The codes of "int" follow
    from `bit_width`, `signed`, `symmetric` and `narrow_range`. Other formats with a scale are
    "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4", "mx_int8", "bfp16", "mx6", "mx9", and
    for weights "q4_k", "q5_k", "q6_k" and "iq4_nl".
    Those in `CAST_ONLY` have no scale, and "float32" leaves a tensor as it is. `dtype` may be
    any string, because formats may be registered at run time.

    Range: `method` finds the range, and only the percentile method reads `percentage`.
    `statistic` reduces the batches' ranges to one. "pooled" finds one range for all batches, as
    the auto method always does. The range of a tensor that `is_dynamic` is found each time the
    tensor is made. With "local" only the ranges of its groups are: the float of the tensor,
    which scales of type "e4m3" have in common, is calibrated.

    Granularity: the meaning of `ch_axis` depends on `qscheme`. With "per_channel" each index of
    the axis has a scale. With "per_group" groups of `group_size` values run along it; only in
    block formats, and in fp8 at run time, may the last group be shorter. With "per_token" each
    row of values runs along it. With "per_block" each square of `group_size` rows and columns
    of the first two axes has a scale; the last squares may be smaller. A weight may be a stack
    of weights: those of experts, or of the groups of a transposed convolution. Each is
    `group_size` long in the first axis. "per_tensor" then gives each of them a scale, and
    "per_channel" each of their channels.

    Scale: `scale_type` is one of six.

    - "float": any float.
    - "poweroftwo": a power of two, at least 2^-`finest_position` if the device requires that.
    - "e8m0": the shared exponent of a block, rounded by `scale_mode` ("floor", "even" or
      "ceil").
    - "e4m3", for groups only: a number of fp8_e4m3 times one float of the tensor.
    - "microexponent", for groups only: a shared exponent that is one less for some pairs of
      values.
    - "superblock", for groups only: a whole number of few bits times a float16 that the groups
      of `SUPERBLOCK` values share.

    Symmetric integers with a "float" or "e4m3" scale divide the largest magnitude by
    `symmetric_scale`: "quant_max", or "half_range", which is (quant_max - quant_min) / 2 and
    clips half a step. With "quant_min" the value of the largest magnitude is divided, with its
    sign, so that the scale may be negative.
    """

    dtype: str = "int"
    bit_width: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow_range: bool = False
    scale_type: ScaleKind = "float"
    round_mode: _RoundMode = "half_even"
    qscheme: QScheme = "per_tensor"
    ch_axis: int | None = None
    group_size: int | None = None
    is_dynamic: DynamicRange = False
    scale_mode: ScaleMode = "floor"
    method: _RangeMethod = "maxmin"
    percentage: float = 99.99
    statistic: _Statistic = "max"
    finest_position: int | None = None
    symmetric_scale: SymmetricScale = "quant_max"

    @classmethod
    def of(cls, fields: Fields) -> QuantizationSpec:
        """Return the spec that has these fields, and defaults for the others."""
        return cls(**{name: sourced.value for name, sourced in fields.items()})

    @property
    def has_signed_codes(self) -> bool:
        """Return whether codes are on both sides of zero; asymmetric ones begin at 0."""
        return self.signed and self.symmetric

    @property
    def quant_min(self) -> int:
        """Return the smallest code: -2^(b-1) (+1 if narrow) for signed symmetric integers, else
        0.
        """
        if self.has_signed_codes:
            return -(1 << (self.bit_width - 1)) + int(self.narrow_range)
        return 0

    @property
    def quant_max(self) -> int:
        """Return the largest code: 2^(b-1)-1 for signed symmetric integers, else 2^b-1."""
        return (1 << (self.bit_width - int(self.has_signed_codes))) - 1

    @property
    def has_symmetric_scale(self) -> bool:
        """Return whether `symmetric_scale` changes the scale: one more code is negative, and
        the scale may be any float.
        """
        has_extra_code = self.has_signed_codes and not self.narrow_range
        return self.dtype == "int" and has_extra_code and self.scale_type in ("float", "e4m3")

    @property
    def has_signed_scale(self) -> bool:
        """Return whether scales may be negative: the value with the largest magnitude gets the
        code `quant_min`, with either sign. Some formats always have such scales.
        """
        if self.dtype in _SIGNED_SCALES:
            return True
        return self.has_symmetric_scale and self.symmetric_scale == "quant_min"

    @property
    def has_searched_scale(self) -> bool:
        """Return whether the method group_mse searches scales that super-blocks or a float16
        can store.
        """
        return self.scale_type == "superblock" or self.has_signed_scale

    @property
    def has_one_scale(self) -> bool:
        """Return whether all values of the tensor share one scale."""
        return self.qscheme == "per_tensor" and self.group_size is None

    @property
    def has_groups(self) -> bool:
        """Return whether groups or blocks have a scale each, which may be many."""
        return self.qscheme in ("per_group", "per_block")

    @property
    def block_size(self) -> int | None:
        """Return how many values along the axis have scales that are found together; None
        without groups.
        """
        return SUPERBLOCK if self.scale_type == "superblock" else self.group_size

    @property
    def scales_per_group(self) -> int:
        """Return how many scales a group of values has: one, or one for each pair."""
        if self.scale_type != "microexponent":
            return 1
        return (self.group_size or PAIR) // PAIR

    @property
    def cut(self) -> tuple[str, int | None, int | None, int]:
        """Return which values share a scale, as the arguments of `numerics.granularity`:
        qscheme, ch_axis, group_size and scales_per_group.
        """
        return self.qscheme, self.ch_axis, self.group_size, self.scales_per_group

    @property
    def is_scaled(self) -> bool:
        """Return whether the tensor has a scale."""
        return self.dtype not in CAST_ONLY

    @property
    def has_stored_scale(self) -> bool:
        """Return whether scales, or the float that they have in common, are found before the
        network runs, and stored.
        """
        return self.is_scaled and self.is_dynamic is not True

    @property
    def stored(self) -> QuantizationSpec:
        """Return the spec of the stored scales: that of the whole tensor if only its groups
        have ranges that are found at run time, else the spec itself.
        """
        if self.is_dynamic != "local":
            return self
        return QuantizationSpec(dtype=self.dtype, statistic=self.statistic)

    def to_json(self) -> JsonObject:
        """Return the fields as a JSON object."""
        return asdict(self)


Fields = Mapping[str, Sourced]
"""Some fields of a `QuantizationSpec`, or keys of a file, with their values."""


@dataclass(frozen=True)
class Settings:
    """The global switches; `places` maps a field's name to where the file sets it."""

    convert_relu6_to_relu: bool = False
    convert_silu_to_hswish: bool = False
    integer_activations: bool = False
    include_cle: bool = False
    include_bias_corr: bool = False
    keep_first_last_layer_accuracy: bool = False
    keep_add_layer_accuracy: bool = False
    change_concat_input_fix: bool = False
    change_pool_input_fix: bool = False
    onnx_opset_version: int = -1
    target_device: Device = "CPU"
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, stated: Fields) -> Settings:
        """Return the settings that a file states, with their places. None is the default."""
        values = {
            name: entry.value for name, entry in stated.items() if entry.value is not None
        }
        places = {name: entry.place for name, entry in stated.items() if entry.place}
        return cls(**values, places=places)


@dataclass(frozen=True)
class Selector:
    """The layers of a rule: all, those with weights of their own, those of a type, those with a
    name of a pattern, or those that it excludes.

    Two kinds are about the key-value cache. "cache" selects the attentions that read what named
    layers compute, and "cache_source" selects these layers themselves.

    A selector that is not `required` may match no layer.
    """

    kind: Literal["all", "weighted", "type", "name", "exclude", "cache", "cache_source"]
    text: str = ""
    place: Place | None = None
    required: bool = True


@dataclass(frozen=True)
class ConfigRule:
    """A block of a config: which roles of the selected layers are quantized, and how.

    Attributes:
        selector: selects the layers.
        label: the block's path in the file, such as `layer_quantize_config[1]`.
        roles: the roles to quantize; None if the block does not state them.
        roles_place: where the file states them.
        fields: by role, fields of `QuantizationSpec`. There is a `ch_axis` only if the file
            states it. Otherwise the layer's axis of output channels is used.
        adds: roles to quantize in addition to those of wider blocks.
    """

    selector: Selector
    label: str
    roles: frozenset[Role] | None = None
    roles_place: Place | None = None
    fields: Mapping[Role, Fields] = field(default_factory=dict)
    adds: frozenset[Role] = frozenset()

    @property
    def leaves_float(self) -> bool:
        """Return whether it leaves all of its layers in float."""
        return self.roles == frozenset() and not self.adds


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config: settings, and rules in the file's order (overall first, then tensor,
    then layers).

    `source` is the file's name as shown to the user, `text` its content, `document` the parsed
    JSON for `config.resolved.json`. `algorithms` change the weights, in this order.
    """

    settings: Settings
    rules: tuple[ConfigRule, ...]
    source: str = "<built-in default>"
    document: JsonMapping = field(default_factory=dict)
    form: Form = "layered"
    algorithms: tuple[Algorithm, ...] = ()
    text: str = ""
