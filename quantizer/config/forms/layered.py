"""Translate the layered form (overall, tensor, layer blocks) into a `ResolvedConfig`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from quantizer.config.diagnostics import Place, Sourced
from quantizer.config.document.document import Document
from quantizer.config.json_types import JsonPath
from quantizer.config.model import ROLES, ConfigRule, Fields, Role, Selector, Settings

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
_OVERALL = "overall_quantize_config"
_TENSOR = "tensor_quantize_config"
_ENTRIES = "layer_quantize_config"
_SETTINGS = tuple(field.name for field in fields(Settings) if field.name != "places")


@dataclass(frozen=True)
class LayeredLevel:
    """A part of the file that states something of all roles and of single ones: the top, or a
    layer entry. `path` leads to it.
    """

    selector: Selector
    path: JsonPath
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
        label = f"{_ENTRIES}[{self.path[1]}]"
        return ConfigRule(self.selector, label, self.roles, self.roles_place, merged)


def translate_layered(
    file: Document,
) -> tuple[Settings, list[ConfigRule], tuple[LayeredLevel, ...]]:
    """Translate the valid part of a document of the layered form.

    Returns:
        The settings, the rules in the file's order, and the levels: the top first.
    """
    everything = Selector("all")
    top = _level(file, everything, ())
    layers = [_level(file, _selector(file, path), path) for path in file.items(_ENTRIES)]
    rules = [
        ConfigRule(everything, _OVERALL, top.roles, top.roles_place, top.overall),
        ConfigRule(everything, _TENSOR, fields=top.tensor),
    ]
    rules += [level.rule() for level in layers]
    return _settings(file), rules, (top, *layers)


def _settings(file: Document) -> Settings:
    """Return the global settings, with the place of each."""
    stated: dict[str, Sourced] = {}
    for name in _SETTINGS:
        value = file.get(name)
        if value is not None:
            value = int(value) if name == "onnx_opset_version" else value
            stated[name] = Sourced(value, file.place(name))
    return Settings.of(stated)


def _selector(file: Document, path: JsonPath) -> Selector:
    required = file.get(*path, "required") is not False
    for key, kind in _SELECTOR_KINDS.items():
        text = file.get(*path, key)
        if text is not None:
            return Selector(kind, text, file.place(*path, key), required)
    return Selector("name", required=False)


def _level(file: Document, selector: Selector, path: JsonPath) -> LayeredLevel:
    """Return what the file states at one path for the layers of a selector."""
    weights = _block(file, (*path, _OVERALL))
    # Other roles have one scale per tensor
    others = dict(weights)
    if "qscheme" in others and others["qscheme"].value == "per_channel":
        del others["qscheme"]
    overall: dict[Role, Fields] = {**dict.fromkeys(ROLES, others), "weights": weights}
    blocks = {role: _block(file, (*path, _TENSOR, role)) for role in ROLES}
    roles_path = (*path, "quantizable_data_type")
    words = file.get(*roles_path)
    roles: frozenset[Role] | None = None
    # Where one is misspelt, the missing ones are not known
    if words is not None and len(file.items(*roles_path)) == len(words):
        roles = frozenset(role for role in ROLES if role in words)
    return LayeredLevel(
        selector=selector,
        path=path,
        roles=roles,
        roles_place=None if roles is None else file.place(*roles_path),
        overall=overall,
        tensor={role: block for role, block in blocks.items() if block},
    )


def _block(file: Document, path: JsonPath) -> dict[str, Sourced]:
    block: dict[str, Sourced] = {}
    for word, name in FIELDS.items():
        value = file.get(*path, word)
        if value is None:
            continue
        if name == "qscheme":
            value = "per_channel" if value else "per_tensor"
        elif name == "bit_width":
            value = int(value)
        elif name == "percentage":
            value = float(value)
        block[name] = Sourced(value, file.place(*path, word))
    return block
