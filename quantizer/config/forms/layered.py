"""Translate the layered form (overall, tensor, layer blocks) into a `ResolvedConfig`."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from quantizer.config.diagnostics import Place
from quantizer.config.document.document import Document, ValidDocument
from quantizer.config.forms.algorithm_words import read_algorithms
from quantizer.config.json_types import JsonObject, JsonPath
from quantizer.config.model import (
    ROLES,
    ConfigRule,
    Fields,
    ResolvedConfig,
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
"""The field of `QuantizationSpec` for each of the form's words."""

OPTIONAL = {
    "percentage": "only the percentile method reads `percentage`",
    "symmetric_scale": (
        "only symmetric signed integers with a float scale and all their codes read "
        "`symmetric_scale`"
    ),
}
"""The words that a complete block may lack, and who reads them."""

_SELECTOR_KINDS: Mapping[str, Literal["type", "name"]] = {
    "layer_type": "type",
    "layer_name": "name",
}
_SETTINGS = tuple(field.name for field in fields(Settings) if field.name != "places")


@dataclass(frozen=True)
class LayeredLevel:
    """A part of the file that states something of all roles and of single ones: the top, or a
    layer entry.
    """

    selector: Selector
    label: str
    pointer: JsonPath
    roles: frozenset[Role] | None
    roles_place: Place | None
    overall: Mapping[Role, Fields]
    tensor: Mapping[Role, Fields]

    @property
    def quantized(self) -> list[Role]:
        """Return the roles that are quantized; all where the level does not state them."""
        return [role for role in ROLES if self.roles is None or role in self.roles]

    def blocks(self, role: Role) -> tuple[Fields, Fields]:
        """Return what the level states of `role`, the wider block first."""
        return self.overall[role], self.tensor.get(role, {})

    def rule(self) -> ConfigRule:
        """Return a layer entry as a rule."""
        merged: dict[Role, Fields] = {}
        for role in self.quantized:
            overall, tensor = self.blocks(role)
            merged[role] = {**overall, **tensor}
        return ConfigRule(self.selector, self.label, self.roles, self.roles_place, merged)


@dataclass(frozen=True)
class Layered:
    """The file in the field's words, level by level, and as a config, whose rules are in the
    file's order.
    """

    document: Document
    config: ResolvedConfig
    top: LayeredLevel
    layers: tuple[LayeredLevel, ...]


def translate_layered(document: Document, ignored: Collection[str] = ()) -> Layered:
    """Translate a document of the layered form.

    `ignored` are pointers whose values are wrong: they are left out, so that the valid part can
    be checked.
    """
    file = _Translator(document, frozenset(ignored))
    top = file.level(Selector("all"), "overall_quantize_config", ())
    layers = tuple(file.entries())
    config = ResolvedConfig(
        settings=file.settings(),
        rules=(
            ConfigRule(top.selector, top.label, top.roles, top.roles_place, top.overall),
            ConfigRule(top.selector, "tensor_quantize_config", fields=top.tensor),
            *(level.rule() for level in layers),
        ),
        source=document.source.name,
        document=document.value,
        algorithms=read_algorithms(file, "algorithms"),
        text=document.source.text,
    )
    return Layered(document, config, top, layers)


class _Translator(ValidDocument):
    """A document whose parts are read by one method each."""

    def settings(self) -> Settings:
        """Return the global settings, with the place of each."""
        stated: JsonObject = {}
        places: dict[str, Place] = {}
        for name in _SETTINGS:
            value = self.get(name)
            if value is None:
                continue
            stated[name] = int(value) if name == "onnx_opset_version" else value
            place = self.place(name)
            if place:
                places[name] = place
        return Settings(**stated, places=places)

    def entries(self) -> Iterator[LayeredLevel]:
        """Yield the levels of `layer_quantize_config`."""
        block = "layer_quantize_config"
        for index in self.items(block):
            path = (block, index)
            yield self.level(self._selector(*path), f"{block}[{index}]", path)

    def _selector(self, *path: str | int) -> Selector:
        required = self.get(*path, "required") is not False
        for key, kind in _SELECTOR_KINDS.items():
            text = self.get(*path, key)
            if text is not None:
                return Selector(kind, text, self.place(*path, key), required)
        return Selector("name", required=False)

    def level(self, selector: Selector, label: str, path: JsonPath) -> LayeredLevel:
        """Return what the file states at one path for the layers of a selector."""
        weights = self._block(*path, "overall_quantize_config")
        # Other roles have one scale per tensor
        others = dict(weights)
        if "qscheme" in others and others["qscheme"].value == "per_channel":
            del others["qscheme"]
        overall: dict[Role, Fields] = dict.fromkeys(ROLES, others)
        overall["weights"] = weights
        tensor: dict[Role, Fields] = {}
        for role in ROLES:
            block = self._block(*path, "tensor_quantize_config", role)
            if block:
                tensor[role] = block
        roles_path = (*path, "quantizable_data_type")
        roles = self._roles(*roles_path)
        roles_place = None
        if roles is not None:
            roles_place = self.place(*roles_path)
        return LayeredLevel(
            selector=selector,
            label=label,
            pointer=path,
            roles=roles,
            roles_place=roles_place,
            overall=overall,
            tensor=tensor,
        )

    def _roles(self, *path: str | int) -> frozenset[Role] | None:
        """Return the roles in the list at `path`; None where there is no list, or where one is
        misspelt: then the missing ones are not known.
        """
        words = self.get(*path)
        if words is None or len(self.items(*path)) < len(words):
            return None
        return frozenset(role for role in ROLES if role in words)

    def _block(self, *path: str | int) -> dict[str, Sourced]:
        block: dict[str, Sourced] = {}
        for word, name in FIELDS.items():
            value = self.get(*path, word)
            if value is None:
                continue
            if name == "qscheme":
                value = "per_channel" if value else "per_tensor"
            elif name == "bit_width":
                value = int(value)
            elif name == "percentage":
                value = float(value)
            block[name] = Sourced(value, self.place(*path, word))
        return block
