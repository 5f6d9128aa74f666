"""Checks what the algorithms of a file mean: their order, their device, and settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quantizer.config.algorithm_words import FIND_CODES, UNREAD, Entry
from quantizer.config.algorithms import Awq, Gptq, Rotation
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.model import Config, QuantizationSpec, Sourced
from quantizer.config.wording import quoted

_FIELDS = {"bit": "bit_width", "sym": "symmetric", "group_size": "group_size"}
"""Keys of older files about the weights' grid, which their specification decides."""

_PARTS = ("residual", "values", "online")
"""What a rotation turns, each on its own."""

_SEARCHES = ("scale_search", "clip_search")
"""What AWQ does besides plain rounding; both are on by default."""


def check_algorithms(entries: Sequence[Entry], config: Config) -> Iterator[Diagnostic]:
    """Findings on the entries, in the order in which they run, of a file whose other settings are `config`."""
    yield from _order([entry for entry in entries if not _is_misplaced(entry)])
    yield from _turned_again([entry for entry in entries if entry.kind is Rotation])
    weights = _global_weights(config)
    for entry in entries:
        yield from _device(entry, config)
        if _is_misplaced(entry):
            text = f"{entry.kind.name} finds weight codes, and this is about what happens before"
            yield Diagnostic("QZ332", text, entry.place, help="write it in algo_config")
        yield from _groups(entry, weights)
        yield from _other_grid(entry, weights)
        for key, place in entry.unread.items():
            yield Diagnostic("QZ111", f"{key} has no effect: {UNREAD[key]}", place, "note", help="remove the key")
        yield from _idle(entry, config)


def _order(entries: Sequence[Entry]) -> Iterator[Diagnostic]:
    """One algorithm rounds, and none rescales after it, nor after AWQ, which leaves ranges of the scaled weights."""
    settled: Entry | None = None
    for entry in entries:
        name, rounds = entry.kind.name, entry.kind.stage == "round"
        if settled is None or (rounds and settled.kind.stage != "round"):
            settled = entry if name in FIND_CODES else None
            continue
        first, has_codes = settled.kind.name, settled.kind.stage == "round"
        related = _related(settled.place, "rounds here" if has_codes else "finds ranges here")
        keep = "keep one of the two"
        if rounds:
            text = f"{first} rounds the weights already, and {name} would round them again"
            yield Diagnostic("QZ331", text, entry.place, help=keep, related=related)
        else:
            done = "rounded them" if has_codes else "found their ranges"
            text = f"{name} scales weights, and {first} has {done} by then"
            help_ = keep if name == first else f"write {name} before {first}"
            yield Diagnostic("QZ330", text, entry.place, help=help_, related=related)


def _turned_again(rotations: Sequence[Entry]) -> Iterator[Diagnostic]:
    """A product of two Hadamard matrices spreads an outlier less evenly than one of them."""
    first: dict[str, Entry] = {}
    for entry in rotations:
        parts = [key for key in _PARTS if entry.settings()[key]]
        again = [key for key in parts if key in first]
        if again:
            text = f"a rotation before has turned {', '.join(again)} already, and nothing is gained by another"
            related = _related(first[again[0]].place, "rotates here")
            yield Diagnostic("QZ128", text, entry.place, "warning", help="keep one of the two", related=related)
        first = {**dict.fromkeys(parts, entry), **first}


def _device(entry: Entry, config: Config) -> Iterator[Diagnostic]:
    if config.settings.target_device == "DPU":
        text = f"{entry.kind.name} is not for the DPU: after calibration its scales are moved into the limits of \
shifters, which would undo what the algorithm found"
        related = _related(config.settings.places.get("target_device"), "for this device")
        yield Diagnostic("QZ210", text, entry.place, help="remove it, or write another target_device", related=related)


def _is_misplaced(entry: Entry) -> bool:
    return entry.path[0] == "pre_quant_opt_config" and entry.kind.name in FIND_CODES


def _groups(entry: Entry, weights: dict[str, Sourced]) -> Iterator[Diagnostic]:
    """The order by activation jumps from group to group, so all scales have to be there before."""
    if not issubclass(entry.kind, Gptq):
        return
    has_groups = _value(weights, "qscheme") == "per_group"
    order, static = entry.stated.get("desc_act"), entry.stated.get("static_groups")
    if order and static and order.value and not static.value:
        text = "desc_act settles the columns of all groups in turn, so their scales are found first: static_groups"
        related = _related(order.place, "because of this")
        help_ = 'write "static_groups": true, or "desc_act": false'
        yield Diagnostic("QZ333", text, static.place, help=help_, related=related)
    elif entry.needs_static_groups and has_groups:
        text = "groups are static here, as desc_act needs it"
        yield Diagnostic("QZ126", text, entry.place, "note", help='to say the same: "static_groups": true')
    elif static and not static.value and order is None:
        text = "desc_act is off here, as it needs static groups"
        yield Diagnostic("QZ126", text, static.place, "note", help='to say the same: "desc_act": false')


def _other_grid(entry: Entry, weights: dict[str, Sourced]) -> Iterator[Diagnostic]:
    """Stated keys that disagree with the grid of the weights."""
    if not weights or _value(weights, "dtype") != "int":
        return
    for key, name in _FIELDS.items():
        stated, found = entry.stated.get(key), _value(weights, name)
        if key == "group_size" and _value(weights, "qscheme") != "per_group":
            found = -1
        if stated and stated.value != found:
            text = f"{key} {quoted(stated.value)} is not what the weights' specification says: it decides"
            source = weights.get("qscheme" if found == -1 else name, weights.get(name))
            related = _related(source.place if source else None, f"here it is {quoted(found)}")
            yield Diagnostic("QZ127", text, stated.place, "warning", help="remove the key", related=related)


def _idle(entry: Entry, config: Config) -> Iterator[Diagnostic]:
    """Rounding where no weights are quantized, and a search that is told to leave both of its searches out."""
    if entry.kind.name in FIND_CODES and not _quantizes_weights(config):
        text = f"no weights are rounded to a grid, so {entry.kind.name} has nothing to do"
        yield Diagnostic("QZ128", text, entry.place, "warning", help="quantize weights, or remove the algorithm")
    elif entry.kind is Awq and not any(entry.settings()[key] for key in _SEARCHES):
        first, last = (entry.stated[key].place for key in _SEARCHES)
        text = f"neither {' nor '.join(_SEARCHES)} is on, so awq does nothing but plain rounding"
        help_ = "remove one of the two keys, or the algorithm"
        yield Diagnostic("QZ128", text, last, "warning", help=help_, related=_related(first, "the other one"))


def _quantizes_weights(config: Config) -> bool:
    inherited = _global_weights(config)
    return any(
        QuantizationSpec(dtype=_value({**inherited, **rule.fields.get("weights", {})}, "dtype")).is_scaled
        for rule in config.rules
        if "weights" in (rule.roles or ()) or "weights" in rule.adds
    )


def _global_weights(config: Config) -> dict[str, Sourced]:
    """What holds for weights of all layers; nothing where they are not quantized everywhere."""
    wide = [rule for rule in config.rules if rule.selector.kind in ("all", "weighted")]
    if not any("weights" in (rule.roles or ()) or "weights" in rule.adds for rule in wide):
        return {}
    merged = {name: sourced for rule in wide for name, sourced in rule.fields.get("weights", {}).items()}
    return {"dtype": Sourced("int"), **merged}


def _value(weights: dict[str, Sourced], name: str) -> Any:
    return weights[name].value if name in weights else getattr(QuantizationSpec(), name)


def _related(place: Place | None, remark: str) -> tuple[tuple[Place, str], ...]:
    return ((place, remark),) if place else ()
