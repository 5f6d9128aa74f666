"""Which of a weaker rule's fields still mean something under a stronger one. Knows fields, not layers."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.config.hierarchical_spec import is_foreign, turned
from quantizer.config.model import ConfigRule, Fields, Role, Sourced

KINDRED = frozenset({"bit_width", "signed", "symmetric", "narrow_range", "round_mode", "scale_mode"})
"""Fields that integers do not inherit from floating-point formats, and the other way round."""

_AXES = {"per_channel", "per_group"}


def merged(blocks: Sequence[Fields], role: Role) -> dict[str, Sourced]:
    """Each field from the strongest rule that sets it; `blocks` are the rules' fields for one role, weakest first.

    A shared exponent belongs to the format that states it, as the symmetry and the rounding of integers do to theirs.
    An axis is turned where channels with a scale each become groups, or the other way round.

    >>> words = {"dtype": Sourced("int"), "symmetric": Sourced(False)}
    >>> merged([words, {"dtype": Sourced("fp4")}], "weights")
    {'dtype': Sourced(value='fp4', place=None)}
    """
    values: dict[str, Sourced] = {}
    last = next((fields["dtype"].value for fields in reversed(blocks) if "dtype" in fields), None)
    dtype: str | None = None
    for fields in blocks:
        dtype = fields["dtype"].value if "dtype" in fields else dtype
        if "dtype" in fields and _value(values, "scale_type") == "e8m0":
            del values["scale_type"]
        before = _value(values, "qscheme"), values.get("ch_axis")
        foreign = KINDRED if is_foreign(dtype, last) else frozenset()
        values |= {name: sourced for name, sourced in fields.items() if name not in foreign}
        if before[1] and "ch_axis" not in fields and {before[0], _value(values, "qscheme")} == _AXES:
            axis = turned(values.pop("ch_axis"), role)
            values |= {"ch_axis": axis} if axis else {}
    return values


def says(rule: ConfigRule, role: Role, before: bool) -> bool:
    """Whether the role is quantized after a rule, which may not say."""
    return (before if rule.roles is None else role in rule.roles) or role in rule.adds


def _value(values: Fields, name: str) -> object:
    return values[name].value if name in values else None
