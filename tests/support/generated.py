"""Imports what calibration writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from torch import nn


def imported(path: Path) -> nn.Module:
    """An instance of the class in a generated file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    generated: nn.Module = getattr(module, path.stem)()
    return generated
