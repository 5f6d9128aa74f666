"""The device restrictions and conflicts of one spec, rows of
schemas/quantization_spec.schema.json; and all codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from quantizer.config.diagnostics import Severity
from quantizer.config.model import QuantizationSpec, Role
from quantizer.config.resources import load_resource

if TYPE_CHECKING:
    from jsonschema import Draft7Validator

_CONTEXT = ("tensor", "target_device")


@dataclass(frozen=True)
class Conflict:
    """One broken rule: `fields` are fields of `QuantizationSpec`, the one that the message is
    about first.

    `on_device` says that the device counts too; a warning, and a rule that is `beside` another,
    names devices only to keep quiet where an error speaks.
    """

    code: str
    message: str
    fields: tuple[str, ...]
    help: str
    severity: Severity = "error"
    on_device: bool = False


@cache
def spec_rules() -> Mapping[str, Mapping[str, Any]]:
    """The rules of the spec schema by code; of each `title`, `description`, `help`, `if` and
    `then`.

    A rule with a `form` is about files of that form only, and its help is in that form's words.
    """
    schema = load_resource("schemas", "quantization_spec.schema.json")
    return {rule["code"]: rule for rule in (*schema["then"]["allOf"], *schema["allOf"])}


@cache
def all_codes() -> Mapping[str, Mapping[str, Any]]:
    """Every code in order, with `title`, `description` and `help`: the rules, and those of
    schemas/codes.json.
    """
    return dict(sorted({**load_resource("schemas", "codes.json"), **spec_rules()}.items()))


@lru_cache(maxsize=4096)
def conflicts(
    spec: QuantizationSpec, role: Role, device: str, form: str = "layered"
) -> tuple[Conflict, ...]:
    """The rules that `spec` breaks as the spec of a `role` tensor on `device` ("DPU", "CPU",
    "GPU", "IPU").

    `form` is that of the file. Formats without a scale break none, and other floating-point
    formats none of those about integers.

    >>> spec = QuantizationSpec(symmetric=False, signed=False, method="mse")
    >>> [conflict.code for conflict in conflicts(spec, "activation", "CPU")]
    ['QZ302']
    """
    if not spec.is_scaled:
        return ()
    instance = {**spec.to_json(), "tensor": role, "target_device": device}
    return tuple(
        _conflict(rule, error.schema["errorMessage"], form)
        for rule, validator in _validators(spec.dtype == "int", form)
        for error in validator.iter_errors(instance)
        if isinstance(error.schema, dict)
    )


@cache
def _validators(
    integers: bool, form: str
) -> tuple[tuple[Mapping[str, Any], Draft7Validator], ...]:
    """The rules that are about the kind of format and the form, compiled."""
    from jsonschema import Draft7Validator  # takes as long to import as a fifteenth of torch

    schema = load_resource("schemas", "quantization_spec.schema.json")
    rules = [*(schema["then"]["allOf"] if integers else ()), *schema["allOf"]]
    held = [rule for rule in rules if rule.get("form", form) == form]
    return tuple(
        (rule, Draft7Validator({"if": rule["if"], "then": rule["then"]})) for rule in held
    )


def _conflict(rule: Mapping[str, Any], message: str, form: str) -> Conflict:
    severity = rule.get("severity", "error")
    named = (*rule["then"]["properties"], *rule["if"]["properties"])
    return Conflict(
        code=rule["code"],
        message=message,
        fields=tuple(name for name in named if name not in _CONTEXT),
        help=rule.get(f"help_{form}", rule["help"]),
        severity=severity,
        on_device=severity == "error" and "target_device" in named and "beside" not in rule,
    )
