"""Translates the layered form (overall, tensor, layer blocks) into `Config`, and specs back
into its words.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from quantizer.config.diagnostics import Place
from quantizer.config.document.document import Document, ValidDocument
from quantizer.config.forms.algorithm_words import read_algorithms
from quantizer.config.model import (
    CAST_ONLY,
    POOLED,
    ROLES,
    Config,
    ConfigRule,
    Fields,
    QuantizationSpec,
    Role,
    Selector,
    Settings,
    Sourced,
)

FIELDS = {
    "datatype": "dtype",
    "bit_width": "bit_width",
    "method": "method",
    "percentage": "percentage",
    "round_mode": "round_mode",
    "symmetry": "symmetric",
    "per_channel": "qscheme",
    "signed": "signed",
    "narrow_range": "narrow_range",
    "scale_type": "scale_type",
    "symmetric_scale": "symmetric_scale",
    "calib_statistic_method": "statistic",
}
"""The form's word for each field of `QuantizationSpec`."""

OPTIONAL = {
    "percentage": "only the percentile method reads `percentage`",
    "symmetric_scale": (
        "only symmetric signed integers with a float scale and all their codes read "
        "`symmetric_scale`"
    ),
}
"""The words that a complete block may lack, and who reads them."""

_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "qscheme": {True: "per_channel", False: "per_tensor"}.__getitem__,
    "bit_width": int,
    "percentage": float,
}
_KINDS: Mapping[str, Literal["type", "name"]] = {"layer_type": "type", "layer_name": "name"}
_SETTINGS = frozenset(field.name for field in fields(Settings)) - {"places"}


@dataclass(frozen=True)
class Level:
    """One part of the file that says something about all roles and about single ones: the top,
    or a layer entry.
    """

    selector: Selector
    label: str
    pointer: tuple[str | int, ...]
    roles: frozenset[Role] | None
    roles_place: Place | None
    overall: Mapping[Role, Fields]
    tensor: Mapping[Role, Fields]

    @property
    def quantized(self) -> list[Role]:
        """The roles that are quantized; all where the level does not say."""
        return [role for role in ROLES if self.roles is None or role in self.roles]

    def blocks(self, role: Role) -> tuple[Fields, Fields]:
        """What the level says about `role`, the wider block first."""
        return self.overall[role], self.tensor.get(role, {})

    def rule(self) -> ConfigRule:
        """A layer entry as a rule."""
        merged = {
            role: {**self.overall[role], **self.tensor.get(role, {})} for role in self.quantized
        }
        return ConfigRule(self.selector, self.label, self.roles, self.roles_place, merged)


@dataclass(frozen=True)
class Layered:
    """The file in the field's words, level by level, and as a config, whose rules are in the
    file's order.
    """

    document: Document
    config: Config
    top: Level
    layers: tuple[Level, ...]


def translate(document: Document, ignored: Collection[str] = ()) -> Layered:
    """Translate a document of the layered form.

    `ignored` are pointers whose values are wrong: they are left out, so that the rest can be
    checked.
    """
    file = _Translator(document, frozenset(ignored))
    top, layers = (
        file.level(Selector("all"), "overall_quantize_config", ()),
        tuple(file.entries()),
    )
    rules = (
        ConfigRule(top.selector, top.label, top.roles, top.roles_place, top.overall),
        ConfigRule(top.selector, "tensor_quantize_config", fields=top.tensor),
        *map(Level.rule, layers),
    )
    algorithms = read_algorithms(file, "algorithms")
    config = Config(
        file.settings(),
        rules,
        document.source.name,
        document.value,
        algorithms=algorithms,
        text=document.source.text,
    )
    return Layered(document, config, top, layers)


class _Translator(ValidDocument):
    """Each method reads one part of the document."""

    def settings(self) -> Settings:
        found = {name: value for name in _SETTINGS if (value := self.get(name)) is not None}
        if "onnx_opset_version" in found:
            found["onnx_opset_version"] = int(found["onnx_opset_version"])
        places = {name: place for name in found if (place := self.place(name))}
        return Settings(**found, places=places)

    def entries(self) -> Iterator[Level]:
        block = "layer_quantize_config"
        for at in self.items(block):
            yield self.level(self._selector(block, at), f"{block}[{at}]", (block, at))

    def _selector(self, *path: str | int) -> Selector:
        required = self.get(*path, "required") is not False
        for key, kind in _KINDS.items():
            if (text := self.get(*path, key)) is not None:
                return Selector(kind, text, self.place(*path, key), required)
        return Selector("name", required=False)

    def level(self, selector: Selector, label: str, path: tuple[str | int, ...]) -> Level:
        overall = self._block(*path, "overall_quantize_config")
        for_others = {
            name: sourced for name, sourced in overall.items() if sourced.value != "per_channel"
        }
        roles = self.get(*path, "quantizable_data_type")
        if roles and None in (
            self.get(*path, "quantizable_data_type", at) for at in range(len(roles))
        ):
            # With one of them misspelt, nothing is known of those that are not there
            roles = None
        return Level(
            selector=selector,
            label=label,
            pointer=path,
            roles=None if roles is None else frozenset(role for role in ROLES if role in roles),
            roles_place=self.place(*path, "quantizable_data_type")
            if roles is not None
            else None,
            overall={role: overall if role == "weights" else for_others for role in ROLES},
            tensor={
                role: block
                for role in ROLES
                if (block := self._block(*path, "tensor_quantize_config", role))
            },
        )

    def _block(self, *path: str | int) -> Fields:
        found = {word: value for word in FIELDS if (value := self.get(*path, word)) is not None}
        return {
            FIELDS[word]: Sourced(
                _VALUES.get(FIELDS[word], lambda same: same)(value), self.place(*path, word)
            )
            for word, value in found.items()
        }


def parameters(spec: QuantizationSpec, said: Collection[str] = ()) -> dict[str, Any]:
    """A complete block that says the same as a spec of integers, or one without a scale.

    `said` are the words, of "datatype" and "symmetric_scale", that it says with their default
    as well, as another block may say something else.
    """
    if spec.dtype in CAST_ONLY:
        return {"datatype": spec.dtype}
    values = {**spec.to_json(), "qscheme": spec.qscheme == "per_channel"}
    values |= {"statistic": "max"} if spec.statistic == POOLED else {}
    idle = {"datatype"} - {*said} | ({"percentage"} if spec.method != "percentile" else set())
    if not spec.has_symmetric_scale or (
        spec.symmetric_scale == "quant_max" and "symmetric_scale" not in said
    ):
        idle |= {"symmetric_scale"}
    return {word: values[field] for word, field in FIELDS.items() if word not in idle}


def entry(
    selector: Mapping[str, Any],
    specs: Mapping[Role, QuantizationSpec],
    said: Collection[str] = (),
) -> dict[str, Any]:
    """A complete layer entry: an overall block, and what differs from it for single roles;
    `said` as above.
    """
    by_role = {role: parameters(specs[role], said) for role in ROLES if role in specs}
    overall = dict(
        next(
            (block for block in by_role.values() if "bit_width" in block),
            next(iter(by_role.values())),
        )
    )
    for word in OPTIONAL:
        overall.pop(word, None)  # the roles that read it say so themselves
    overall |= {"per_channel": False} if "per_channel" in overall else {}
    tensors = {
        role: {word: value for word, value in block.items() if overall.get(word) != value}
        for role, block in by_role.items()
    }
    return {
        **selector,
        "quantizable_data_type": list(by_role),
        "overall_quantize_config": overall,
        "tensor_quantize_config": {role: block for role, block in tensors.items() if block},
    }


def with_entries(
    document: Mapping[str, Any], entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A copy of the document with these layer entries, by the name of their layer, in place of
    those of the same names and behind all others; comments ("//" keys) of replaced ones
    stay.
    """
    changed = copy.deepcopy(dict(document))
    known = changed.get("layer_quantize_config") or []
    written = [each for each in known if each.get("layer_name") not in entries]
    for name, said in entries.items():
        old: Mapping[str, Any] = next(
            (each for each in known if each.get("layer_name") == name), {}
        )
        comments = {key: value for key, value in old.items() if key.startswith("//")}
        written.append(
            {**comments, "layer_type": None, "layer_name": name, **copy.deepcopy(dict(said))}
        )
    return changed | {"layer_quantize_config": written}


def specified(
    document: Mapping[str, Any], specs: Mapping[Role, QuantizationSpec]
) -> dict[str, Any]:
    """What an entry of this document says to give a layer's tensors these specs, whatever wider
    blocks say.
    """
    rules = {"symmetric_scale"} if "symmetric_scale" in str(document) else set()
    return entry({}, specs, {"datatype", *rules})
