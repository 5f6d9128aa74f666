"""What a config says, as frozen values in the field's words. No tensors, no files, no file's spelling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from quantizer.config.diagnostics import Place

Role = Literal["input", "weights", "bias", "activation"]
ROLES: tuple[Role, ...] = ("input", "weights", "bias", "activation")


@dataclass(frozen=True)
class QuantizationSpec:
    """How one tensor is quantized; every axis is independent of the others.

    `dtype` is "int" (then `bit_width`, `signed`, `symmetric` and `narrow_range` give the integer grid) or the name of a
    floating-point format ("float16", "bfloat16", "float32" = left alone). `method` finds the range, `percentage` is
    read by the percentile method only, `statistic` reduces the batches' ranges to one. `ch_axis` is set when `qscheme`
    is "per_channel".
    """

    dtype: str = "int"
    bit_width: int = 8
    signed: bool = True
    symmetric: bool = True
    narrow_range: bool = False
    scale_type: str = "float"
    round_mode: str = "half_even"
    qscheme: str = "per_tensor"
    ch_axis: int | None = None
    method: str = "maxmin"
    percentage: float = 99.99
    statistic: str = "max"

    @property
    def quant_min(self) -> int:
        """Smallest code: -2^(b-1) (+1 if narrow) for signed symmetric grids, else 0."""
        if self.signed and self.symmetric:
            return -(1 << (self.bit_width - 1)) + int(self.narrow_range)
        return 0

    @property
    def quant_max(self) -> int:
        """Largest code: 2^(b-1)-1 for signed symmetric grids, else 2^b-1."""
        return (1 << (self.bit_width - int(self.signed and self.symmetric))) - 1

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
    target_device: str = "CPU"
    places: Mapping[str, Place] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Selector:
    """Which layers a rule is about: all, those of a type, or those a name pattern finds.

    `required` False means that it may match none.
    """

    kind: Literal["all", "type", "name"]
    text: str = ""
    place: Place | None = None
    required: bool = True


@dataclass(frozen=True)
class Rule:
    """One block of a config: for the selected layers, which roles are quantized and which spec fields are set.

    `label` is the block's path in the file (`layer_quantize_config[1]`). `roles` None means that this block does not
    say. `fields[role][field]` uses the field names of `QuantizationSpec`, `qscheme` without `ch_axis` (the layer knows
    its axis).
    """

    selector: Selector
    label: str
    roles: frozenset[Role] | None = None
    roles_place: Place | None = None
    fields: Mapping[Role, Mapping[str, Sourced]] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """A validated config: settings, and rules in the file's order (overall first, then tensor, then layers).

    `source` is the file as it was shown to the user; `document` the parsed JSON, for `config.resolved.json` and hashes.
    """

    settings: Settings
    rules: tuple[Rule, ...]
    source: str = "<built-in default>"
    document: Mapping[str, Any] = field(default_factory=dict)
