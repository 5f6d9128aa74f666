"""Checks what the algorithms of a file mean: their order, their device, and settings that
contradict each other.

Knows no algorithm by name: what there is to check of one is in its settings.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from quantizer.config.algorithm_settings import finds_codes, settings_of
from quantizer.config.diagnostics import Diagnostic, related_to
from quantizer.config.model import Algorithm, Config, QuantizationSpec, Role, Sourced
from quantizer.config.wording import listed, quoted

ACTIVATIONS: tuple[Role, ...] = ("input", "activation")


def check_algorithms(config: Config) -> Iterator[Diagnostic]:
    """Findings on the algorithms of a config, in the order in which they run."""
    entries = config.algorithms
    yield from _order([entry for entry in entries if not _is_misplaced(entry)])
    yield from _repeated([entry for entry in entries if not finds_codes(entry.kind)])
    weights = _everywhere(config, "weights")
    for entry in entries:
        if config.settings.target_device == "DPU":
            text = (
                f"{entry.name} is not for the DPU: after calibration its scales are moved "
                "into the limits of shifters, which would undo what the algorithm found"
            )
            help_ = "remove it, or write another target_device"
            related = related_to(config.settings.places.get("target_device"), "for this device")
            yield Diagnostic("QZ210", text, entry.place, help=help_, related=related)
        if _is_misplaced(entry):
            text = f"{entry.name} finds weight codes, and this is about what happens before"
            yield Diagnostic("QZ332", text, entry.place, help="write it in algo_config")
        yield from _switched(entry)
        yield from _decided_elsewhere(entry, weights)
        for key, (why, place) in entry.unread.items():
            yield Diagnostic(
                "QZ111", f"{key} has no effect: {why}", place, "note", help="remove the key"
            )
        yield from _idle(entry, config)
        yield from _for_nothing(entry, config)


def _order(entries: Sequence[Algorithm]) -> Iterator[Diagnostic]:
    """One algorithm rounds, and none rescales after it, nor after one that leaves ranges of the
    scaled weights.
    """
    before: Algorithm | None = None
    for entry in entries:
        name, rounds = entry.name, entry.stage == "round"
        if before is None or (rounds and before.stage != "round"):
            before = entry if finds_codes(entry.kind) else None
            continue
        first, has_codes = before.name, before.stage == "round"
        related = related_to(before.place, "rounds here" if has_codes else "finds ranges here")
        keep = "keep one of the two"
        if rounds:
            text = f"{first} rounds the weights already, and {name} would round them again"
            yield Diagnostic("QZ331", text, entry.place, help=keep, related=related)
        else:
            done = "rounded them" if has_codes else "found their ranges"
            text = f"{name} scales weights, and {first} has {done} by then"
            help_ = keep if name == first else f"write {name} before {first}"
            yield Diagnostic("QZ330", text, entry.place, help=help_, related=related)


def _repeated(entries: Sequence[Algorithm]) -> Iterator[Diagnostic]:
    """A part that an entry before has done: two rotations, say, spread an outlier no better
    than one.
    """
    first: dict[tuple[str, str], Algorithm] = {}
    for entry in entries:
        on = [(entry.name, key) for key in _parts(entry) if entry.value(key)]
        again = [part for part in on if part in first]
        if again:
            keys = listed(key for _, key in again)
            text = (
                f"{keys} of {entry.name} is done by an entry before, and nothing is gained by "
                "doing it again"
            )
            related = related_to(first[again[0]].place, "done here")
            yield Diagnostic(
                "QZ128",
                text,
                entry.place,
                "warning",
                help="keep one of the two",
                related=related,
            )
        first = {**dict.fromkeys(on, entry), **first}


def _is_misplaced(entry: Algorithm) -> bool:
    return entry.path[0] == "pre_quant_opt_config" and finds_codes(entry.kind)


def _switched(entry: Algorithm) -> Iterator[Diagnostic]:
    """Switches that are on by default or in the file, and need one that is off."""
    for key, meant in settings_of(entry.kind).items():
        if not meant.needs or not entry.value(key) or entry.value(meant.needs):
            continue
        stated, needed = entry.stated.get(key), entry.stated.get(meant.needs)
        if stated and needed:
            related = related_to(stated.place, "because of this")
            text = f"{key} is on and needs {meant.needs}, which is off: it has no effect"
            help_ = f'write "{meant.needs}": true, or "{key}": false'
            yield Diagnostic(
                "QZ333", text, needed.place, "warning", help=help_, related=related
            )
        else:
            place = (stated or needed or Sourced(None, entry.place)).place
            text, help_ = (
                f"{key} is off here, as it needs {meant.needs}",
                f'to say the same: "{key}": false',
            )
            yield Diagnostic("QZ126", text, place, "note", help=help_)


def _decided_elsewhere(entry: Algorithm, weights: dict[str, Sourced]) -> Iterator[Diagnostic]:
    """Stated keys that disagree with the weights' specification, which decides."""
    if not weights or _value(weights, "dtype") != "int":
        return
    for key, meant in settings_of(entry.kind).items():
        stated, name = entry.stated.get(key), meant.decided_by
        if not stated or not name:
            continue
        has_no_groups = name == "group_size" and _value(weights, "qscheme") != "per_group"
        found = -1 if has_no_groups else _value(weights, name)
        if stated.value != found:
            text = (
                f"{key} {quoted(stated.value)} is not what the weights' specification says: "
                "it decides"
            )
            source = weights.get("qscheme" if found == -1 else name, weights.get(name))
            related = related_to(
                source.place if source else None, f"here it is {quoted(found)}"
            )
            yield Diagnostic(
                "QZ127", text, stated.place, "warning", help="remove the key", related=related
            )


def _idle(entry: Algorithm, config: Config) -> Iterator[Diagnostic]:
    """Rounding where no weights are quantized, and an algorithm with all its parts off."""
    name, parts = entry.name, _parts(entry)
    if finds_codes(entry.kind) and not _quantizes(config, "weights"):
        text = f"no weights are quantized to a format with a scale, so {name} has nothing to do"
        yield Diagnostic(
            "QZ128",
            text,
            entry.place,
            "warning",
            help="quantize weights, or remove the algorithm",
        )
    elif parts and not any(map(entry.value, parts)):
        off = [entry.stated[key].place for key in parts if key in entry.stated]
        rest = "only rounds to nearest (RTN)" if finds_codes(entry.kind) else "does nothing"
        text = f"{listed(parts)} are all off, so {name} {rest}"
        help_ = "switch one of them on, or remove the algorithm"
        related = tuple(other for each in off[:-1] for other in related_to(each, "off, too"))
        place = off[-1] if off else entry.place
        yield Diagnostic("QZ128", text, place, "warning", help=help_, related=related)


def _for_nothing(entry: Algorithm, config: Config) -> Iterator[Diagnostic]:
    """Weights made harder to round for the sake of activations that stay float."""
    chosen = (
        entry.value(key) for key, meant in settings_of(entry.kind).items() if meant.is_searched
    )
    is_chosen = any(not isinstance(value, (int, float)) for value in chosen)
    if (
        entry.kind.eases_activations
        and not is_chosen
        and not any(_quantizes(config, role) for role in ACTIVATIONS)
    ):
        text = (
            f"{entry.name} makes activations easier to quantize and weights harder, and no "
            "activations are quantized: it costs a pass over the data and cannot help"
        )
        help_ = (
            "remove it, or quantize activations; awq scales channels for the sake of weights"
        )
        yield Diagnostic("QZ334", text, entry.place, "warning", help=help_)


def _parts(entry: Algorithm) -> list[str]:
    return [key for key, meant in settings_of(entry.kind).items() if meant.is_part]


def _quantizes(config: Config, role: Role) -> bool:
    """Whether some tensor of a role gets a format with a scale."""
    inherited = _everywhere(config, role)
    return any(
        QuantizationSpec(
            dtype=_value({**inherited, **rule.fields.get(role, {})}, "dtype")
        ).is_scaled
        for rule in config.rules
        if role in (rule.roles or ()) or role in rule.adds
    )


def _everywhere(config: Config, role: Role) -> dict[str, Sourced]:
    """What holds for a role in all layers; nothing where it is not quantized everywhere."""
    wide = [rule for rule in config.rules if rule.selector.kind in ("all", "weighted")]
    if not any(role in (rule.roles or ()) or role in rule.adds for rule in wide):
        return {}
    merged = {
        name: sourced for rule in wide for name, sourced in rule.fields.get(role, {}).items()
    }
    return {"dtype": Sourced("int"), **merged}


def _value(weights: dict[str, Sourced], name: str) -> Any:
    return weights[name].value if name in weights else getattr(QuantizationSpec(), name)
