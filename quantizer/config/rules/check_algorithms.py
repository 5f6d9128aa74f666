"""Check the algorithms of a file: their order, their device, and settings that contradict each
other.

No algorithm is known here by name: what there is to check of one is in its settings.
"""

from collections.abc import Sequence
from typing import Any

from quantizer.config.algorithms import Algorithm, finds_codes, named_algorithms, settings_of
from quantizer.config.diagnostics import Diagnostic, Diagnostics, Sourced, related_to
from quantizer.config.model import Fields, QuantizationSpec, ResolvedConfig, Role
from quantizer.config.wording import listed, quoted


def check_algorithms(config: ResolvedConfig) -> Diagnostics:
    """Yield the findings on the algorithms of a config, in the order in which they run."""
    algorithms = config.algorithms
    yield from _order([entry for entry in algorithms if not _is_misplaced(entry)])
    yield from _repeated([entry for entry in algorithms if not finds_codes(entry.kind)])
    weights = _everywhere(config, "weights")
    for algorithm in algorithms:
        yield from _on_dpu(algorithm, config)
        if _is_misplaced(algorithm):
            yield Diagnostic(
                "QZ332",
                f"{algorithm.name} finds weight codes, and this is about what happens before",
                algorithm.place,
                help="write it in algo_config",
            )
        yield from _switched(algorithm)
        yield from _decided_elsewhere(algorithm, weights)
        for key, (reason, place) in algorithm.unread.items():
            yield Diagnostic(
                "QZ111", f"{key} has no effect: {reason}", place, "note", help="remove the key"
            )
        yield from _idle(algorithm, config)
        yield from _for_nothing(algorithm, config)


def _on_dpu(algorithm: Algorithm, config: ResolvedConfig) -> Diagnostics:
    if config.settings.target_device == "DPU":
        yield Diagnostic(
            "QZ210",
            f"{algorithm.name} is not for the DPU: after calibration its scales are moved "
            "into the limits of shifters, which would undo what the algorithm found",
            algorithm.place,
            help="remove it, or write another target_device",
            related=related_to(config.settings.places.get("target_device"), "for this device"),
        )


def _order(algorithms: Sequence[Algorithm]) -> Diagnostics:
    """Yield each algorithm that rounds again, and each that rescales after the weights were
    rounded, or after ranges of the scaled weights were found.
    """
    earlier: Algorithm | None = None
    for algorithm in algorithms:
        rounds = algorithm.stage == "round"
        if earlier is None or (rounds and earlier.stage != "round"):
            earlier = algorithm if finds_codes(algorithm.kind) else None
            continue
        name = algorithm.name
        rounded_before = earlier.stage == "round"
        remark = "rounds here" if rounded_before else "finds ranges here"
        related = related_to(earlier.place, remark)
        help_ = "keep one of the two"
        if rounds:
            yield Diagnostic(
                "QZ331",
                f"{earlier.name} rounds the weights already, and {name} would round them again",
                algorithm.place,
                help=help_,
                related=related,
            )
            continue
        if name != earlier.name:
            help_ = f"write {name} before {earlier.name}"
        done = "rounded them" if rounded_before else "found their ranges"
        yield Diagnostic(
            "QZ330",
            f"{name} scales weights, and {earlier.name} has {done} by then",
            algorithm.place,
            help=help_,
            related=related,
        )


def _repeated(algorithms: Sequence[Algorithm]) -> Diagnostics:
    """Warn of parts that an algorithm before has done: two rotations spread an outlier no
    better than one.
    """
    first: dict[tuple[str, str], Algorithm] = {}
    for algorithm in algorithms:
        parts = [(algorithm.name, key) for key in _parts(algorithm) if algorithm.value(key)]
        repeated = [part for part in parts if part in first]
        if repeated:
            keys = listed(key for _, key in repeated)
            yield Diagnostic(
                "QZ128",
                f"{keys} of {algorithm.name} is done by an entry before, and nothing is gained "
                "by doing it again",
                algorithm.place,
                "warning",
                help="keep one of the two",
                related=related_to(first[repeated[0]].place, "done here"),
            )
        for part in parts:
            first.setdefault(part, algorithm)


def _is_misplaced(algorithm: Algorithm) -> bool:
    return algorithm.path[0] == "pre_quant_opt_config" and finds_codes(algorithm.kind)


def _switched(algorithm: Algorithm) -> Diagnostics:
    """Yield switches that are on and need one that is off."""
    for key, setting in settings_of(algorithm.kind).items():
        needed = setting.needs
        if not needed or not algorithm.value(key) or algorithm.value(needed):
            continue
        stated = algorithm.stated.get(key, Sourced(None, algorithm.place))
        stated_needed = algorithm.stated.get(needed, stated)
        yield Diagnostic(
            "QZ333",
            f"{key} is on and needs {needed}, which is off: it has no effect",
            stated_needed.place,
            "warning",
            help=f'write "{needed}": true, or "{key}": false',
            related=related_to(stated.place, "because of this"),
        )


def _decided_elsewhere(algorithm: Algorithm, weights: Fields) -> Diagnostics:
    """Warn of stated keys that disagree with the weights' specification, which decides."""
    if not weights or _value(weights, "dtype") != "int":
        return
    for key, setting in settings_of(algorithm.kind).items():
        name = setting.decided_by
        stated = algorithm.stated.get(key)
        if not stated or not name:
            continue
        actual = _value(weights, name)
        if name == "group_size" and _value(weights, "qscheme") != "per_group":
            actual = -1
        if stated.value == actual:
            continue
        source = weights.get(name, Sourced(None))
        if actual == -1:
            source = weights.get("qscheme", source)
        yield Diagnostic(
            "QZ127",
            f"{key} {quoted(stated.value)} is not what the weights' specification says: "
            "it decides",
            stated.place,
            "warning",
            help="remove the key",
            related=related_to(source.place, f"here it is {quoted(actual)}"),
        )


def _idle(algorithm: Algorithm, config: ResolvedConfig) -> Diagnostics:
    """Warn of rounding where no weights are quantized, and of an algorithm with all its parts
    off.
    """
    name = algorithm.name
    parts = _parts(algorithm)
    if finds_codes(algorithm.kind) and not _quantizes(config, "weights"):
        yield Diagnostic(
            "QZ128",
            f"no weights are quantized to a format with a scale, so {name} has nothing to do",
            algorithm.place,
            "warning",
            help="quantize weights, or remove the algorithm",
        )
    elif algorithm.kind.needs_groups and not _has_groups(config):
        yield Diagnostic(
            "QZ128",
            f"no weights are in groups, so {name} has nothing to do",
            algorithm.place,
            "warning",
            help="quantize weights per_group, or remove the algorithm",
        )
    elif parts and not any(map(algorithm.value, parts)):
        effect = "does nothing"
        if finds_codes(algorithm.kind):
            effect = "only rounds to nearest (RTN)"
        text = f"{listed(parts)} are all off, so {name} {effect}"
        help_ = "switch one of them on, or remove the algorithm"
        places = [algorithm.stated[key].place for key in parts if key in algorithm.stated]
        *others, place = places or [algorithm.place]
        related = tuple((other, "off, too") for other in others if other)
        yield Diagnostic("QZ128", text, place, "warning", help=help_, related=related)


def _for_nothing(algorithm: Algorithm, config: ResolvedConfig) -> Diagnostics:
    """Warn of weights made harder to round for the sake of activations that stay float."""
    if not algorithm.kind.eases_activations:
        return
    settings = settings_of(algorithm.kind).items()
    searched = [algorithm.value(key) for key, setting in settings if setting.is_searched]
    if not all(isinstance(value, (int, float)) for value in searched):
        return
    if _quantizes(config, "input") or _quantizes(config, "activation"):
        return
    remedy = "remove it, or quantize activations"
    others = named_algorithms(lambda kind: kind.stage == "rescale" and finds_codes(kind))
    if others:
        remedy += f"; {others} scales channels for the sake of weights"
    yield Diagnostic(
        "QZ334",
        f"{algorithm.name} makes activations easier to quantize and weights harder, and no "
        "activations are quantized: it costs a pass over the data and cannot help",
        algorithm.place,
        "warning",
        help=remedy,
    )


def _parts(algorithm: Algorithm) -> list[str]:
    settings = settings_of(algorithm.kind)
    return [key for key, setting in settings.items() if setting.is_part]


def _quantizes(config: ResolvedConfig, role: Role) -> bool:
    """Return whether some tensor of a role gets a format with a scale."""
    inherited = _everywhere(config, role)
    for rule in config.rules:
        # Keys and values are no inputs of the layers that algorithms change
        if rule.selector.kind == "cache":
            continue
        if role in (rule.roles or ()) or role in rule.adds:
            dtype = _value({**inherited, **rule.fields.get(role, {})}, "dtype")
            if QuantizationSpec(dtype=dtype).is_scaled:
                return True
    return False


def _has_groups(config: ResolvedConfig) -> bool:
    """Return whether some rule puts weights into groups."""
    stated = [rule.fields.get("weights", {}) for rule in config.rules]
    return any(_value(fields, "qscheme") == "per_group" for fields in stated)


def _everywhere(config: ResolvedConfig, role: Role) -> dict[str, Sourced]:
    """Return what holds for a role in all layers; nothing where it is not quantized
    everywhere.
    """
    is_quantized = False
    merged: dict[str, Sourced] = {"dtype": Sourced("int")}
    for rule in config.rules:
        if rule.selector.kind in ("all", "weighted"):
            is_quantized = is_quantized or role in (rule.roles or ()) or role in rule.adds
            merged |= rule.fields.get(role, {})
    return merged if is_quantized else {}


def _value(weights: Fields, name: str) -> Any:
    return weights[name].value if name in weights else getattr(QuantizationSpec, name)
