"""A config of the hierarchical form as a document of the layered form, and what that form has no words for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantizer.config.algorithm_words import written
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.layered import entry, parameters
from quantizer.config.model import CAST_ONLY, ROLES, Config, ConfigRule, Fields, QuantizationSpec, Role, Settings
from quantizer.config.wording import listed

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


def to_layered(config: Config) -> tuple[dict[str, Any], tuple[Diagnostic, ...]]:
    """The document, and findings: an error for what it cannot express, a warning for what depends on the model.

    The network as a whole is left in float, and an entry per operator with weights stands for the global block.
    """
    everywhere, layers, excluded = _sorted(config)
    findings = [
        *(found for rule in (everywhere, *layers) for found in _inexpressible(everywhere, rule)),
        *_device(config.settings),
        *_ambiguous(layers),
        *_overridden(layers, excluded),
    ]
    integers = parameters(QuantizationSpec())
    entries = [
        *(_entry({"layer_type": word, "required": False}, everywhere, everywhere) for word in WEIGHTED),
        *(_entry({f"layer_{rule.selector.kind}": rule.selector.text}, everywhere, rule) for rule in layers),
        *(
            {"layer_name": rule.selector.text, "quantizable_data_type": [], "overall_quantize_config": integers}
            for rule in excluded
        ),
    ]
    switches = {name: getattr(config.settings, name) for name in _SWITCHES}
    document = {
        **switches,
        "target_device": config.settings.target_device,
        "quantizable_data_type": [],
        "overall_quantize_config": integers,
        "layer_quantize_config": [entry for entry in entries if entry],
    }
    algorithms = [written(algorithm.settings) for algorithm in config.algorithms]
    return document | ({"algorithms": algorithms} if algorithms else {}), tuple(findings)


_SWITCHES = (
    "convert_relu6_to_relu",
    "include_cle",
    "include_bias_corr",
    "keep_first_last_layer_accuracy",
    "keep_add_layer_accuracy",
)


def _sorted(config: Config) -> tuple[ConfigRule, list[ConfigRule], list[ConfigRule]]:
    """The global rule, those for types and names, and those that exclude."""
    kinds = {"weighted": 0, "type": 1, "name": 1, "exclude": 2}
    groups: tuple[list[ConfigRule], ...] = ([], [], [])
    for rule in config.rules:
        if rule.selector.kind in kinds:
            groups[kinds[rule.selector.kind]].append(rule)
    return groups[0][0], groups[1], groups[2]


def _entry(selector: Mapping[str, Any], everywhere: ConfigRule, rule: ConfigRule) -> dict[str, Any] | None:
    """An entry for one level with all that it inherits; None if it quantizes nothing."""
    specs = {role: QuantizationSpec.of(fields) for role, fields in _merged(everywhere, rule).items()}
    return entry(selector, specs) if specs else None


def _merged(everywhere: ConfigRule, rule: ConfigRule) -> dict[Role, Fields]:
    """The fields of each role that the level quantizes, with what it inherits."""
    return {
        role: {**everywhere.fields.get(role, {}), **rule.fields.get(role, {})}
        for role in ROLES
        if role in everywhere.adds | rule.adds
    }


def _inexpressible(everywhere: ConfigRule, rule: ConfigRule) -> Iterator[Diagnostic]:
    for role, fields in _merged(everywhere, rule).items():
        for name, expressible in _EXPRESSIBLE.items():
            if name in fields and not expressible(fields[name].value, role):
                text = f"the layered form cannot express {name} {fields[name].value} for {role}"
                yield Diagnostic("QZ124", text, fields[name].place, help="change it, or keep the hierarchical form")
        axis = fields.get("ch_axis")
        if axis and axis.value == 0 and fields["qscheme"].value == "per_channel":
            text = "per_channel means output channels, which in transposed convolutions are axis 1, not 0"
            yield Diagnostic("QZ125", text, axis.place, "warning", help="compare `quantizer plan` with both files")


def _device(settings: Settings) -> Iterator[Diagnostic]:
    if settings.target_device not in ("CPU", "GPU"):
        text = f"the layered form has no target_device {settings.target_device}"
        yield Diagnostic("QZ124", text, settings.places.get("target_device"), help="write CPU or GPU")


def _ambiguous(layers: list[ConfigRule]) -> Iterator[Diagnostic]:
    """Named layers that inherit from their type: of which type a layer is, the file alone does not show."""
    types = [rule for rule in layers if rule.selector.kind == "type"]
    for rule in layers:
        for wider in types if rule.selector.kind == "name" else ():
            inherited = [
                f"{role}: {listed(missing)}"
                for role, fields in wider.fields.items()
                if (missing := sorted(set(fields) - set(rule.fields.get(role, {}))))
            ]
            if inherited:
                text = (
                    f"{rule.label} may inherit from {wider.label} ({'; '.join(inherited)}): that depends on the model"
                )
                help_ = "write these keys in the layer's configuration as well"
                yield Diagnostic("QZ124", text, rule.selector.place, help=help_)


def _overridden(layers: list[ConfigRule], excluded: list[ConfigRule]) -> Iterator[Diagnostic]:
    """Excluded patterns, which in the layered form an exact name overrides."""
    for rule in excluded:
        specificity = _specificity(rule.selector.text)
        for other in layers:
            if other.selector.kind == "name" and _specificity(other.selector.text) > specificity:
                text = f"in the layered form, {other.label} would override {rule.label}"
                yield Diagnostic("QZ124", text, rule.selector.place, help="exclude the layers by their exact names")


def _specificity(text: str) -> int:
    """Of a name selector: how specific it is; 0 is a pattern, 1 a module path, 2 a layer name."""
    return 0 if text.startswith(("re:", "kind:")) or "*" in text or "?" in text else 2 if "::" in text else 1
