"""Test mode writes its report beside the results, to `--report_dir`, or nowhere if it may not
write.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import calibrate, check, page_without_place

from quantizer.results.result_set import locked

Toy = Callable[..., str]
Capture = pytest.CaptureFixture[str]
DATA = (
    "return [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(4)]"
)


@pytest.fixture
def net(toy: Toy) -> str:
    return toy(DATA)


@pytest.fixture
def folder(net: str, tmp_path: Path) -> Path:
    assert calibrate(tmp_path / "out", model=net, config=None) == 0
    return tmp_path / "out"


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def read_only(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the system refuse to make files in a folder; permissions do not stop an
    administrator.
    """
    plain = os.open

    def refusing(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(f"{folder}/"):
            raise OSError(number, os.strerror(number))
        return plain(path, flags, *args, **more)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_results_that_may_only_be_read_are_tested(
    number: int,
    net: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    writable = Path(shutil.copytree(folder, tmp_path / "writable"))
    capsys.readouterr()
    assert check(writable, model=net) == 0
    expected, before = (
        capsys.readouterr().out.replace(f"results: {writable}\n", ""),
        contents(folder),
    )
    read_only(folder, number, monkeypatch)
    assert check(folder, model=net) == 0
    told = capsys.readouterr()
    assert figures(told.out) == figures(expected)
    assert f"cannot use {folder} for results: {os.strerror(number)}" in told.err
    assert "no report is written; --report_dir DIR writes it elsewhere" in told.err
    assert contents(folder) == before
    assert check(folder, "--report_dir", str(tmp_path / "to"), model=net) == 0
    assert contents(folder) == before
    for name in ("report.json", "layers.csv"):
        assert (tmp_path / "to" / name).read_bytes() == (writable / name).read_bytes()
    page = page_without_place(writable / "report.html")
    assert page_without_place(tmp_path / "to" / "report.html") == page
    assert json.loads((tmp_path / "to" / "run.json").read_text())["outcome"] == "done"


def figures(printed: str) -> list[str]:
    return [
        line
        for line in printed.splitlines()
        if not line.startswith(("peak memory", "results:"))
    ]


def test_exports_of_results_that_may_only_be_read_need_a_place(
    net: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    before = contents(folder)
    read_only(folder, errno.EROFS, monkeypatch)
    assert check(folder, "--deploy", "safetensors", model=net) == 5
    assert "add --report_dir DIR: exports are written there too" in capsys.readouterr().err
    elsewhere = ["--report_dir", str(tmp_path / "to")]
    assert check(folder, "--deploy", "safetensors", *elsewhere, model=net) == 0
    assert {path.name for path in (tmp_path / "to" / "export").iterdir()} == {
        "Linear.safetensors",
        "verify.json",
    }
    assert contents(folder) == before


def test_a_gate_is_told_at_its_line_without_a_report(
    net: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    read_only(folder, errno.EROFS, monkeypatch)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert check(folder, "--gate", "sqnr_db>=200", model=net) == 1
    assert "loses most" in capsys.readouterr().err


def test_a_report_elsewhere_needs_no_lock(
    net: str, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    with locked(folder):
        before = contents(folder)
        assert check(folder, model=net) == 5
        assert "in use by another run" in capsys.readouterr().err
        assert check(folder, "--report_dir", str(tmp_path / "to"), model=net) == 0
        assert contents(folder) == before
    assert check(folder, "--report_dir", str(folder), model=net) == 0
    assert json.loads((folder / "report.json").read_text())["metrics"]


def test_a_report_is_not_written_among_other_results(
    net: str, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    before = contents(other)
    assert check(folder, "--report_dir", str(other), model=net) == 5
    assert f"{other} holds the results of a calibration" in capsys.readouterr().err
    assert contents(other) == before
    assert calibrate(folder, "--report_dir", str(tmp_path / "to"), model=net, config=None) == 2
    assert "--report_dir needs test mode" in capsys.readouterr().err
