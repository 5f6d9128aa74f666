"""One calibration of the digits example for all tests that only read it, and one rendering of
equal reports.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.runs import calibrate


@pytest.fixture(scope="session", autouse=True)
def _shared_pages() -> Iterator[None]:
    """Tests that do not collect torch do not pay for it."""
    if "torch" not in sys.modules:
        yield
        return
    from support.shared_pages import SharedPages

    from quantizer.report.page import page

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(page, "page", SharedPages(page.page))
        yield


@pytest.fixture(scope="session")
def calibrated_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    folder = tmp_path_factory.mktemp("calibrated") / "quantize_result"
    assert calibrate(folder) == 0
    return folder


@pytest.fixture
def calibrated(calibrated_once: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(calibrated_once, tmp_path / "quantize_result"))


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., str]:
    """Writes a model file from the bodies of its two functions."""

    def write(
        data: str = "return [torch.ones(4, 3)] * 4", model: str = "return torch.nn.Linear(3, 2)"
    ) -> str:
        path = tmp_path / "toy.py"
        functions = (
            f"def model():\n    torch.manual_seed(0)\n    {model}\n\ndef "
            f"calibration_data():\n    {data}\n"
        )
        path.write_text(f"import torch\n\n{functions}")
        return str(path)

    return write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a model file into the working directory, where results go, too."""
    monkeypatch.chdir(tmp_path)

    def written(text: str) -> str:
        Path("net.py").write_text(text)
        return "net.py"

    return written
