"""A config of the hierarchical form as a document of the layered form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quantizer.config.conversion.findings import (
    WEIGHTED,
    Converted,
    alike,
    by_strength,
    inexpressible,
    is_weighted,
    joined,
    may_differ,
    once,
    overlapping,
    pooled,
    specificity,
    specs_of,
)
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.document.document import pointer_to, value_at
from quantizer.config.forms.algorithm_words import written as written_algorithm
from quantizer.config.forms.form import block_of
from quantizer.config.forms.hierarchical import KEY_OF
from quantizer.config.forms.layered import entry, parameters
from quantizer.config.model import (
    CAST_ONLY,
    POOLED,
    ROLES,
    Config,
    ConfigRule,
    Fields,
    QuantizationSpec,
    Role,
    Sourced,
)
from quantizer.config.wording import listed, quoted

_KEEP = "keep the hierarchical form, or change it"

_LIMITS: Mapping[str, tuple[Callable[[Any, Role], bool], str]] = {
    "dtype": (
        lambda value, _: value == "int" or value in CAST_ONLY,
        "the layered form has no floating-point formats with a scale",
    ),
    "is_dynamic": (
        lambda value, _: not value,
        "the layered form has no ranges that are found at run time",
    ),
    "qscheme": (
        lambda value, role: (
            value in ("per_tensor", "per_token")
            or (value == "per_channel" and role == "weights")
        ),
        "the layered form has per_tensor, and for weights per_channel",
    ),
    "ch_axis": (
        lambda value, _: value in (None, 0),
        "per_channel of the layered form means output channels",
    ),
    "round_mode": (
        lambda value, _: value != "floor",
        "the layered form has no rounding to the next code below",
    ),
}
"""For each field of a spec that has values the layered form lacks, whether it can express one,
and why it cannot.

Rows of tokens are dynamic, which says it.
"""


def to_layered(config: Config) -> Converted:
    """The network as a whole is left in float, and an entry per operator with weights stands
    for the global block.
    """
    rules = {
        kind: [rule for rule in config.rules if rule.selector.kind in kind] for kind in _KINDS
    }
    (everywhere,), layers, excluded = rules.values()
    entries, origins = _entries(everywhere, layers, excluded)
    required = [key for key in block_of("layered")["required"] if hasattr(config.settings, key)]
    document = {
        **{key: getattr(config.settings, key) for key in required},
        **_NOTHING,
        "layer_quantize_config": entries,
    }
    if config.algorithms:
        document["algorithms"] = [
            written_algorithm(algorithm.settings) for algorithm in config.algorithms
        ]
    findings = (
        *_device(config),
        *(
            found
            for rule in (everywhere, *layers)
            for found in _not_layered(config, _merged(everywhere, rule))
        ),
        *overlapping(
            by_strength(layers), lambda found: specs_of(_merged(everywhere, *found)), KEY_OF
        ),
        *_overridden(layers, excluded),
        *_inherited(everywhere, layers),
    )
    return Converted(document, once(findings), origins)


_KINDS = (("weighted",), ("type", "name"), ("exclude",))
"""The kinds of selectors of the global rule, of those for types and names, and of those that
exclude.
"""

_NOTHING: Mapping[str, Any] = {
    "quantizable_data_type": [],
    "overall_quantize_config": parameters(QuantizationSpec()),
}


def _merged(*rules: ConfigRule) -> dict[Role, Fields]:
    """The fields of each role that one of the rules quantizes, the widest rule first."""
    adds = frozenset[Role]().union(*(rule.adds for rule in rules))
    fields = (
        (role, [rule.fields.get(role, {}) for rule in rules]) for role in ROLES if role in adds
    )
    return {
        role: {name: stated for block in blocks for name, stated in block.items()}
        for role, blocks in fields
    }


def _entries(
    everywhere: ConfigRule, layers: Sequence[ConfigRule], excluded: Sequence[ConfigRule]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The layer entries, and where in the source each comes from."""
    selected: list[tuple[dict[str, Any], ConfigRule]] = [
        *(({"layer_type": word, "required": False}, everywhere) for word in WEIGHTED),
        *(({f"layer_{rule.selector.kind}": rule.selector.text}, rule) for rule in layers),
    ]
    merged = [
        (selector, rule, specs_of(_merged(everywhere, rule))) for selector, rule in selected
    ]
    said = _said([spec for *_, specs in merged for spec in specs.values()])
    entries = [
        (entry(selector, specs, said), rule) for selector, rule, specs in merged if specs
    ]
    entries += [({"layer_name": rule.selector.text, **_NOTHING}, rule) for rule in excluded]
    places = {
        pointer_to("layer_quantize_config", at): rule.selector.place
        for at, (_, rule) in enumerate(entries)
    }
    return [each for each, _ in entries], places


def _said(specs: Sequence[QuantizationSpec]) -> set[str]:
    """The words that no entry leaves to a default, as others, which may match the same layers,
    say something else.
    """
    rules = {spec.symmetric_scale for spec in specs if spec.has_symmetric_scale}
    kinds = {spec.dtype for spec in specs}
    return {
        word
        for word, found in (("symmetric_scale", rules), ("datatype", kinds))
        if len(found) > 1 or "half_range" in found
    }


def _device(config: Config) -> Iterator[Diagnostic]:
    device = config.settings.target_device
    if device not in ("CPU", "GPU"):
        place = config.settings.places.get("target_device")
        yield inexpressible(
            f"target_device {device}: the layered form has CPU and GPU",
            place,
            "write CPU or GPU",
        )


def _not_layered(config: Config, merged: Mapping[Role, Fields]) -> Iterator[Diagnostic]:
    for role, stated in merged.items():
        blamed: list[Place | None] = []
        for name, (expressible, why) in _LIMITS.items():
            if (
                name in stated
                and not expressible(stated[name].value, role)
                and stated[name].place not in blamed
            ):
                blamed.append(stated[name].place)
                yield inexpressible(
                    f"{_written(config, name, stated[name])}: {why}", stated[name].place, _KEEP
                )
                if name == "qscheme":
                    break  # the axis is that of the groups
        if "statistic" in stated and stated["statistic"].value == POOLED:
            yield pooled(role, stated["statistic"].place)
        axis = stated.get("ch_axis")
        if axis and axis.value == 0 and stated["qscheme"].value == "per_channel":
            text = (
                "per_channel means output channels, which in transposed convolutions are "
                "axis 1, not 0"
            )
            yield may_differ(text, axis.place)
        if role == "activation":
            yield joined(stated["dtype"].place if "dtype" in stated else None)


def _written(config: Config, name: str, stated: Sourced) -> str:
    """A key and its value as the file has them; other keys imply some fields."""
    pointer = stated.place.pointer if stated.place else ""
    path = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
    key, value = (path[-1], value_at(config.document, path)) if path else (name, stated.value)
    return f"{key} {value if isinstance(value, str) else quoted(value)}"


def _overridden(
    layers: Sequence[ConfigRule], excluded: Sequence[ConfigRule]
) -> Iterator[Diagnostic]:
    """Excluded patterns, which in the layered form an exact name overrides."""
    for rule in excluded:
        text = rule.selector.text
        for other in (each.selector for each in layers if each.selector.kind == "name"):
            if specificity(other.text) > specificity(text) or other.text.startswith(f"{text}."):
                label = next(each.label for each in layers if each.selector is other)
                yield inexpressible(
                    f"in the layered form, {label} would override {rule.label}",
                    rule.selector.place,
                    "exclude the layers by their exact names",
                )


def _inherited(everywhere: ConfigRule, layers: Sequence[ConfigRule]) -> Iterator[Diagnostic]:
    """What an entry takes over from the global block, which is about layers with weights
    alone.
    """
    for rule in layers:
        own, both = specs_of(_merged(rule)), specs_of(_merged(everywhere, rule))
        roles = [role for role in both if not alike(both[role], own.get(role))]
        if roles and not is_weighted(rule.selector):
            keys = listed(KEY_OF[role] for role in roles)
            text = (
                f"{everywhere.label} is about layers with weights of their own; the layered "
                f"form gives its {keys} to all layers that this selects"
            )
            yield may_differ(text, rule.selector.place)
