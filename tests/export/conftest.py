"""Other engines run files only in the tests that are about them."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def _no_other_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines take a second for each file; tests that are about them ask for
    `other_engines`.
    """
    if (
        "other_engines" in request.fixturenames
        or importlib.util.find_spec("onnxruntime") is None
    ):
        return
    from quantizer.export.onnx import openvino as onnx_openvino

    monkeypatch.setattr(onnx_openvino, "installed_openvino", lambda: None)


@pytest.fixture
def other_engines() -> None:
    """Engines that are installed run each file, as they do for users."""
