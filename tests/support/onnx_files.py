"""Fixtures that make .onnx files cheap where a test is about something else than how they are
made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest


@pytest.fixture
def quick_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep torch.onnx's table of translations, which takes half a second, start no other
    engines, which take a second for each file, and measure no speed.
    """
    packages = ("onnx", "onnxruntime", "onnxscript")
    if any(importlib.util.find_spec(package) is None for package in packages):
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from quantizer.export.onnx import exporter as onnx_exporter
    from quantizer.export.onnx import verify
    from quantizer.export.openvino_ir import exporter as openvino_exporter

    for module in (verify, openvino_exporter):
        monkeypatch.setattr(module, "_speed", lambda *measured: None)
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_table()))
    monkeypatch.setattr(onnx_exporter, "installed_openvino", lambda: None)


@cache
def _table() -> Callable[..., Any]:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return cache(ONNXRegistry.from_torchlib)
