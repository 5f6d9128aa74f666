"""The config as it took effect, in the words of its file form: every global switch written out, comments gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quantizer.config.model import Config, Settings


def resolved_document(config: Config) -> dict[str, Any]:
    """A document that means the same as `config` and leaves nothing to defaults.

    Blocks of quantization parameters are complete in a valid file, so only the switches need filling in.
    """
    switches = {f.name: getattr(config.settings, f.name) for f in fields(Settings) if f.name != "places"}
    return {**switches, **_without_comments(config.document)}


def _without_comments(value: Any) -> Any:
    """Without `$schema` and the keys that begin with `//`."""
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if key != "$schema" and not key.startswith("//")}
        return {key: _without_comments(item) for key, item in kept.items()}
    return [_without_comments(item) for item in value] if isinstance(value, (list, tuple)) else value
