"""torch.onnx makes its table of translations anew for each file, in half a second; here it is
made once a version.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_translations() -> Iterator[None]:
    if importlib.util.find_spec("onnxscript") is None:
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib))
        )
        yield


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
