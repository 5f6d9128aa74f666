"""Write a config of the layered form as a document of the hierarchical form."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from quantizer.commands.start.findings import (
    WEIGHTED,
    ConvertedDocument,
    alike,
    are_apart,
    by_strength,
    concatenation_differs,
    inexpressible,
    may_differ,
    one_per_reason,
    overlapping,
    pattern_of_type,
    range_of_batches_differs,
    specs_by_role,
)
from quantizer.config.algorithms import SWITCHES, algorithm_entry
from quantizer.config.diagnostics import Diagnostics, Place
from quantizer.config.document.document import pointer_to
from quantizer.config.forms.hierarchical_spec import (
    PARAMETERS,
    observer_word,
    specification,
    usual_statistic,
)
from quantizer.config.forms.layered import FIELDS
from quantizer.config.forms.types import dtype_word, integer_word
from quantizer.config.json_types import JsonObject
from quantizer.config.model import (
    ROLES,
    ConfigRule,
    Fields,
    QuantizationSpec,
    ResolvedConfig,
    Role,
    Settings,
)
from quantizer.config.roles import KEY_OF
from quantizer.config.wording import joined
from quantizer.tables import RANGE_METHODS

_KEEP = "keep the layered form, or change it"
_PASSES = {switch: name for name, switch in SWITCHES.items()}
"""Switches that the form lists among its algorithms."""

_WORDS = {name: word for word, name in FIELDS.items()}
_BLOCKS = {"type": "layer_type_quant_config", "name": "layer_quant_config"}

_EVERY_LAYER = "*"
_NETWORK_INPUTS = r"re:.*(::input_\d+|/quant_stub(\.\d+)?)"
"""Names for all layers of any network, and for its inputs and the places where it is quantized
from.
"""


_Entry = tuple[str, str, JsonObject | None, Place | None]
"""A level of the document: its block, the text that selects the layers, what it states of them,
or None to exclude them, and its place in the source.
"""


def to_hierarchical(config: ResolvedConfig) -> ConvertedDocument:
    """Return the document.

    Entries that state the same for all operators with weights, where there are no others,
    become the global level. What the top of the file states of activations and of the network's
    inputs becomes patterns that all networks match.
    """
    file = _Layered(config)
    everywhere = _level(file.everywhere)
    everywhere["target_device"] = config.settings.target_device
    document: JsonObject = {"global_quant_config": everywhere}
    blocks: dict[str, JsonObject] = {block: {} for block in _BLOCKS.values()}
    excluded: dict[str, Place | None] = {}
    origins: dict[str, Place | None] = {}
    for block, text, level, place in file.converted_entries():
        if level is None:
            excluded[text] = place
            continue
        # Of two entries for the same layers the second one holds, at its place
        blocks[block].pop(text, None)
        blocks[block][text] = level
        origins[pointer_to(block, text)] = place
    passes = [name for switch, name in _PASSES.items() if getattr(config.settings, switch)]
    optional: JsonObject = {
        **blocks,
        "exclude": [*excluded],
        "pre_quant_opt_config": [{"name": name} for name in passes],
        "algo_config": [algorithm_entry(algorithm.settings) for algorithm in config.algorithms],
    }
    document |= {key: value for key, value in optional.items() if value}
    for index, place in enumerate(excluded.values()):
        origins[pointer_to("exclude", index)] = place
    return ConvertedDocument(document, one_per_reason(_findings(file)), origins)


class _Layered:
    """A layered config, divided as the other form does it.

    Attributes:
        everywhere: what holds for layers with weights of their own.
        network: what holds for all layers.
        entries: the rules for types and names that are left.
        excluded: the rules that leave layers in float.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.overall, self._tensor, *layers = config.rules
        entries = [rule for rule in layers if rule.selector.kind != "exclude"]
        self.excluded = [rule for rule in layers if rule.selector.kind == "exclude"]
        top = self.merged([])
        for_all_weighted = [] if top else self._for_all_weighted(entries)
        self.entries = [rule for rule in entries if rule not in for_all_weighted]
        # Parameters are left to the global level where types are selected, as a pattern for
        # all names would override these
        self.network = {role: top[role] for role in top if role not in PARAMETERS}
        by_type = any(rule.selector.kind == "type" for rule in self.entries)
        if self.network and not by_type:
            self.network = dict(top)
        if for_all_weighted:
            top = self.merged(for_all_weighted[:1])
        weighted = [role for role in top if role not in self.network]
        self.everywhere = {role: top[role] for role in weighted}
        quantized: set[Role] = {*self.everywhere, *self.network}
        for rule in self.entries:
            quantized.update(rule.roles or ())
        self._quantized = [role for role in ROLES if role in quantized]

    def merged(self, rules: Sequence[ConfigRule]) -> dict[Role, Fields]:
        """Return what holds where these rules match, the weakest first; without any, at the
        top.
        """
        strongest = rules[-1] if rules else self.overall
        merged: dict[Role, Fields] = {}
        for role in ROLES:
            if role in (strongest.roles or ()):
                merged_fields = dict(self.overall.fields.get(role, {}))
                for rule in (self._tensor, *rules):
                    merged_fields |= rule.fields.get(role, {})
                merged[role] = merged_fields
        return merged

    def converted_entries(self) -> Iterator[_Entry]:
        """Yield what holds for the whole network, then the entries of the file."""
        for text in (_EVERY_LAYER, _NETWORK_INPUTS):
            is_input = text == _NETWORK_INPUTS
            roles = [role for role in self.network if (role == "input") == is_input]
            if roles:
                level = _level({role: self.network[role] for role in roles})
                yield _BLOCKS["name"], text, level, self.overall.roles_place
        # A pattern for a type is weaker than the patterns of the file, so it is before these
        types = [rule for rule in self.entries if rule.selector.kind == "type"]
        others = [rule for rule in self.entries if rule.selector.kind != "type"]
        yield from map(self._converted, [*types, *others])
        for rule in self.excluded:
            selector = rule.selector
            yield _BLOCKS["name"], selector.text, None, selector.place

    def _converted(self, rule: ConfigRule) -> _Entry:
        """Return an entry, which decides about each tensor that anything quantizes."""
        selector = rule.selector
        level = None
        if not self._is_excluded(rule):
            stated = self.merged([rule])
            level = _level(stated)
            for role in self._quantized:
                if role not in stated:
                    level[KEY_OF[role]] = {"dtype": "float32"}
        text = selector.text
        kind = selector.kind
        pattern = pattern_of_type(selector)
        if pattern is not None and self.is_overridden(rule):
            kind, text = "name", pattern
        return _BLOCKS[kind], text, level, selector.place

    def is_overridden(self, rule: ConfigRule) -> bool:
        """Return whether a rule is for a type, and says something else of activations than the
        top. What the top says becomes a pattern for all names, and so overrides types.
        """
        network = specs_by_role(self.network).get("activation")
        activation = specs_by_role(self.merged([rule])).get("activation")
        is_type = rule.selector.kind == "type"
        return is_type and network is not None and not alike(network, activation)

    def _is_excluded(self, rule: ConfigRule) -> bool:
        """Return whether nothing of its layers is quantized, by no entry that is stronger here:
        `exclude` is the strongest.
        """
        if rule.roles or rule.selector.kind == "type":
            return False
        ordered = by_strength(self.entries)
        for other in ordered[ordered.index(rule) + 1 :]:
            roles = other.roles or ()
            if "activation" in roles:
                return False
            if roles and not are_apart(rule.selector, other.selector):
                return False
        return True

    def _for_all_weighted(self, entries: Sequence[ConfigRule]) -> list[ConfigRule]:
        """Return the entries that state the same of each operator with weights, present or not:
        together a global level.
        """
        types = [rule for rule in entries if rule.selector.kind == "type"]
        optional = {rule.selector.text: rule for rule in types if not rule.selector.required}
        if not optional.keys() >= set(WEIGHTED):
            return []
        rules = [optional[word] for word in WEIGHTED]
        specs = [specs_by_role(self.merged([rule])) for rule in rules]
        return rules if all(other == specs[0] for other in specs) else []


def _level(stated: Mapping[Role, Fields]) -> JsonObject:
    specs = specs_by_role(stated)
    return {KEY_OF[role]: specification(spec) for role, spec in specs.items()}


def _findings(file: _Layered) -> Diagnostics:
    yield from _settings(file.config.settings)
    yield from _not_hierarchical(file.everywhere)
    yield from _not_hierarchical(file.network)
    for rule in file.entries:
        yield from _not_hierarchical(file.merged([rule]))
    yield from _selectors(file)

    def merged(rules: Sequence[ConfigRule]) -> dict[Role, QuantizationSpec]:
        return specs_by_role(file.merged(rules))

    words = {role: role for role in ROLES}
    yield from overlapping(by_strength(file.entries), merged, words)
    top_place = file.overall.roles_place
    if file.overall.roles and not PARAMETERS.isdisjoint(file.everywhere):
        yield may_differ(
            "global_quant_config applies to layers with weights of their own: norms that "
            "cannot be folded, and trained tensors in expressions, stay in float",
            top_place,
        )
    activation = specs_by_role(file.network).get("activation")
    if activation and activation.is_scaled:
        yield may_differ(
            "sums that only normalizations read, the residual stream of a transformer, stay "
            "float in the layered form, and are quantized in the hierarchical form",
            top_place,
        )
    for rule in file.entries:
        if ("activation" in (rule.roles or ())) != (activation is not None):
            yield concatenation_differs(rule.selector.place)


def _settings(settings: Settings) -> Diagnostics:
    """Yield switches that do something, and the DPU."""
    expressible = {"places", "target_device", *_PASSES}
    for setting in fields(Settings):
        name = setting.name
        if name not in expressible and getattr(settings, name) != setting.default:
            yield inexpressible(
                f"{name}: the hierarchical form has no key for it",
                settings.places.get(name),
                _KEEP,
            )
    if settings.target_device == "DPU":
        yield inexpressible(
            "target_device DPU: the hierarchical form has CPU, GPU and IPU",
            settings.places.get("target_device"),
            _KEEP,
        )


def _selectors(file: _Layered) -> Diagnostics:
    """Yield entries that the form has no selectors for."""
    for rule in file.entries:
        selector = rule.selector
        if not selector.required:
            yield inexpressible(
                "required false: in the hierarchical form every selector must match",
                selector.place,
                "remove the entry if the model does not have these layers",
            )
        if not file.is_overridden(rule):
            continue
        pattern = pattern_of_type(selector)
        if pattern is not None:
            yield may_differ(
                f"layer_type becomes the pattern {pattern}: an operator of another class is "
                "selected, too, and a further operator in a module of this class is not",
                selector.place,
            )
        else:
            yield inexpressible(
                "layer_type: what the top of the file says of activation becomes a pattern "
                "for all names, which overrides types",
                selector.place,
                "select these layers by their names, or say the same of activation",
            )


def _not_hierarchical(stated: Mapping[Role, Fields]) -> Diagnostics:
    for role, spec in specs_by_role(stated).items():
        if spec.dtype != "int":
            continue
        takes_largest = spec.statistic == "max" != usual_statistic(spec.method)
        if role not in PARAMETERS and takes_largest:
            yield range_of_batches_differs(role, stated[role]["method"].place)
        for name, text in _limits(spec):
            place = stated[role][name].place if name in stated[role] else None
            help_ = _KEEP
            if name == "method":
                others = {word: replace(spec, method=word) for word in RANGE_METHODS}
                known = [word for word in others if observer_word(others[word]) is not None]
                help_ = f"keep the layered form, or write {joined(known, 'or')}"
            yield inexpressible(f"{_WORDS[name]} {text}", place, help_)


def _limits(spec: QuantizationSpec) -> Iterator[tuple[str, str]]:
    """Yield the fields of integers that the hierarchical form has no word for; their values,
    and what it has.
    """
    if dtype_word(spec) is None:
        dtype = integer_word(spec)
        yield "bit_width", f"{spec.bit_width}: the hierarchical form has no dtype {dtype}"
    if spec.narrow_range and spec.has_signed_codes:
        text = "true: the signed dtypes of the hierarchical form have all their codes"
        yield "narrow_range", text
    if spec.statistic != "max":
        text = f"{spec.statistic}: the hierarchical form takes the range of all batches"
        yield "statistic", text
    if observer_word(spec) is None:
        lacking = f"the hierarchical form has no observer for it with {spec.qscheme}"
        yield "method", f"{spec.method}: {lacking}"
