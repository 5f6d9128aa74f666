"""Share what both directions of `quantizer convert` need: findings, and rules that may select
the same layers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantizer.config.diagnostics import Diagnostic, Diagnostics, Place, related_to
from quantizer.config.json_types import JsonObject
from quantizer.config.model import ROLES, ConfigRule, Fields, QuantizationSpec, Role, Selector
from quantizer.config.rules.spec_rules import effective
from quantizer.config.wording import listed

_Specs = dict[Role, QuantizationSpec]

WEIGHTED = (
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "linear",
    "expert_linear",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "embedding",
)
"""The operators with weights of their own, which a global configuration is about."""

_WEIGHTED_TYPES = {word.replace("_", "") for word in WEIGHTED} | {"rnn"}
"""The same operators as the last part of a type's name in small letters: the class has the
letters of the function.
"""

_NAMED_OPERATORS = [word for word in WEIGHTED if word != "expert_linear"]
"""Those of them that end the names of layers as traced. A pass makes the others."""
_PACKAGES_OF_OPERATORS = ("", "nn", "torch.nn", "torch.nn.functional")

_MAX_PLACES = 5
"""A finding has at most so many related places."""


@dataclass(frozen=True)
class ConvertedDocument:
    """A converted document. `findings` are errors for what it cannot express, and warnings for
    what depends on the model or the data. `origins` has the place of the source for parts of
    the document, by pointer.
    """

    document: JsonObject
    findings: tuple[Diagnostic, ...]
    origins: Mapping[str, Place | None] = field(default_factory=dict)


def inexpressible(text: str, place: Place | None, help_: str) -> Diagnostic:
    """Return the error for what the other form has no words for."""
    return Diagnostic("QZ124", text, place, help=help_)


def may_differ(text: str, place: Place | None) -> Diagnostic:
    """Return the warning for files that mean the same for some models or data only."""
    help_ = "compare `quantizer plan` with both files"
    return Diagnostic("QZ125", text, place, "warning", help=help_)


def range_of_batches_differs(role: Role, place: Place | None) -> Diagnostic:
    """Return the warning for a range of several batches, which the forms find in different
    ways.
    """
    return Diagnostic(
        "QZ125",
        f"from several batches of {role}, the layered form takes the largest range, the "
        "hierarchical form finds one range for all of them",
        place,
        "warning",
        help="with a MinMax observer they are the same",
    )


def concatenation_differs(place: Place | None) -> Diagnostic:
    """Return the warning for an output that only a concatenation reads."""
    return may_differ(
        "an output that only a concatenation reads is quantized before it in the "
        "hierarchical form, and in the layered form only where the concatenation is",
        place,
    )


def one_per_reason(findings: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Return one finding for each reason, at the first of its places. The next places are
    related, up to a limit.
    """
    by_reason: dict[tuple[str, str], Diagnostic] = {}
    for finding in findings:
        reason = (finding.code, finding.message)
        first = by_reason.setdefault(reason, finding)
        is_known = finding.place in (first.place, *(place for place, _ in first.related))
        if not is_known and len(first.related) < _MAX_PLACES:
            related = (*first.related, *related_to(finding.place, "and here"))
            by_reason[reason] = replace(first, related=related)
    return tuple(by_reason.values())


def specs_by_role(fields: Mapping[Role, Fields]) -> _Specs:
    """Return the spec that each role's fields make."""
    return {role: QuantizationSpec.of(stated) for role, stated in fields.items()}


def overlapping(
    rules: Sequence[ConfigRule],
    merged: Callable[[Sequence[ConfigRule]], _Specs],
    keys: Mapping[Role, str],
) -> Diagnostics:
    """Yield rules that state less of a layer than a weaker rule that may select it, too.

    In the other form entries are complete, so nothing is inherited there.

    Args:
        rules: weakest first.
        merged: returns what holds for a layer that several rules match.
        keys: the file's words for roles.
    """
    # Rules are grouped by content, since many state the same
    earlier_rules: dict[str, list[ConfigRule]] = {}
    inherited: dict[tuple[str, str], list[Role]] = {}
    for rule in rules:
        content = _content(rule)
        for earlier_content, wider_rules in earlier_rules.items():
            pair = (earlier_content, content)
            if pair not in inherited:
                alone = merged([rule])
                both = merged([wider_rules[0], rule])
                changed = [role for role in ROLES if not alike(alone.get(role), both.get(role))]
                inherited[pair] = changed
            finding = _first_inherits(wider_rules, rule, inherited[pair], keys)
            if finding:
                yield finding
                break
        earlier_rules.setdefault(content, []).append(rule)


def _content(rule: ConfigRule) -> str:
    fields: dict[Role, JsonObject] = {}
    for role, stated in rule.fields.items():
        fields[role] = {name: sourced.value for name, sourced in stated.items()}
    return repr((fields, sorted(rule.roles or ()), sorted(rule.adds)))


def _first_inherits(
    wider_rules: Iterable[ConfigRule],
    rule: ConfigRule,
    roles: Sequence[Role],
    keys: Mapping[Role, str],
) -> Diagnostic | None:
    """Return the finding for a rule that inherits these roles from the first wider rule which
    may select the same layer.

    Two modules may have one activation, where one is fused into the other.
    """
    if not roles:
        return None
    for wider in wider_rules:
        apart = are_apart(wider.selector, rule.selector)
        if not apart:
            shared = roles
        elif "activation" in roles and _is_path(rule.selector):
            shared = ["activation"]
        else:
            continue
        what = listed(keys[role] for role in shared)
        text = (
            f"{rule.label} may inherit from {wider.label} ({what}): that depends on the model"
        )
        if apart:
            return may_differ(text, rule.selector.place)
        return inexpressible(
            text,
            rule.selector.place,
            "write all keys of these tensors in the layer's configuration as well",
        )
    return None


def by_strength(rules: Iterable[ConfigRule]) -> list[ConfigRule]:
    """Return rules for types and names, weakest first; equally specific ones in the file's
    order.
    """

    def strength(rule: ConfigRule) -> int:
        return -1 if rule.selector.kind == "type" else specificity(rule.selector.text)

    return sorted(rules, key=strength)


def specificity(text: str) -> int:
    """Return how specific a name selector is: 0 is a pattern, 1 a module path, 2 a layer name.

    >>> specificity("layer?.*"), specificity("re:fc")
    (0, 0)
    >>> specificity("layer1.0"), specificity("Net::Net/Linear[fc]/linear")
    (1, 2)
    """
    if text.startswith(("re:", "kind:")) or "*" in text or "?" in text:
        return 0
    return 2 if "::" in text else 1


def selects_weighted_layers(selector: Selector) -> bool:
    """Return whether all layers that a selector can match have weights of their own, as its
    words alone show.
    """
    if selector.kind == "type":
        return _type_word(selector) in _WEIGHTED_TYPES
    operator = selector.text.rpartition("/")[2].partition(".")[0]
    return specificity(selector.text) > 1 and operator in WEIGHTED


def pattern_of_type(selector: Selector) -> str | None:
    """Return the pattern for the names of the layers of a type; None if its words do not show
    their operators.

    >>> pattern_of_type(Selector("type", "torch.nn.Conv2d"))
    're:.*/conv2d([.][0-9]+)?'
    >>> pattern_of_type(Selector("type", "torch.nn.RNN"))
    're:.*/(rnn_tanh|rnn_relu)([.][0-9]+)?'
    """
    word = _type_word(selector)
    operators = [name for name in _NAMED_OPERATORS if name.replace("_", "") == word]
    if word == "rnn":
        operators = ["rnn_tanh", "rnn_relu"]
    package = selector.text.rpartition(".")[0]
    if not operators or package not in _PACKAGES_OF_OPERATORS:
        return None
    names = operators[0] if len(operators) == 1 else f"({'|'.join(operators)})"
    return f"re:.*/{names}([.][0-9]+)?"


def _type_word(selector: Selector) -> str:
    return selector.text.rpartition(".")[2].replace("_", "").casefold()


def are_apart(selector: Selector, other: Selector) -> bool:
    """Return whether no layer is matched by both: two operators, or two modules of which
    neither is inside the other.
    """
    if selector.kind == other.kind == "type":
        are_weighted = selects_weighted_layers(selector) and selects_weighted_layers(other)
        return are_weighted and _type_word(selector) != _type_word(other)
    if not _is_path(selector) or not _is_path(other):
        return False
    outer, inner = sorted((f"{selector.text}.", f"{other.text}."))
    return not inner.startswith(outer)


def _is_path(selector: Selector) -> bool:
    return selector.kind == "name" and specificity(selector.text) == 1


def alike(spec: QuantizationSpec | None, other: QuantizationSpec | None) -> bool:
    """Return whether two specs give equal codes; None is a tensor that stays in float."""
    if spec is None or other is None:
        return spec == other
    return effective(spec) == effective(other)
