"""A config of the layered form as a document of the hierarchical form, and what that form has no words for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from quantizer.config.algorithm_words import written
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.hierarchical import ROLE_OF
from quantizer.config.hierarchical_spec import dtype_word, observer_word, specification
from quantizer.config.model import ROLES, Config, ConfigRule, Fields, QuantizationSpec, Role, Settings
from quantizer.config.to_layered import WEIGHTED
from quantizer.config.wording import listed

_KEY_OF = {role: key for key, role in ROLE_OF.items()}
_BLOCKS = {"type": "layer_type_quant_config", "name": "layer_quant_config"}
_HELP = "change it, or keep the layered form"


def to_hierarchical(config: Config) -> tuple[dict[str, Any], tuple[Diagnostic, ...]]:
    """The document, and findings: an error for what it cannot express, a warning for what depends on the model."""
    overall, tensor, *layers = config.rules
    roles = [role for role in ROLES if role in (overall.roles or ())]
    everywhere: dict[Role, Fields] = {role: {**overall.fields[role], **tensor.fields.get(role, {})} for role in roles}
    findings = [*_settings(config.settings), *_network(overall, roles)]
    if not roles and (same := _for_all_weighted(layers)):
        everywhere = {role: same[0].fields[role] for role in ROLES if role in (same[0].roles or ())}
        roles, layers = list(everywhere), [rule for rule in layers if rule not in same]
    blocks: dict[str, dict[str, Any]] = {block: {} for block in _BLOCKS.values()}
    excluded: list[str] = []
    for rule in layers:
        findings += _entry(rule)
        if rule.roles or rule.selector.kind == "type":
            said = [role for role in ROLES if role in (rule.roles or ())]
            level = {_KEY_OF[role]: specification(QuantizationSpec.of(rule.fields[role])) for role in said}
            level |= {_KEY_OF[role]: {"dtype": "float32"} for role in roles if role not in said}
            blocks[_BLOCKS[rule.selector.kind]][rule.selector.text] = level
        else:
            excluded.append(rule.selector.text)
    found = [*(f for role in roles for f in _inexpressible(role, everywhere[role]))]
    found += [f for rule in layers for role in rule.roles or () for f in _inexpressible(role, rule.fields[role])]
    document: dict[str, Any] = {
        "global_quant_config": {
            **{_KEY_OF[role]: specification(QuantizationSpec.of(everywhere[role])) for role in roles},
            "target_device": config.settings.target_device,
        }
    }
    document |= {block: levels for block, levels in blocks.items() if levels}
    algorithms = [written(algorithm.settings) for algorithm in config.algorithms]
    optional = {"exclude": excluded, "algo_config": algorithms}
    return document | {key: items for key, items in optional.items() if items}, tuple(findings + found)


def _settings(settings: Settings) -> Iterator[Diagnostic]:
    """Switches that do something, and the DPU."""
    for field in fields(Settings):
        if field.name in ("places", "target_device"):
            continue
        value = getattr(settings, field.name)
        if value != field.default:
            text = f"the hierarchical form has no key for {field.name}"
            yield Diagnostic("QZ124", text, settings.places.get(field.name), help=_HELP)
    if settings.target_device == "DPU":
        text = "the hierarchical form has no target_device DPU"
        yield Diagnostic("QZ124", text, settings.places.get("target_device"), help=_HELP)


def _network(overall: ConfigRule, roles: list[Role]) -> Iterator[Diagnostic]:
    """What the top of the file says of tensors of layers without weights."""
    flowing = [role for role in roles if role not in ("weights", "bias")]
    if flowing:
        text = f"the hierarchical form quantizes {listed(flowing)} only of layers that have weights"
        help_ = "remove them from quantizable_data_type at the top, and list them in entries for layer types"
        yield Diagnostic("QZ124", text, overall.roles_place, help=help_)
    elif roles:
        text = "global_quant_config applies to layers with weights of their own: norms that cannot be folded, and \
trained tensors in expressions, stay in float"
        yield Diagnostic("QZ125", text, overall.roles_place, "warning", help="compare `quantizer plan` with both files")


def _for_all_weighted(layers: list[ConfigRule]) -> list[ConfigRule]:
    """The entries that say the same of each operator with weights, present or not: together they are a global level."""
    optional = {
        rule.selector.text: rule for rule in layers if rule.selector.kind == "type" and not rule.selector.required
    }
    entries = [optional[word] for word in WEIGHTED if word in optional]
    alike = all((rule.roles, _values(rule)) == (entries[0].roles, _values(entries[0])) for rule in entries)
    return entries if alike and len(entries) == len(WEIGHTED) else []


def _values(rule: ConfigRule) -> dict[Role, QuantizationSpec]:
    return {role: QuantizationSpec.of(rule.fields[role]) for role in rule.roles or ()}


def _entry(rule: ConfigRule) -> Iterator[Diagnostic]:
    """What a layer entry says that a level cannot."""
    if not rule.selector.required:
        text = f'{rule.label} has "required": false, but in the hierarchical form every selector must match'
        yield Diagnostic(
            "QZ124", text, rule.selector.place, help="remove the entry if the model does not have these layers"
        )


@dataclass(frozen=True)
class _Limit:
    """Something about a spec that the hierarchical form has no word for."""

    field: str
    what: str


def _limits(spec: QuantizationSpec) -> Iterator[_Limit]:
    if spec.dtype != "int":
        return
    if dtype_word(spec) is None:
        yield _Limit("bit_width", f"{'' if spec.signed else 'un'}signed codes of {spec.bit_width} bits")
    if spec.narrow_range and spec.signed and spec.symmetric:
        yield _Limit("narrow_range", "narrow_range")
    if spec.statistic != "max":
        yield _Limit("statistic", f"calib_statistic_method {spec.statistic}")
    if observer_word(spec) is None:
        yield _Limit("method", f"method {spec.method} with {spec.qscheme}")


def _inexpressible(role: Role, values: Fields) -> Iterator[Diagnostic]:
    for limit in _limits(QuantizationSpec.of(values)):
        place: Place | None = values[limit.field].place if limit.field in values else None
        text = f"the hierarchical form cannot express {limit.what} ({role})"
        yield Diagnostic("QZ124", text, place, help=_HELP)
