"""Checks what a file of the hierarchical form means: each level merged with the global one, against the rule book."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.document import pointer_to
from quantizer.config.hierarchical import ROLE_OF, Hierarchical, Level
from quantizer.config.hierarchical_spec import (
    GROUP_SIZES,
    METHODS,
    PARAMETERS,
    is_block,
    is_channel_axis,
    is_per_token,
    normalized,
    scheme,
    value_of,
)
from quantizer.config.model import CAST_ONLY, Device, Fields, QuantizationSpec, Role
from quantizer.config.rules import Conflict, conflicts

_LEVELS = ("global_quant_config", "layer_type_quant_config", "layer_quant_config")


def check_hierarchical(levels: Hierarchical) -> Iterator[Diagnostic]:
    """Findings on a file whose structure is sound, or on the sound part of it."""
    scopes = list(_scopes(levels))
    for scope in scopes:
        yield from _broken_rules(levels, scope)
        yield from _observer(scope)
        yield from _elements(levels, scope)
        yield from _read_otherwise(scope)
    yield from _idle(scopes)
    yield from _devices(levels)
    yield from _nothing(levels)


@dataclass(frozen=True)
class _Scope:
    """What holds for one role at one level, in the form's words: what it states over what it inherits."""

    role: Role
    raw: Fields
    own: Fields
    wider: Fields

    def place(self, *keys: str) -> Place | None:
        """Where the first of the keys that is stated stands."""
        return next((self.raw[key].place for key in keys if key in self.raw), None)

    def places(self, named: Iterable[Place | None]) -> list[Place]:
        """The places of values in conflict, those of this level first; of a file's levels, this one asks for it."""
        stated = {sourced.place for sourced in self.own.values()}
        found = dict.fromkeys(place for place in named if place)
        if not stated.intersection(found) and (dtype := self.own.get("dtype")) and dtype.place:
            return [dtype.place, *found]
        return sorted(found, key=lambda place: place not in stated)


def _scopes(levels: Hierarchical) -> Iterator[_Scope]:
    for level in levels.levels:
        wider = levels.wider(level)
        for role, own in level.specs.items():
            yield _Scope(role, level.over(wider, role), own, wider.specs.get(role, {}) if wider else {})


def _broken_rules(levels: Hierarchical, scope: _Scope) -> Iterator[Diagnostic]:
    merged, device = normalized(scope.raw, scope.role), levels.settings.target_device
    reported = {conflict.code for conflict in _conflicts(normalized(scope.wider, scope.role), scope.role, device)}
    stated = {sourced.place for sourced in scope.own.values()}
    for conflict in _conflicts(merged, scope.role, device):
        named = [merged[name].place for name in conflict.fields if name in merged]
        if conflict.code in reported and stated.isdisjoint(named):
            continue  # it is the wider level's, and reported there
        if conflict.fields[0] in merged or not levels.is_wrong(conflict.fields[0]):
            yield _conflict(conflict, scope, named)


def _conflicts(merged: Fields, role: Role, device: Device) -> tuple[Conflict, ...]:
    return conflicts(QuantizationSpec.of(merged), role, device, "hierarchical")


def _conflict(conflict: Conflict, scope: _Scope, named: list[Place | None]) -> Diagnostic:
    """The finding at the value that this level states, or where one is missing, at the one that asks for it."""
    at, *others = scope.places(list(filter(None, named)) or [scope.place("dtype", *scope.raw)])
    related = tuple((place, "in conflict with this") for place in others)
    return Diagnostic(conflict.code, conflict.message, at, conflict.severity, help=conflict.help, related=related)


def _observer(scope: _Scope) -> Iterator[Diagnostic]:
    """An observer for another granularity, or none for a format that needs one."""
    observer, found = value_of(scope.raw, "observer_cls"), scheme(scope.raw)
    if observer is None or value_of(scope.raw, "dtype") in CAST_ONLY:
        return
    if observer not in METHODS:
        text = f"{observer} finds no range, and {value_of(scope.raw, 'dtype')} needs one"
        yield Diagnostic(
            "QZ117", text, scope.place("observer_cls"), help="remove the key: a MinMax observer is the default"
        )
    elif found not in METHODS[observer][1]:
        fitting = [name for name, (method, schemes) in METHODS.items() if found in schemes and method == "maxmin"]
        at, *others = scope.places([scope.place("observer_cls"), scope.place("qscheme")])
        yield Diagnostic(
            "QZ117",
            f"{observer} does not support {found}",
            at,
            help=f'write "observer_cls": "{fitting[0]}", or "qscheme": "{METHODS[observer][1][0]}"',
            related=tuple((place, "in conflict with this") for place in others),
        )


def _elements(levels: Hierarchical, scope: _Scope) -> Iterator[Diagnostic]:
    key = "mx_element_dtype"
    if value_of(scope.raw, "dtype") == "mx" and key not in scope.raw and not levels.is_wrong(key):
        text = "a key is missing here: mx_element_dtype"
        yield Diagnostic("QZ105", text, scope.place("dtype"), help='for example "mx_element_dtype": "fp4"')


def _read_otherwise(scope: _Scope) -> Iterator[Diagnostic]:
    """Words that have another meaning here than they seem to have."""
    raw, parameter = scope.raw, scope.role in PARAMETERS
    if value_of(raw, "dtype") in CAST_ONLY:
        return
    if parameter and value_of(raw, "is_dynamic") is True:
        text = "weights and biases are quantized ahead of time, so is_dynamic has no effect"
        yield Diagnostic("QZ122", text, scope.place("is_dynamic"), "note", help='write "is_dynamic": false')
    if scheme(raw) == "per_channel" and is_per_token(raw, scope.role):
        text = "dynamic per_channel is read as per_token: each row (for convolutions, each sample) has a scale"
        yield Diagnostic(
            "QZ122", text, scope.place("qscheme", "observer_cls"), "note", help='write "qscheme": "per_token"'
        )
    if scheme(raw) != "per_group" or value_of(raw, "observer_cls") != "PerChannelMinMaxObserver":
        return
    axis = value_of(raw, "ch_axis")
    if not is_channel_axis(raw, scope.role):
        text = "PerChannelMinMaxObserver divides the channels of weights into groups; it cannot group activations"
        yield Diagnostic(
            "QZ117", text, scope.place("observer_cls"), help='write "observer_cls": "PerGroupMinMaxObserver"'
        )
    elif axis in (0, 1) and "ch_axis" in scope.own:
        text = f"with PerChannelMinMaxObserver, ch_axis {axis} is the channel axis: groups run along axis {1 - axis}"
        help_ = f'write "observer_cls": "PerGroupMinMaxObserver", "ch_axis": {1 - axis}'
        yield Diagnostic("QZ122", text, scope.place("ch_axis"), "note", help=help_)
    elif axis not in (None, 0, 1):
        text = "with PerChannelMinMaxObserver, ch_axis is the channel axis, so it must be 0 or 1"
        yield Diagnostic(
            "QZ104",
            text,
            scope.place("ch_axis"),
            help='write 0 or 1, or "observer_cls": "PerGroupMinMaxObserver" with the axis along which groups run',
        )


def _idle(scopes: list[_Scope]) -> Iterator[Diagnostic]:
    """Keys that no level reads; what is read at one level has an effect."""
    reasons = [_unread(scope) for scope in scopes]
    used = {
        sourced.place
        for scope, unread in zip(scopes, reasons, strict=True)
        for key, sourced in scope.raw.items()
        if key not in unread
    }
    for scope, unread in zip(scopes, reasons, strict=True):
        for key, reason in unread.items():
            if scope.raw[key].place not in used:
                yield Diagnostic("QZ111", f"{key} has no effect", scope.place(key), "warning", help=f"remove: {reason}")


def _unread(scope: _Scope) -> dict[str, str]:
    """The stated keys that have no effect in this scope, and why."""
    raw, found = scope.raw, scheme(scope.raw)
    dtype = value_of(raw, "dtype")
    if dtype in CAST_ONLY:
        needless = [key for key in raw if key != "dtype" and raw[key].value != "PlaceholderObserver"]
        return dict.fromkeys(needless, f"{dtype} has no scale")
    per_token = is_per_token(raw, scope.role)
    spelled = found == "per_channel" and per_token
    reads = {
        "ch_axis": (found in ("per_channel", "per_group"), f"{found} reads no axis"),
        "group_size": (found == "per_group", "only per_group reads it"),
        "percentage": (
            value_of(raw, "observer_cls") == "PerTensorPercentileObserver",
            "only PerTensorPercentileObserver reads it",
        ),
        "mx_element_dtype": (dtype == "mx", "only the dtype mx reads it"),
        "scale_calculation_mode": (is_block(raw), "only block formats read it"),
        "scale_type": (
            not (is_block(raw) and value_of(raw, "scale_type") == "pof2"),
            "a block format's scale is a power of two anyway",
        ),
        "scale_format": (
            not (dtype in GROUP_SIZES and value_of(raw, "scale_format") == "float32"),
            f"the scale of {dtype} is a power of two",
        ),
    }
    return {key: why for key, (read, why) in reads.items() if key in raw and not read and not (spelled and read)}


def _devices(levels: Hierarchical) -> Iterator[Diagnostic]:
    """A layer's target_device that is not the model's."""
    document = levels.document
    for level in levels.levels[1:]:
        stated = _at(document.value, level).get("target_device")
        pointer = pointer_to(*level.pointer, "target_device")
        if isinstance(stated, str) and stated != levels.settings.target_device:
            related = levels.settings.places.get("target_device")
            yield Diagnostic(
                "QZ119",
                f"the model's device is {levels.settings.target_device}; a layer cannot have another one",
                document.place(pointer),
                help="remove the key, and write it in global_quant_config",
                related=((related, "the model's device"),) if related else (),
            )


def _at(value: Mapping[str, Mapping[str, Mapping[str, object]]], level: Level) -> Mapping[str, object]:
    block, text = level.pointer
    return value[str(block)][str(text)]


def _nothing(levels: Hierarchical) -> Iterator[Diagnostic]:
    """A file without any spec, right or wrong."""
    value, place = levels.document.value, levels.levels[0].selector.place
    stated = [level for block in _LEVELS for level in _configurations(value, block) if ROLE_OF.keys() & level.keys()]
    if place and not any(level[key] is not None for level in stated for key in ROLE_OF.keys() & level.keys()):
        help_ = 'for example "weight": {"dtype": "int8"}'
        yield Diagnostic(
            "QZ123", "no tensor has a specification, so nothing is quantized", place, "warning", help=help_
        )


def _configurations(value: Mapping[str, Any], block: str) -> list[Mapping[str, Any]]:
    found = value.get(block)
    levels = [found] if block == "global_quant_config" else [*found.values()] if isinstance(found, dict) else []
    return [level for level in levels if isinstance(level, dict)]
