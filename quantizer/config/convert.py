"""A config of either file form as a document of the other form, and what that form has no words for."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from quantizer.config.algorithm_words import written
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.dtypes import dtype_word
from quantizer.config.form import block_of
from quantizer.config.hierarchical import KEY_OF
from quantizer.config.hierarchical_spec import (
    PARAMETERS,
    observer_word,
    specification,
    usual_statistic,
)
from quantizer.config.layered import entry, parameters
from quantizer.config.model import (
    CAST_ONLY,
    POOLED,
    ROLES,
    Config,
    ConfigRule,
    Fields,
    QuantizationSpec,
    Role,
    Settings,
)
from quantizer.config.wording import listed

Converted = tuple[dict[str, Any], tuple[Diagnostic, ...]]
"""The document, and findings: an error for what it cannot express, a warning for what depends on the model."""

WEIGHTED = (
    *(f"conv{axes}d" for axes in (1, 2, 3)),
    *(f"conv_transpose{axes}d" for axes in (1, 2, 3)),
    "linear",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "embedding",
)
"""The operators with weights of their own, which is whom a global configuration is about."""

_EXPRESSIBLE: Mapping[str, Callable[[Any, Role], bool]] = {
    "dtype": lambda value, _: value == "int" or value in CAST_ONLY,
    "round_mode": lambda value, _: value != "floor",
    "qscheme": lambda value, role: value == "per_tensor" or (value == "per_channel" and role == "weights"),
    "ch_axis": lambda value, _: value in (None, 0),
    "is_dynamic": lambda value, _: not value,
}
"""For each field of a spec that has values the layered form lacks, whether it can express one."""

_BLOCKS = {"type": "layer_type_quant_config", "name": "layer_quant_config"}


def to_layered(config: Config) -> Converted:
    """The network as a whole is left in float, and an entry per operator with weights stands for the global block."""
    rules = {kind: [rule for rule in config.rules if rule.selector.kind in kind] for kind in _KINDS}
    (everywhere,), layers, excluded = rules.values()
    findings = [
        *(found for rule in (everywhere, *layers) for found in _not_layered(_merged(everywhere, rule))),
        *_ambiguous(layers),
        *_overridden(layers, excluded),
    ]
    device = config.settings.target_device
    if device not in ("CPU", "GPU"):
        place = config.settings.places.get("target_device")
        findings.append(_no_word(f"the layered form has no target_device {device}", place, "write CPU or GPU"))
    integers = parameters(QuantizationSpec())
    selected: list[tuple[dict[str, Any], ConfigRule]] = [
        *(({"layer_type": word, "required": False}, everywhere) for word in WEIGHTED),
        *(({f"layer_{rule.selector.kind}": rule.selector.text}, rule) for rule in layers),
    ]
    merged = [(selector, _specs(_merged(everywhere, rule))) for selector, rule in selected]
    rule = any(spec.symmetric_scale == "half_range" for _, specs in merged for spec in specs.values())
    nothing = {"quantizable_data_type": [], "overall_quantize_config": integers}
    required = [key for key in block_of("layered")["required"] if hasattr(config.settings, key)]
    document = {
        **{key: getattr(config.settings, key) for key in required},
        **nothing,
        "layer_quantize_config": [
            *(entry(selector, specs, rule=rule) for selector, specs in merged if specs),
            *({"layer_name": rule.selector.text, **nothing} for rule in excluded),
        ],
    }
    return document | _algorithms(config, "algorithms"), tuple(findings)


_KINDS = (("weighted",), ("type", "name"), ("exclude",))
"""The kinds of selectors of the global rule, of those for types and names, and of those that exclude."""


def to_hierarchical(config: Config) -> Converted:
    """Entries that say the same of all operators with weights, where there are no others, become the global level."""
    overall, tensor, *layers = config.rules
    roles = [role for role in ROLES if role in (overall.roles or ())]
    everywhere: dict[Role, Fields] = {role: {**overall.fields[role], **tensor.fields.get(role, {})} for role in roles}
    findings = [*_settings(config.settings), *_network(overall, roles)]
    if not roles and (same := _for_all_weighted(layers)):
        everywhere = _stated(same[0])
        roles, layers = list(everywhere), [rule for rule in layers if rule not in same]
    blocks: dict[str, dict[str, Any]] = {block: {} for block in _BLOCKS.values()}
    excluded: list[str] = []
    inexpressible = [*_not_hierarchical(everywhere)]
    for rule in layers:
        stated, selector = _stated(rule), rule.selector
        if not selector.required:
            text = f'{rule.label} has "required": false, but in the hierarchical form every selector must match'
            help_ = "remove the entry if the model does not have these layers"
            findings.append(_no_word(text, selector.place, help_))
        if stated or selector.kind == "type":
            off = {KEY_OF[role]: {"dtype": "float32"} for role in roles if role not in stated}
            blocks[_BLOCKS[selector.kind]][selector.text] = _level(stated) | off
        else:
            excluded.append(selector.text)
        inexpressible += _not_hierarchical(stated)
    document = {"global_quant_config": _level(everywhere) | {"target_device": config.settings.target_device}}
    optional = {**blocks, "exclude": excluded, **_algorithms(config, "algo_config")}
    return document | {key: value for key, value in optional.items() if value}, (*findings, *inexpressible)


def _algorithms(config: Config, key: str) -> dict[str, Any]:
    return {key: [written(algorithm.settings) for algorithm in config.algorithms]} if config.algorithms else {}


def _specs(fields: Mapping[Role, Fields]) -> dict[Role, QuantizationSpec]:
    return {role: QuantizationSpec.of(stated) for role, stated in fields.items()}


def _no_word(text: str, place: Place | None, help_: str) -> Diagnostic:
    return Diagnostic("QZ124", text, place, help=help_)


def _may_differ(text: str, place: Place | None) -> Diagnostic:
    return Diagnostic("QZ125", text, place, "warning", help="compare `quantizer plan` with both files")


def _pooled(role: Role, place: Place | None) -> Diagnostic:
    text = f"from several batches of {role}, the layered form takes the largest range, the hierarchical form finds one \
range for all of them"
    return Diagnostic("QZ125", text, place, "warning", help="with a MinMax observer they are the same")


def _merged(everywhere: ConfigRule, rule: ConfigRule) -> dict[Role, Fields]:
    """The fields of each role that a level quantizes, with what it inherits."""
    return {
        role: {**everywhere.fields.get(role, {}), **rule.fields.get(role, {})}
        for role in ROLES
        if role in everywhere.adds | rule.adds
    }


def _not_layered(merged: Mapping[Role, Fields]) -> Iterator[Diagnostic]:
    for role, stated in merged.items():
        for name, expressible in _EXPRESSIBLE.items():
            if name in stated and not expressible(stated[name].value, role):
                text = f"the layered form cannot express {name} {stated[name].value} for {role}"
                yield _no_word(text, stated[name].place, "change it, or keep the hierarchical form")
        if "statistic" in stated and stated["statistic"].value == POOLED:
            yield _pooled(role, stated["statistic"].place)
        axis = stated.get("ch_axis")
        if axis and axis.value == 0 and stated["qscheme"].value == "per_channel":
            text = "per_channel means output channels, which in transposed convolutions are axis 1, not 0"
            yield _may_differ(text, axis.place)


def _ambiguous(layers: list[ConfigRule]) -> Iterator[Diagnostic]:
    """Named layers that inherit from their type: of which type a layer is, the file alone does not show."""
    types, named = ([rule for rule in layers if rule.selector.kind == kind] for kind in ("type", "name"))
    for rule in named:
        for wider in types:
            inherited = [
                f"{role}: {listed(missing)}"
                for role, stated in wider.fields.items()
                if (missing := sorted(stated.keys() - rule.fields.get(role, {}).keys()))
            ]
            if inherited:
                may = f"{rule.label} may inherit from {wider.label}"
                text = f"{may} ({'; '.join(inherited)}): that depends on the model"
                yield _no_word(text, rule.selector.place, "write these keys in the layer's configuration as well")


def _overridden(layers: list[ConfigRule], excluded: list[ConfigRule]) -> Iterator[Diagnostic]:
    """Excluded patterns, which in the layered form an exact name overrides."""
    for rule in excluded:
        specificity = _specificity(rule.selector.text)
        for other in layers:
            if other.selector.kind == "name" and _specificity(other.selector.text) > specificity:
                text = f"in the layered form, {other.label} would override {rule.label}"
                yield _no_word(text, rule.selector.place, "exclude the layers by their exact names")


def _specificity(text: str) -> int:
    """Of a name selector: how specific it is; 0 is a pattern, 1 a module path, 2 a layer name."""
    return 0 if text.startswith(("re:", "kind:")) or "*" in text or "?" in text else 2 if "::" in text else 1


def _stated(rule: ConfigRule) -> dict[Role, Fields]:
    return {role: rule.fields[role] for role in ROLES if role in (rule.roles or ())}


def _level(stated: Mapping[Role, Fields]) -> dict[str, Any]:
    return {KEY_OF[role]: specification(spec) for role, spec in _specs(stated).items()}


_CHANGE = "change it, or keep the layered form"


def _settings(settings: Settings) -> Iterator[Diagnostic]:
    """Switches that do something, and the DPU."""
    for field in fields(Settings):
        if field.name not in ("places", "target_device") and getattr(settings, field.name) != field.default:
            text = f"the hierarchical form has no key for {field.name}"
            yield _no_word(text, settings.places.get(field.name), _CHANGE)
    if settings.target_device == "DPU":
        place = settings.places.get("target_device")
        yield _no_word("the hierarchical form has no target_device DPU", place, _CHANGE)


def _network(overall: ConfigRule, roles: list[Role]) -> Iterator[Diagnostic]:
    """What the top of the file says of tensors of layers without weights."""
    if flowing := [role for role in roles if role not in ("weights", "bias")]:
        text = f"the hierarchical form quantizes {listed(flowing)} only of layers that have weights"
        help_ = "remove them from quantizable_data_type at the top, and list them in entries for layer types"
        yield _no_word(text, overall.roles_place, help_)
    elif roles:
        text = "global_quant_config applies to layers with weights of their own: norms that cannot be folded, and \
trained tensors in expressions, stay in float"
        yield _may_differ(text, overall.roles_place)


def _for_all_weighted(layers: list[ConfigRule]) -> list[ConfigRule]:
    """The entries that say the same of each operator with weights, present or not: together they are a global level."""
    optional = {
        rule.selector.text: rule for rule in layers if rule.selector.kind == "type" and not rule.selector.required
    }
    entries = [optional[word] for word in WEIGHTED if word in optional]
    specs = [_specs(_stated(rule)) for rule in entries]
    return entries if len(entries) == len(WEIGHTED) and all(each == specs[0] for each in specs) else []


def _not_hierarchical(stated: Mapping[Role, Fields]) -> Iterator[Diagnostic]:
    for role, spec in _specs(stated).items():
        if role not in PARAMETERS and spec.dtype == "int" and spec.statistic == "max" != usual_statistic(spec.method):
            yield _pooled(role, stated[role]["method"].place)
        for field, what in _limits(spec) if spec.dtype == "int" else ():
            place = stated[role][field].place if field in stated[role] else None
            yield _no_word(f"the hierarchical form cannot express {what} ({role})", place, _CHANGE)


def _limits(spec: QuantizationSpec) -> Iterator[tuple[str, str]]:
    """The fields of integers that the hierarchical form has no word for, and what they say."""
    if dtype_word(spec) is None:
        yield "bit_width", f"{'' if spec.signed else 'un'}signed codes of {spec.bit_width} bits"
    if spec.narrow_range and spec.signed and spec.symmetric:
        yield "narrow_range", "narrow_range"
    if spec.statistic != "max":
        yield "statistic", f"calib_statistic_method {spec.statistic}"
    if observer_word(spec) is None:
        yield "method", f"method {spec.method} with {spec.qscheme}"
