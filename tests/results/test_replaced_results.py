"""The files of a calibration replace all files of the one before, and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.runs import calibrate, check

from quantizer.cli.main import run_command
from quantizer.errors import UsageError
from quantizer.nn.load import INFO_FILE
from quantizer.results.folder import CHECKSUMS_FILE
from quantizer.results.result_set import locked
from quantizer.results.write import replace_results
from quantizer.storage.files import write_bytes, write_json
from quantizer.storage.folder_list import LIST_FILE

SHARDS = [f"weights-0000{number}-of-00002.safetensors" for number in (1, 2)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LIST_FILE)


def test_shards_of_the_calibration_before_go(tmp_path: Path) -> None:
    for written in (SHARDS, ["weights.safetensors"]):
        with replace_results(tmp_path) as folder:
            digests = {}
            for name in (INFO_FILE, *written):
                digests[name] = write_bytes(folder / name, b"{}")
            write_json(folder / CHECKSUMS_FILE, {"files": digests})
        assert names(tmp_path) == sorted([CHECKSUMS_FILE, INFO_FILE, *written])


def test_files_of_others_stay(tmp_path: Path) -> None:
    with locked(tmp_path):
        write_bytes(tmp_path / "report.html", b"old")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "weights-of-mine.safetensors").write_text("mine")
    (tmp_path / SHARDS[0]).write_text("mine")
    with replace_results(tmp_path) as folder:
        (folder / "weights.safetensors").write_bytes(b"new")
    assert names(tmp_path) == [
        "notes.txt",
        SHARDS[0],
        "weights-of-mine.safetensors",
        "weights.safetensors",
    ]
    (tmp_path / "statistics.safetensors").write_text("mine")
    with (
        pytest.raises(
            UsageError, match=r"files that quantizer has not written: statistics\.safetensors"
        ),
        replace_results(tmp_path) as folder,
    ):
        (folder / "statistics.safetensors").write_bytes(b"new")
    assert (tmp_path / "statistics.safetensors").read_text() == "mine"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results as a version without lists has written them, and tested."""
    place = tmp_path_factory.mktemp("earlier")
    (place / "toy.py").write_text(
        "import torch\n"
        "def model():\n    torch.manual_seed(0)\n    return torch.nn.Linear(3, 2)\n"
        "def calibration_data():\n    return [torch.ones(4, 3)] * 4\n"
    )
    assert calibrate(place / "out", model=str(place / "toy.py"), config=None) == 0
    (place / "out" / LIST_FILE).unlink()
    (place / "out" / "checkpoint.pth").write_text("mine")
    return place


def test_results_of_earlier_versions_are_quantizers_as_far_as_they_list_them(
    earlier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a folder has no list, and its checksums name no report."""
    folder = Path(shutil.copytree(earlier / "out", tmp_path / "out"))
    model = str(earlier / "toy.py")
    assert check(folder, model=model) == 2
    said = "holds files that quantizer has not written: report.json, report.html, run.json, run.log"
    assert said in capsys.readouterr().err
    for name in ("report.json", "report.html", "run.json", "run.log"):
        (folder / name).unlink()
    assert check(folder, model=model) == 0
    assert calibrate(folder, model=model, config=None) == 0
    assert run_command(["report", str(folder)]) == 0
    assert (folder / "checkpoint.pth").read_text() == "mine"
    listed = json.loads((folder / LIST_FILE).read_text())["files"]
    assert set(names(folder)) - set(listed) == {"checkpoint.pth"}
