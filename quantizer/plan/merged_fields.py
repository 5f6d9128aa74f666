"""Merge the fields of several rules into those of one spec."""

import dataclasses
from collections.abc import Sequence

from quantizer.config.forms.hierarchical_spec import is_foreign, turned
from quantizer.config.model import (
    Fields,
    QuantizationSpec,
    Role,
    Sourced,
)
from quantizer.numerics.qparams import SHARED_EXPONENTS

KINDRED = frozenset(
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
"""Fields that integers do not inherit from floating-point formats, and the other way round."""


_AXES = {"per_channel", "per_group"}


def merged(blocks: Sequence[Fields], role: Role) -> dict[str, Sourced]:
    """Each field from the strongest rule that sets it; `blocks` are the rules' fields for one
    role, weakest first.

    A shared exponent belongs to the format that states it, as the symmetry and the rounding of
    integers do to theirs. An axis is turned where channels with a scale each become groups, or
    the other way round.

    >>> words = {"dtype": Sourced("int"), "symmetric": Sourced(False)}
    >>> merged([words, {"dtype": Sourced("fp4")}], "weights")
    {'dtype': Sourced(value='fp4', place=None)}
    """
    values: dict[str, Sourced] = {}
    last = next(
        (fields["dtype"].value for fields in reversed(blocks) if "dtype" in fields), None
    )
    dtype: str | None = None
    for fields in blocks:
        wider, dtype = dtype, fields["dtype"].value if "dtype" in fields else dtype
        scale_type = _value(values, "scale_type") if "dtype" in fields else None
        if scale_type in SHARED_EXPONENTS or (
            scale_type == "e4m3" and is_foreign(wider, dtype)
        ):
            del values["scale_type"]
        before = _value(values, "qscheme"), values.get("ch_axis")
        foreign = KINDRED if is_foreign(dtype, last) else frozenset()
        values |= {name: sourced for name, sourced in fields.items() if name not in foreign}
        if (
            before[1]
            and "ch_axis" not in fields
            and {before[0], _value(values, "qscheme")} == _AXES
        ):
            axis = turned(values.pop("ch_axis"), role)
            values |= {"ch_axis": axis} if axis else {}
    return values


def _value(values: Fields, name: str) -> object:
    return values[name].value if name in values else None


def with_finest_position(spec: QuantizationSpec, device: str) -> QuantizationSpec:
    """The spec as `device` takes it: the DPU's scales have at most 12 fraction bits up to 8
    bits, else 15.

    Source: pytorch_nndct 3.5. Other devices have no limit.
    """
    if device != "DPU" or spec.dtype != "int" or spec.scale_type != "poweroftwo":
        return spec
    return dataclasses.replace(spec, finest_position=12 if spec.bit_width <= 8 else 15)
