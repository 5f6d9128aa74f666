"""Configs of the hierarchical form for tests, made without a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantizer.config.diagnostics import Sourced
from quantizer.config.model import ConfigRule, ResolvedConfig, Role, Selector, Settings

Fields = Mapping[Role, Mapping[str, Any]]


def block(selector: Selector, label: str, fields: Fields) -> ConfigRule:
    """One QuantizationConfig: the tensors it has a spec for, and what these set."""
    sourced = {
        role: {key: Sourced(value) for key, value in spec.items()}
        for role, spec in fields.items()
    }
    return ConfigRule(selector, label, fields=sourced, adds=frozenset(fields))


def hierarchy(
    everywhere: Fields,
    types: Mapping[str, Fields] | None = None,
    names: Mapping[str, Fields] | None = None,
    exclude: tuple[str, ...] = (),
) -> ResolvedConfig:
    """The config that a file with these blocks becomes."""
    rules = [
        ConfigRule(Selector("all"), "default", roles=frozenset()),
        block(Selector("weighted"), "global_quant_config", everywhere),
        *(
            block(Selector("type", key), f"layer_type_quant_config[{key}]", f)
            for key, f in (types or {}).items()
        ),
        *(
            block(Selector("name", key), f"layer_quant_config[{key}]", f)
            for key, f in (names or {}).items()
        ),
        *(
            ConfigRule(Selector("exclude", key), f"exclude[{i}]", roles=frozenset())
            for i, key in enumerate(exclude)
        ),
    ]
    return ResolvedConfig(
        Settings(), tuple(rules), document={"global_quant_config": {}}, form="hierarchical"
    )
