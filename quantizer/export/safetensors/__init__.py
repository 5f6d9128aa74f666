"""Writes and reads the .safetensors target. Imports no torch until `load` is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantizer.export.safetensors.exporter import load as load


def __getattr__(name: str) -> Any:
    """Return `load`, which needs torch."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quantizer.export.safetensors import exporter

    return exporter.load
