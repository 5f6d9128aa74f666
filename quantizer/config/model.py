"""What a config says, as frozen values in the field's words. No tensors, no files, no file's
spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from quantizer.config.algorithm_settings import AlgoConfig, Stage, read_keys, settings_of
from quantizer.config.diagnostics import Place
from quantizer.config.forms.form import Form

Role = Literal["input", "weights", "bias", "activation"]
ROLES: tuple[Role, ...] = get_args(Role)
Device = Literal["DPU", "CPU", "GPU", "IPU"]
QScheme = Literal["per_tensor", "per_channel", "per_group", "per_token"]
RangeMethod = Literal["maxmin", "percentile", "entropy", "mse", "diffs", "auto"]
AUTO: Literal["auto"] = "auto"  # reads one histogram of all batches, whatever the statistic
RoundMode = Literal["half_even", "half_up", "half_down", "std_round", "floor"]
ScaleKind = Literal["float", "e4m3", "poweroftwo", "e8m0", "microexponent"]
ScaleMode = Literal["floor", "even", "ceil"]
SymmetricScale = Literal["quant_max", "half_range"]
Statistic = Literal["modal", "max", "mean", "median", "pooled"]
POOLED: Literal["pooled"] = "pooled"
"""The statistic of observers that see all batches as one, as those of the hierarchical form
do.
"""

PAIR = 2
"""Values that share a microexponent."""

CAST_ONLY = frozenset({"float16", "bfloat16", "float32"})
"""Formats that need no scale: a value is cast to them and back."""


@dataclass(frozen=True)
class QuantizationSpec:
    """How one tensor is quantized; every axis is independent of the others.

    `dtype` is "int" (then `bit_width`, `signed`, `symmetric` and `narrow_range` give its codes)
    or the name of a floating-point format, with a scale ("fp8_e4m3", "fp8_e5m2", "fp6_e3m2",
    "fp6_e2m3", "fp4", "mx_int8", "bfp16", "mx6", "mx9") or without one (`CAST_ONLY`; "float32"
    = left alone); formats may be registered at run time, so it is any string. `method` finds
    the range, `percentage` is read by the percentile method only, `statistic` reduces the
    batches' ranges to one, or, "pooled", finds one for all of them, as the auto method always
    does; a dynamic tensor's range is found each time it is made.

    `ch_axis` goes with `qscheme`: the axis whose indices have a scale each ("per_channel"), the
    axis that groups of `group_size` values run along ("per_group"; the last group may be
    shorter in block formats only), the axis that one row of values runs along ("per_token"). A
    stack of tensors, each `group_size` long in the first axis, has a scale for each of them
    ("per_tensor"), or for each of their channels ("per_channel"). `scale_type` is "float",
    "poweroftwo", or "e8m0", the shared exponent of a block format, found by `scale_mode`
    ("floor", "even" or "ceil"); powers of two are at least 2^-`finest_position` where the
    device asks for that. Two more are of groups only: "e4m3", a number of fp8_e4m3 times one
    float of the tensor, and "microexponent", a shared exponent that is one less for some pairs
    of values. `symmetric_scale` is what symmetric integers whose scale is no power of two
    divide their largest magnitude by: "quant_max", or "half_range", (quant_max - quant_min) /
    2, which cuts half a step off it.
    """

    dtype: str = "int"
    bit_width: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow_range: bool = False
    scale_type: ScaleKind = "float"
    round_mode: RoundMode = "half_even"
    qscheme: QScheme = "per_tensor"
    ch_axis: int | None = None
    group_size: int | None = None
    is_dynamic: bool = False
    scale_mode: ScaleMode = "floor"
    method: RangeMethod = "maxmin"
    percentage: float = 99.99
    statistic: Statistic = "max"
    finest_position: int | None = None
    symmetric_scale: SymmetricScale = "quant_max"

    @classmethod
    def of(cls, fields: Fields) -> QuantizationSpec:
        """The spec that has these fields, and defaults for the rest."""
        return cls(**{name: sourced.value for name, sourced in fields.items()})

    @property
    def quant_min(self) -> int:
        """Smallest code: -2^(b-1) (+1 if narrow) for signed symmetric integers, else 0."""
        if self.signed and self.symmetric:
            return -(1 << (self.bit_width - 1)) + int(self.narrow_range)
        return 0

    @property
    def quant_max(self) -> int:
        """Largest code: 2^(b-1)-1 for signed symmetric integers, else 2^b-1."""
        return (1 << (self.bit_width - int(self.signed and self.symmetric))) - 1

    @property
    def has_symmetric_scale(self) -> bool:
        """Whether `symmetric_scale` changes the scale: one more code is negative, and the scale
        may be any float.
        """
        negative_end = self.signed and self.symmetric and not self.narrow_range
        return self.dtype == "int" and negative_end and self.scale_type in ("float", "e4m3")

    @property
    def has_one_scale(self) -> bool:
        """Whether all values of the tensor have one scale."""
        return self.qscheme == "per_tensor" and self.group_size is None

    @property
    def scales_per_group(self) -> int:
        """How many scales a group of values has: one, or one for each pair."""
        return (self.group_size or PAIR) // PAIR if self.scale_type == "microexponent" else 1

    @property
    def cut(self) -> tuple[str, int | None, int | None, int]:
        """Where one scale ends and the next begins, as `numerics.granularity` takes it."""
        return self.qscheme, self.ch_axis, self.group_size, self.scales_per_group

    @property
    def is_scaled(self) -> bool:
        """Whether the tensor has a scale."""
        return self.dtype not in CAST_ONLY

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)


@dataclass(frozen=True)
class Sourced:
    """A value and where it came from; `place` is None for a built-in default."""

    value: Any
    place: Place | None = None

    @property
    def origin(self) -> str:
        """`file:line:column`, or "default"."""
        return str(self.place) if self.place else "default"


Fields = Mapping[str, Sourced]
"""Some fields of a `QuantizationSpec`, or keys of a file, with their values."""


@dataclass(frozen=True)
class Settings:
    """The global switches; `places` maps a field's name to where the file sets it."""

    convert_relu6_to_relu: bool = False
    convert_silu_to_hswish: bool = False
    include_cle: bool = False
    include_bias_corr: bool = False
    keep_first_last_layer_accuracy: bool = False
    keep_add_layer_accuracy: bool = False
    change_concat_input_fix: bool = False
    change_pool_input_fix: bool = False
    onnx_opset_version: int = -1
    target_device: Device = "CPU"
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Selector:
    """Which layers a rule is about: all, those with weights of their own, those of a type,
    those a name pattern finds, or those it excludes.

    `required` False means that it may match none.
    """

    kind: Literal["all", "weighted", "type", "name", "exclude"]
    text: str = ""
    place: Place | None = None
    required: bool = True


@dataclass(frozen=True)
class ConfigRule:
    """One block of a config: for the selected layers, which roles are quantized and which spec
    fields are set.

    `label` is the block's path in the file (`layer_quantize_config[1]`). `roles` None means
    that this block does not say; `adds` are roles that it quantizes besides those that wider
    blocks do. `fields[role][field]` uses the field names of `QuantizationSpec`, `ch_axis` only
    where the file has it (a layer knows the axis of its output channels).
    """

    selector: Selector
    label: str
    roles: frozenset[Role] | None = None
    roles_place: Place | None = None
    fields: Mapping[Role, Fields] = field(default_factory=dict)
    adds: frozenset[Role] = frozenset()


@dataclass(frozen=True)
class ScalingLayer:
    """One entry of `scaling_layers`, with names relative to a block: layers that read one value
    are scaled together.

    `prev_op` makes that value, `inp` is one of the layers whose input it is; an empty name
    means: found on the graph.
    """

    layers: tuple[str, ...]
    prev_op: str = ""
    inp: str = ""
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Names:
    """The parts of a model that an algorithm's settings name; None means that they are found on
    the graph.

    `blocks` is the module that holds the decoder's blocks, `inside` the layers of a block in
    the order in which they are processed, `scaling` the groups that are scaled together,
    `embeddings` are layers that must exist and no more. `places` has the file's place of each
    field that is set.
    """

    blocks: str | None = None
    inside: tuple[str, ...] | None = None
    scaling: tuple[ScalingLayer, ...] | None = None
    embeddings: tuple[str, ...] | None = None
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)


_NAMES: Mapping[str, str] = {
    "model_decoder_layers": "blocks",
    "inside_layer_modules": "inside",
    "scaling_layers": "scaling",
    "embedding_layers": "embeddings",
}
"""The key for each field of `Names`."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as a file lists it: its class, its entry's path, and each stated key with
    where it is.

    `groups` are the places of the groups in `scaling_layers`; `unread` are keys that say
    something which nothing reads, each with the reason and its first place.
    """

    kind: type[AlgoConfig]
    path: tuple[str | int, ...]
    stated: Mapping[str, Sourced]
    place: Place | None = None
    groups: tuple[Place | None, ...] = ()
    unread: Mapping[str, tuple[str, Place | None]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in the file."""
        return self.kind.name

    @property
    def stage(self) -> Stage:
        """Whether it rescales or rounds weights."""
        return self.kind.stage

    @property
    def needs_data(self) -> bool:
        """Whether it reads the calibration data."""
        return self.kind.needs_data

    @property
    def label(self) -> str:
        """`algo_config[0]`, or `algo_config` where one algorithm stands without a list."""
        return str(self.path[0]) + "".join(f"[{part}]" for part in self.path[1:])

    def value(self, key: str) -> Any:
        """A setting as it is stated, or its default."""
        return self.stated[key].value if key in self.stated else getattr(self.kind, key)

    @property
    def settings(self) -> AlgoConfig:
        """What runs: everything that is read, without switches that need one which is off."""
        found = {key: self.value(key) for key in read_keys(self.kind)}
        needed = {
            key: meant.needs for key, meant in settings_of(self.kind).items() if meant.needs
        }
        return self.kind(
            **{**found, **{key: found[key] and found[needs] for key, needs in needed.items()}}
        )

    @property
    def names(self) -> Names:
        """The parts of the model that it names."""
        found = {name: self.stated[key] for key, name in _NAMES.items() if key in self.stated}
        values: dict[str, Any] = {
            name: tuple(said.value) if isinstance(said.value, list) else said.value
            for name, said in found.items()
        }
        if "scaling" in values:
            values["scaling"] = tuple(
                ScalingLayer(
                    tuple(group.get("layers", ())),
                    group.get("prev_op", ""),
                    group.get("inp", ""),
                    place,
                )
                for group, place in zip(values["scaling"], self.groups, strict=True)
            )
        return Names(
            **values, places={name: said.place for name, said in found.items() if said.place}
        )


@dataclass(frozen=True)
class Config:
    """A validated config: settings, and rules in the file's order (overall first, then tensor,
    then layers).

    `source` is the file as it was shown to the user, `text` what it holds, `document` the
    parsed JSON, for `config.resolved.json`; `algorithms` change the weights, in this order.
    """

    settings: Settings
    rules: tuple[ConfigRule, ...]
    source: str = "<built-in default>"
    document: Mapping[str, Any] = field(default_factory=dict)
    form: Form = "layered"
    algorithms: tuple[Algorithm, ...] = ()
    text: str = ""
