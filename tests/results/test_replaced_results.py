"""The files of a calibration replace all files of the one before, however it was written."""

from __future__ import annotations

import json
from pathlib import Path

from quantizer.results.write import replace_results
from quantizer.storage.opened_files import MOVES_FILE, NEW_FILES_FOLDER

SHARDS = [f"weights-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "weights.safetensors.index.json"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shards_of_an_interrupted_replacement_are_replaced_too(tmp_path: Path) -> None:
    """The set before was complete when its writer was stopped, but its shards were not moved."""
    new_files = tmp_path / NEW_FILES_FOLDER
    new_files.mkdir()
    for name in (*SHARDS, INDEX):
        (new_files / name).write_bytes(b"old")
    moves = {"files": [*SHARDS, INDEX], "gone": []}
    (new_files / MOVES_FILE).write_text(json.dumps(moves))
    with replace_results(tmp_path) as folder:
        assert names(folder) == []
        assert names(tmp_path) == sorted([NEW_FILES_FOLDER, *SHARDS, INDEX])
        (folder / "weights.safetensors").write_bytes(b"new")
    assert names(tmp_path) == ["weights.safetensors"]
    assert (tmp_path / "weights.safetensors").read_bytes() == b"new"


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "weights-of-mine.safetensors").write_text("mine")
    for name in (*SHARDS, "report.html"):
        (tmp_path / name).write_bytes(b"old")
    with replace_results(tmp_path) as folder:
        (folder / "weights.safetensors").write_bytes(b"new")
    assert names(tmp_path) == [
        "notes.txt",
        "weights-of-mine.safetensors",
        "weights.safetensors",
    ]
