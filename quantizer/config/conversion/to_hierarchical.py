"""A config of the layered form as a document of the hierarchical form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from quantizer.config.algorithms import SWITCHES
from quantizer.config.conversion.findings import (
    WEIGHTED,
    Converted,
    alike,
    are_apart,
    by_strength,
    inexpressible,
    joined,
    may_differ,
    normalized,
    once,
    overlapping,
    pooled,
    specs_of,
)
from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.document.document import pointer_to
from quantizer.config.forms.algorithm_words import written
from quantizer.config.forms.dtypes import dtype_word
from quantizer.config.forms.hierarchical import KEY_OF
from quantizer.config.forms.hierarchical_spec import (
    PARAMETERS,
    observer_word,
    specification,
    usual_statistic,
)
from quantizer.config.forms.layered import FIELDS
from quantizer.config.model import (
    CAST_ONLY,
    ROLES,
    Config,
    ConfigRule,
    Fields,
    QuantizationSpec,
    Role,
    Settings,
)

_KEEP = "keep the layered form, or change it"
_PASSES = {kind.switch: name for name, kind in SWITCHES.items()}
"""Switches that the form lists among its algorithms."""

_WORDS = {name: word for word, name in FIELDS.items()}
_BLOCKS = {"type": "layer_type_quant_config", "name": "layer_quant_config"}

EVERY, INPUTS = "*", r"re:.*(::input_\d+|/quant_stub(\.\d+)?)"
"""Names for all layers of any network, and for its inputs and the places where it is quantized
from.
"""


def to_hierarchical(config: Config) -> Converted:
    """Entries that say the same of all operators with weights, where there are no others,
    become the global level.

    What the top of the file says of activations and of the network's inputs becomes patterns
    that all networks match.
    """
    file = _Layered(config)
    blocks: dict[str, dict[str, Any]] = {block: {} for block in _BLOCKS.values()}
    excluded: dict[str, Place | None] = {}
    origins: dict[str, Place | None] = {}
    for block, text, level, place in (*file.patterns(), *map(file.entry, file.entries)):
        if level is None:
            excluded[text] = place
        else:
            # Of two entries for the same layers the second one holds, at its place
            blocks[block].pop(text, None)
            blocks[block][text] = level
            origins[pointer_to(block, text)] = place
    passes = [
        {"name": name} for switch, name in _PASSES.items() if getattr(config.settings, switch)
    ]
    optional: dict[str, Any] = {
        **blocks,
        "exclude": [*excluded],
        "pre_quant_opt_config": passes,
    }
    if config.algorithms:
        optional["algo_config"] = [
            written(algorithm.settings) for algorithm in config.algorithms
        ]
    everywhere = _level(file.everywhere) | {"target_device": config.settings.target_device}
    document = {"global_quant_config": everywhere} | {
        key: value for key, value in optional.items() if value
    }
    origins |= {pointer_to("exclude", at): place for at, place in enumerate(excluded.values())}
    return Converted(document, once(_findings(file)), origins)


class _Layered:
    """A layered config, cut as the other form has it.

    Attributes:
        everywhere: what holds for layers with weights of their own.
        network: what holds for all layers.
        entries: the rules for types and names that are left.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.overall, self._tensor, *entries = config.rules
        top = self.merged([])
        same = [] if top else self._for_all_weighted(entries)
        self.entries = [rule for rule in entries if rule not in same]
        flowing = {role: stated for role, stated in top.items() if role not in PARAMETERS}
        by_type = any(rule.selector.kind == "type" for rule in self.entries)
        self.network = flowing if by_type or not flowing else top
        top = self.merged(same[:1]) if same else top
        self.everywhere = {
            role: stated for role, stated in top.items() if role not in self.network
        }
        spoken = {
            *self.everywhere,
            *self.network,
            *(role for rule in self.entries for role in rule.roles or ()),
        }
        self._spoken = [role for role in ROLES if role in spoken]

    def merged(self, rules: Sequence[ConfigRule]) -> dict[Role, Fields]:
        """What holds where these rules match, the weakest first; without any, at the top."""
        roles = (rules[-1] if rules else self.overall).roles or ()
        blocks = [rule.fields for rule in (self.overall, self._tensor, *rules)]
        return {
            role: {
                name: stated for block in blocks for name, stated in block.get(role, {}).items()
            }
            for role in ROLES
            if role in roles
        }

    def patterns(self) -> Iterator[tuple[str, str, dict[str, Any], Place | None]]:
        """The block, the name, the level and the origin of what holds for the whole network."""
        for text in (EVERY, INPUTS):
            stated = {
                role: found
                for role, found in self.network.items()
                if (role == "input") == (text == INPUTS)
            }
            if stated:
                yield _BLOCKS["name"], text, _level(stated), self.overall.roles_place

    def entry(self, rule: ConfigRule) -> tuple[str, str, dict[str, Any] | None, Place | None]:
        """The same for an entry, which says of each tensor that anything quantizes what becomes
        of it; without a level it is excluded.
        """
        selector, stated = rule.selector, self.merged([rule])
        off = {
            KEY_OF[role]: {"dtype": "float32"} for role in self._spoken if role not in stated
        }
        level = None if self._is_excluded(rule) else _level(stated) | off
        return _BLOCKS[selector.kind], selector.text, level, selector.place

    def _is_excluded(self, rule: ConfigRule) -> bool:
        """Whether nothing of its layers is quantized, by no entry that is stronger here:
        `exclude` is the strongest.
        """
        if rule.roles or rule.selector.kind == "type":
            return False
        ordered = by_strength(self.entries)
        stronger = [
            (other.selector, other.roles)
            for other in ordered[ordered.index(rule) + 1 :]
            if other.roles
        ]
        return all(
            are_apart(rule.selector, other) and "activation" not in roles
            for other, roles in stronger
        )

    def _for_all_weighted(self, entries: Sequence[ConfigRule]) -> list[ConfigRule]:
        """The entries that say the same of each operator with weights, present or not: together
        a global level.
        """
        optional = {
            rule.selector.text: rule
            for rule in entries
            if rule.selector.kind == "type" and not rule.selector.required
        }
        found = [optional[word] for word in WEIGHTED if word in optional]
        specs = [specs_of(self.merged([rule])) for rule in found]
        return (
            found
            if len(found) == len(WEIGHTED) and all(each == specs[0] for each in specs)
            else []
        )


def _level(stated: Mapping[Role, Fields]) -> dict[str, Any]:
    return {KEY_OF[role]: specification(spec) for role, spec in specs_of(stated).items()}


def _findings(file: _Layered) -> Iterator[Diagnostic]:
    yield from _settings(file.config.settings)
    for stated in (
        file.everywhere,
        file.network,
        *(file.merged([rule]) for rule in file.entries),
    ):
        yield from _not_hierarchical(stated)
    yield from _selectors(file)
    yield from overlapping(
        by_strength(file.entries),
        lambda rules: specs_of(file.merged(rules)),
        {role: role for role in ROLES},
    )
    if file.overall.roles and any(role in PARAMETERS for role in file.everywhere):
        text = (
            "global_quant_config applies to layers with weights of their own: norms that "
            "cannot be folded, and trained tensors in expressions, stay in float"
        )
        yield may_differ(text, file.overall.roles_place)
    if (
        "activation" in file.network
        and specs_of(file.network)["activation"].dtype not in CAST_ONLY
    ):
        yield normalized(file.overall.roles_place)
    for rule in file.entries:
        if ("activation" in (rule.roles or ())) != ("activation" in file.network):
            yield joined(rule.selector.place)


def _settings(settings: Settings) -> Iterator[Diagnostic]:
    """Switches that do something, and the DPU."""
    for each in fields(Settings):
        if (
            each.name not in ("places", "target_device", *_PASSES)
            and getattr(settings, each.name) != each.default
        ):
            text = f"{each.name}: the hierarchical form has no key for it"
            yield inexpressible(text, settings.places.get(each.name), _KEEP)
    if settings.target_device == "DPU":
        text = "target_device DPU: the hierarchical form has CPU, GPU and IPU"
        yield inexpressible(text, settings.places.get("target_device"), _KEEP)


def _selectors(file: _Layered) -> Iterator[Diagnostic]:
    """Entries that the form has no selectors for."""
    wide = specs_of(file.network)
    for rule in file.entries:
        selector, own = rule.selector, specs_of(file.merged([rule]))
        if not selector.required:
            text = "required false: in the hierarchical form every selector must match"
            yield inexpressible(
                text, selector.place, "remove the entry if the model does not have these layers"
            )
        if (
            selector.kind == "type"
            and "activation" in wide
            and not alike(wide["activation"], own.get("activation"))
        ):
            text = (
                "layer_type: what the top of the file says of activation becomes a pattern "
                "for all names, which overrides types"
            )
            yield inexpressible(
                text,
                selector.place,
                "select these layers by their names, or say the same of activation",
            )


def _not_hierarchical(stated: Mapping[Role, Fields]) -> Iterator[Diagnostic]:
    for role, spec in specs_of(stated).items():
        if (
            role not in PARAMETERS
            and spec.dtype == "int"
            and spec.statistic == "max" != usual_statistic(spec.method)
        ):
            yield pooled(role, stated[role]["method"].place)
        for name, text in _limits(spec) if spec.dtype == "int" else ():
            place = stated[role][name].place if name in stated[role] else None
            yield inexpressible(f"{_WORDS[name]} {text}", place, _KEEP)


def _limits(spec: QuantizationSpec) -> Iterator[tuple[str, str]]:
    """The fields of integers that the hierarchical form has no word for; their values, and what
    it has.
    """
    if dtype_word(spec) is None:
        sign = "" if spec.signed and spec.symmetric else "u"
        yield (
            "bit_width",
            f"{spec.bit_width}: the hierarchical form has no dtype {sign}int{spec.bit_width}",
        )
    if spec.narrow_range and spec.signed and spec.symmetric:
        yield (
            "narrow_range",
            "true: the signed dtypes of the hierarchical form have all their codes",
        )
    if spec.statistic != "max":
        yield (
            "statistic",
            f"{spec.statistic}: the hierarchical form takes the range of all batches",
        )
    if observer_word(spec) is None:
        yield (
            "method",
            f"{spec.method}: the hierarchical form has no observer for it with {spec.qscheme}",
        )
