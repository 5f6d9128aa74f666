"""Decide which fields of a spec have an effect, and check one spec for device restrictions and
conflicts: the rules are rows of schemas/quantization_spec.schema.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from quantizer.config.diagnostics import Diagnostic, Place, Severity, Sourced
from quantizer.config.json_types import JsonMapping
from quantizer.config.model import CAST_ONLY, QuantizationSpec, Role
from quantizer.config.resources import load_resource

if TYPE_CHECKING:
    from jsonschema import Draft7Validator

_CONTEXT = ("tensor", "target_device")


@dataclass(frozen=True)
class Conflict:
    """A broken rule: `fields` are fields of `QuantizationSpec`, the one that the message is
    about first.

    `on_device` means that the device is a cause, too. A warning, and a rule that is `beside`
    another, name devices only to keep quiet where an error is reported.
    """

    code: str
    message: str
    fields: tuple[str, ...]
    help: str
    severity: Severity
    on_device: bool

    def at(
        self, places: Sequence[Place], *, remark: str = "in conflict with this", where: str = ""
    ) -> Diagnostic:
        """Return the finding at the first of the places, which the others are related to.

        `where` says whose values these are, at the end of the message.
        """
        place, *others = places
        return Diagnostic(
            self.code,
            self.message + where,
            place,
            self.severity,
            help=self.help,
            related=tuple((other, remark) for other in others),
        )


@cache
def spec_rules() -> Mapping[str, JsonMapping]:
    """Return the rules of the spec schema by code, each with `title`, `description`, `help`,
    `if` and `then`.

    A rule with a `form` is about files of that form only, and its help is in that form's words.
    """
    schema = load_resource("schemas", "quantization_spec.schema.json")
    return {rule["code"]: rule for rule in (*schema["then"]["allOf"], *schema["allOf"])}


@cache
def all_codes() -> Mapping[str, JsonMapping]:
    """Return every code in order, with `title`, `description` and `help`: the rules, and the
    codes of schemas/codes.json.
    """
    codes = {**load_resource("schemas", "codes.json"), **spec_rules()}
    return dict(sorted(codes.items()))


@lru_cache(maxsize=4096)
def conflicts(
    spec: QuantizationSpec, role: Role, device: str, form: str = "layered"
) -> tuple[Conflict, ...]:
    """Return the rules that `spec` breaks as the spec of a `role` tensor on `device` ("DPU",
    "CPU", "GPU", "IPU").

    `form` is that of the file. Formats without a scale break no rule, and other floating-point
    formats no rule about integers.

    >>> spec = QuantizationSpec(symmetric=False, signed=False, method="mse")
    >>> [conflict.code for conflict in conflicts(spec, "activation", "CPU")]
    ['QZ302']
    """
    if not spec.is_scaled:
        return ()
    instance = {**spec.to_json(), "tensor": role, "target_device": device}
    broken: list[Conflict] = []
    for rule, validator in _validators(spec.dtype == "int", form):
        for error in validator.iter_errors(instance):
            if isinstance(error.schema, dict):
                broken.append(_conflict(rule, error.schema["errorMessage"], form))
    return tuple(broken)


@cache
def _validators(integers: bool, form: str) -> tuple[tuple[JsonMapping, Draft7Validator], ...]:
    """Return the rules about this kind of format and this form, compiled."""
    # Importing jsonschema takes a fifteenth of the time of importing torch
    from jsonschema import Draft7Validator

    schema = load_resource("schemas", "quantization_spec.schema.json")
    rules = [*schema["then"]["allOf"]] if integers else []
    rules += schema["allOf"]
    validators: list[tuple[JsonMapping, Draft7Validator]] = []
    for rule in rules:
        if rule.get("form", form) == form:
            condition = {"if": rule["if"], "then": rule["then"]}
            validators.append((rule, Draft7Validator(condition)))
    return tuple(validators)


def _conflict(rule: JsonMapping, message: str, form: str) -> Conflict:
    severity = rule.get("severity", "error")
    names = (*rule["then"]["properties"], *rule["if"]["properties"])
    return Conflict(
        code=rule["code"],
        message=message,
        fields=tuple(name for name in names if name not in _CONTEXT),
        help=rule.get(f"help_{form}", rule["help"]),
        severity=severity,
        on_device=severity == "error" and "target_device" in names and "beside" not in rule,
    )


def effective(spec: QuantizationSpec) -> QuantizationSpec:
    """Return the spec with defaults for the fields that nothing reads: equal results give equal
    codes.

    >>> effective(QuantizationSpec(percentage=99, ch_axis=0)) == QuantizationSpec()
    True
    """
    if not spec.is_scaled:
        return QuantizationSpec(spec.dtype)
    if not spec.has_signed_codes:
        spec = replace(spec, signed=False, narrow_range=False)
    if spec.qscheme == "per_tensor":
        spec = replace(spec, ch_axis=None, group_size=None)
    if spec.method != "percentile":
        spec = replace(spec, percentage=QuantizationSpec.percentage)
    if not spec.has_symmetric_scale:
        spec = replace(spec, symmetric_scale=QuantizationSpec.symmetric_scale)
    return spec


def is_foreign(dtype: str | None, other: str | None) -> bool:
    """Return whether one of two dtypes of `QuantizationSpec` is an integer format and the other
    a scaled floating-point format.

    >>> is_foreign("int", "fp8_e4m3")
    True
    >>> is_foreign("fp4", "fp8_e4m3"), is_foreign("int", "float16")
    (False, False)
    """
    scaled = {dtype, other} - CAST_ONLY - {None}
    return len(scaled) == 2 and "int" in scaled


def other_weight_axis(axis: Sourced, role: Role) -> Sourced | None:
    """Return the other one of a weight's first two axes.

    Groups of a channel run along the other axis than the channels. Return None for other axes
    and roles, of which it is not known.
    """
    if role != "weights" or axis.value not in (0, 1):
        return None
    return Sourced(1 - axis.value, axis.place)
