"""What the two directions of `quantizer convert` share: findings, and rules whose layers the
file alone does not tell apart.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quantizer.config.diagnostics import Diagnostic, Place
from quantizer.config.effective import effective
from quantizer.config.model import ROLES, ConfigRule, Fields, QuantizationSpec, Role, Selector
from quantizer.config.wording import listed

Specs = dict[Role, QuantizationSpec]

WEIGHTED = (
    *(f"conv{axes}d" for axes in (1, 2, 3)),
    *(f"conv_transpose{axes}d" for axes in (1, 2, 3)),
    "linear",
    "expert_linear",
    "lstm",
    "gru",
    "rnn_tanh",
    "rnn_relu",
    "embedding",
)
"""The operators with weights of their own, which is whom a global configuration is about."""

_TYPES = {word.replace("_", "") for word in WEIGHTED} | {"rnn"}
"""They, as the last part of a type's name in small letters: the class has the letters of the
function.
"""


@dataclass(frozen=True)
class Converted:
    """The document; findings: an error for what it cannot express, a warning for what depends
    on the model or the data; and for parts of the document, by pointer, the place of the source
    that they come from.
    """

    document: dict[str, Any]
    findings: tuple[Diagnostic, ...]
    origins: Mapping[str, Place | None] = field(default_factory=dict)


def inexpressible(text: str, place: Place | None, help_: str) -> Diagnostic:
    """The other form has no words for it."""
    return Diagnostic("QZ124", text, place, help=help_)


def may_differ(text: str, place: Place | None) -> Diagnostic:
    """The model or the data decide whether both files mean the same."""
    return Diagnostic(
        "QZ125", text, place, "warning", help="compare `quantizer plan` with both files"
    )


def pooled(role: Role, place: Place | None) -> Diagnostic:
    """One range of several batches is found in another way."""
    text = (
        f"from several batches of {role}, the layered form takes the largest range, the "
        "hierarchical form finds one range for all of them"
    )
    return Diagnostic(
        "QZ125", text, place, "warning", help="with a MinMax observer they are the same"
    )


def joined(place: Place | None) -> Diagnostic:
    """Where an output is quantized that only a concatenation reads."""
    text = (
        "an output that only a concatenation reads is quantized before it in the "
        "hierarchical form, and in the layered form only where the concatenation is"
    )
    return may_differ(text, place)


def normalized(place: Place | None) -> Diagnostic:
    """Whether a residual stream is quantized."""
    text = (
        "sums that normalizations alone read, the residual stream of a transformer, stay "
        "float in the layered form, and are quantized in the hierarchical form"
    )
    return may_differ(text, place)


def once(findings: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """One finding for each reason, at the first of its places; the next ones are related, but
    for a long list's end.
    """
    first: dict[tuple[str, str], Diagnostic] = {}
    for found in findings:
        known = first.setdefault((found.code, found.message), found)
        places = {known.place, *(place for place, _ in known.related)}
        if found.place and found.place not in places and len(known.related) < MOST_PLACES:
            first[found.code, found.message] = replace(
                known, related=(*known.related, (found.place, "and here"))
            )
    return tuple(first.values())


MOST_PLACES = 5


def specs_of(fields: Mapping[Role, Fields]) -> Specs:
    """The spec that each role's fields make."""
    return {role: QuantizationSpec.of(stated) for role, stated in fields.items()}


def overlapping(
    rules: Sequence[ConfigRule],
    merged: Callable[[Sequence[ConfigRule]], Specs],
    keys: Mapping[Role, str],
) -> Iterator[Diagnostic]:
    """Rules that say less of a layer than a weaker one that may be about it, too; `rules` are
    weakest first.

    `merged` is what holds for a layer that several rules match, `keys` the file's words for
    roles. In the other form entries are complete, so nothing is inherited there.
    """
    seen: dict[str, list[ConfigRule]] = {}  # many rules say the same
    inherited: dict[tuple[str, str], list[Role]] = {}
    for rule in rules:
        content = _content(rule)
        for before, alike_rules in seen.items():
            if (before, content) not in inherited:
                alone, both = merged([rule]), merged([alike_rules[0], rule])
                roles = [role for role in ROLES if not alike(alone.get(role), both.get(role))]
                inherited[before, content] = roles
            roles = inherited[before, content]
            found = (
                _inherits(wider, rule, roles, keys) for wider in (alike_rules if roles else ())
            )
            if first := next(filter(None, found), None):
                yield first
                break
        seen.setdefault(content, []).append(rule)


def _content(rule: ConfigRule) -> str:
    fields = {
        role: {name: said.value for name, said in stated.items()}
        for role, stated in rule.fields.items()
    }
    return repr((fields, sorted(rule.roles or ()), sorted(rule.adds)))


def _inherits(
    wider: ConfigRule, rule: ConfigRule, roles: Sequence[Role], keys: Mapping[Role, str]
) -> Diagnostic | None:
    """The finding for a rule that takes something of these tensors over from a wider one, if a
    layer may have both.

    Two modules may have one activation, where one is fused into the other.
    """
    apart = are_apart(wider.selector, rule.selector)
    if apart and ("activation" not in roles or not _is_path(rule.selector)):
        return None
    what = listed(keys[role] for role in roles if role == "activation" or not apart)
    text = f"{rule.label} may inherit from {wider.label} ({what}): that depends on the model"
    if apart:
        return may_differ(text, rule.selector.place)
    help_ = "write all keys of these tensors in the layer's configuration as well"
    return inexpressible(text, rule.selector.place, help_)


def by_strength(rules: Iterable[ConfigRule]) -> list[ConfigRule]:
    """Rules for types and names, weakest first; equally specific ones in the file's order."""
    return sorted(
        rules,
        key=lambda rule: (
            -1 if rule.selector.kind == "type" else specificity(rule.selector.text)
        ),
    )


def specificity(text: str) -> int:
    """Of a name selector: how specific it is; 0 is a pattern, 1 a module path, 2 a layer name.

    >>> [
    ...     specificity(text)
    ...     for text in ("layer?.*", "re:fc", "layer1.0", "Net::Net/Linear[fc]/linear")
    ... ]
    [0, 0, 1, 2]
    """
    if text.startswith(("re:", "kind:")) or "*" in text or "?" in text:
        return 0
    return 2 if "::" in text else 1


def is_weighted(selector: Selector) -> bool:
    """Whether all layers that a selector can match have weights of their own, as its words
    alone show.
    """
    if selector.kind == "type":
        return _type_word(selector) in _TYPES
    operator = selector.text.rpartition("/")[2].partition(".")[0]
    return specificity(selector.text) > 1 and operator in WEIGHTED


def _type_word(selector: Selector) -> str:
    return selector.text.rpartition(".")[2].replace("_", "").casefold()


def are_apart(selector: Selector, other: Selector) -> bool:
    """Whether no layer is matched by both: two operators, or two modules of which neither is
    inside the other.
    """
    if selector.kind == other.kind == "type":
        return (
            is_weighted(selector)
            and is_weighted(other)
            and _type_word(selector) != _type_word(other)
        )
    if not _is_path(selector) or not _is_path(other):
        return False
    paths = sorted((f"{selector.text}.", f"{other.text}."))
    return not paths[1].startswith(paths[0])


def _is_path(selector: Selector) -> bool:
    return selector.kind == "name" and specificity(selector.text) == 1


def alike(spec: QuantizationSpec | None, other: QuantizationSpec | None) -> bool:
    """Whether two specs give equal codes; None is a tensor that stays in float."""
    return (
        spec == other if spec is None or other is None else effective(spec) == effective(other)
    )
