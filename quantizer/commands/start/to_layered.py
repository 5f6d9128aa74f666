"""Write a config of the hierarchical form as a document of the layered form."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quantizer.commands.start.findings import (
    WEIGHTED,
    ConvertedDocument,
    alike,
    by_strength,
    concatenation_differs,
    inexpressible,
    may_differ,
    one_per_reason,
    overlapping,
    range_of_batches_differs,
    selects_weighted_layers,
    specs_by_role,
)
from quantizer.config.algorithms import algorithm_entry
from quantizer.config.diagnostics import Diagnostics, Place, Sourced
from quantizer.config.document.document import path_from, pointer_to, value_at
from quantizer.config.forms.form import CACHE_BLOCK, block_of
from quantizer.config.forms.level_edits import entry, parameters
from quantizer.config.json_types import JsonMapping, JsonObject
from quantizer.config.model import (
    CAST_ONLY,
    POOLED,
    ROLES,
    ConfigRule,
    Fields,
    QuantizationSpec,
    ResolvedConfig,
    Role,
)
from quantizer.config.roles import KEY_OF
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
        # Rows of tokens are dynamic, which is a reason of its own
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
"""For each field of a spec with values that the layered form lacks, whether it can express one,
and why it cannot.
"""

_NOTHING: JsonMapping = {
    "quantizable_data_type": [],
    "overall_quantize_config": parameters(QuantizationSpec()),
}


def to_layered(config: ResolvedConfig) -> ConvertedDocument:
    """Return the document: the network as a whole is left in float, and an entry per operator
    with weights stands for the global block.
    """
    rules = config.rules
    [everywhere] = [rule for rule in rules if rule.selector.kind == "weighted"]
    layers = [rule for rule in rules if rule.selector.kind in ("type", "name")]
    excluded = [rule for rule in rules if rule.selector.kind == "exclude"]
    settings = vars(config.settings)
    required = block_of("layered")["required"]
    document: JsonObject = {key: settings[key] for key in required if key in settings}
    entries, origins = _entries(everywhere, layers)
    document |= {**_NOTHING, "layer_quantize_config": entries}
    if excluded:
        document["exclude"] = [rule.selector.text for rule in excluded]
    algorithms = [algorithm_entry(algorithm.settings) for algorithm in config.algorithms]
    if algorithms:
        document["algorithms"] = algorithms

    def merged(rules: Sequence[ConfigRule]) -> dict[Role, QuantizationSpec]:
        return specs_by_role(_merged(everywhere, *rules))

    findings = [*_without_words(config)]
    for rule in (everywhere, *layers):
        findings += _not_layered(config, _merged(everywhere, rule))
    findings += overlapping(by_strength(layers), merged, KEY_OF)
    findings += _inherited(everywhere, layers)
    return ConvertedDocument(document, one_per_reason(findings), origins)


def _merged(*rules: ConfigRule) -> dict[Role, Fields]:
    """Return the fields of each role that one of the rules quantizes, the widest rule first."""
    merged: dict[Role, Fields] = {}
    for role in ROLES:
        if any(role in rule.adds for rule in rules):
            fields: dict[str, Sourced] = {}
            for rule in rules:
                fields |= rule.fields.get(role, {})
            merged[role] = fields
    return merged


def _entries(
    everywhere: ConfigRule, layers: Sequence[ConfigRule]
) -> tuple[list[JsonObject], dict[str, Place | None]]:
    """Return the layer entries, and where in the source each comes from."""
    selected: list[tuple[JsonObject, ConfigRule]] = []
    for word in WEIGHTED:
        selected.append(({"layer_type": word, "required": False}, everywhere))
    for rule in layers:
        selected.append(({f"layer_{rule.selector.kind}": rule.selector.text}, rule))
    specs = [specs_by_role(_merged(everywhere, rule)) for _, rule in selected]
    explicit = _explicit_words([spec for by_role in specs for spec in by_role.values()])
    rows: list[tuple[JsonObject, ConfigRule]] = []
    for (selector, rule), by_role in zip(selected, specs, strict=True):
        if by_role:
            rows.append((entry(selector, by_role, explicit), rule))
    origins: dict[str, Place | None] = {}
    for index, (_, rule) in enumerate(rows):
        origins[pointer_to("layer_quantize_config", index)] = rule.selector.place
    return [row for row, _ in rows], origins


def _explicit_words(specs: Sequence[QuantizationSpec]) -> set[str]:
    """Return the words that no entry leaves to a default, as others, which may match the same
    layers, state something else.
    """
    scales = {spec.symmetric_scale for spec in specs if spec.has_symmetric_scale}
    words = {"symmetric_scale"} if scales - {"quant_max"} else set()
    if len({spec.dtype for spec in specs}) > 1:
        words.add("datatype")
    return words


def _without_words(config: ResolvedConfig) -> Diagnostics:
    """Yield a device, and entries about the key-value cache, that the layered form lacks."""
    device = config.settings.target_device
    if device not in ("CPU", "GPU"):
        yield inexpressible(
            f"target_device {device}: the layered form has CPU and GPU",
            config.settings.places.get("target_device"),
            "write CPU or GPU",
        )
    for rule in config.rules:
        if rule.selector.kind in ("cache", "cache_source"):
            yield inexpressible(
                f"{CACHE_BLOCK}: the layered form has no key-value cache",
                rule.selector.place,
                "keep the hierarchical form, or remove the block",
            )


def _not_layered(config: ResolvedConfig, merged: Mapping[Role, Fields]) -> Diagnostics:
    for role, fields in merged.items():
        yield from _limits(config, role, fields)
        statistic = fields.get("statistic")
        if statistic and statistic.value == POOLED:
            yield range_of_batches_differs(role, statistic.place)
        axis = fields.get("ch_axis")
        if axis and axis.value == 0 and fields["qscheme"].value == "per_channel":
            yield may_differ(
                "per_channel means output channels, which in transposed convolutions are "
                "axis 1, not 0",
                axis.place,
            )
        if role == "activation":
            dtype = fields.get("dtype", Sourced(None))
            yield concatenation_differs(dtype.place)


def _limits(config: ResolvedConfig, role: Role, fields: Fields) -> Diagnostics:
    """Yield the fields with a value that the layered form lacks, one for each place."""
    places: list[Place | None] = []
    for name, (is_expressible, reason) in _LIMITS.items():
        stated = fields.get(name)
        if not stated or is_expressible(stated.value, role) or stated.place in places:
            continue
        places.append(stated.place)
        yield inexpressible(f"{_written(config, name, stated)}: {reason}", stated.place, _KEEP)
        if name == "qscheme":
            # The axis is that of the groups
            return


def _written(config: ResolvedConfig, name: str, stated: Sourced) -> str:
    """Return a key and its value as the file has them; other keys imply some fields."""
    key = name
    value = stated.value
    if stated.place and stated.place.pointer:
        path = path_from(stated.place.pointer)
        key = path[-1]
        value = value_at(config.document, path)
    return f"{key} {value if isinstance(value, str) else quoted(value)}"


def _inherited(everywhere: ConfigRule, layers: Sequence[ConfigRule]) -> Diagnostics:
    """Yield what an entry inherits from the global block, which is about layers with weights
    alone.
    """
    for rule in layers:
        if selects_weighted_layers(rule.selector):
            continue
        alone = specs_by_role(_merged(rule))
        both = specs_by_role(_merged(everywhere, rule))
        roles = [role for role in both if not alike(both[role], alone.get(role))]
        if roles:
            keys = listed(KEY_OF[role] for role in roles)
            yield may_differ(
                f"{everywhere.label} is about layers with weights of their own; the layered "
                f"form gives its {keys} to all layers that this selects",
                rule.selector.place,
            )
