"""What every export target promises; a new row of EXPORTERS is tested without a new test."""

from __future__ import annotations

import importlib.util
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deployments import deployment
from toys import built

from quantizer.errors import UsageError
from quantizer.export import EXPORTERS, Exporter, export, require_extras
from quantizer.export.deployment import Deployment

TOYS = ["residual", "mobile", "transposed", "branches", "nested_inputs", "several_outputs", "tied", "static_batch"]
REPRODUCIBLE = ["onnx", "safetensors"]  # torch writes a .pt2 as a zip file of its own


def needing(target: str) -> None:
    for package in EXPORTERS[target].needs:
        pytest.importorskip(package, reason=f"--deploy {target} needs it (extra: {EXPORTERS[target].extra})")


def contents(path: Path) -> bytes:
    """All bytes a reader can get out of a file."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return b"".join(name.encode() + archive.read(name) for name in archive.namelist())


@pytest.mark.parametrize("target", EXPORTERS)
@pytest.mark.parametrize("name", TOYS)
def test_a_file_read_back_equals_test_mode(target: str, name: str, tmp_path: Path) -> None:
    needing(target)
    batch = 2 if name == "static_batch" else 3
    found = export(target, deployment(name, batch), tmp_path / "net")
    assert (tmp_path / "net").stat().st_size
    assert (found.max_difference, found.mean_difference, found.equal) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("target", EXPORTERS)
def test_a_file_holds_no_place_no_source_and_no_data(target: str, tmp_path: Path) -> None:
    needing(target)
    given = deployment("residual")
    export(target, given, tmp_path / "net")
    written = contents(tmp_path / "net")
    sample = given.args[0][0].flatten()[:8].view(torch.uint8)
    for unwanted in (str(Path.cwd()), str(tmp_path), "toys.py", "self.conv1", "site-packages"):
        assert unwanted.encode() not in written
    assert bytes(sample.tolist()) not in written


@pytest.mark.parametrize("target", REPRODUCIBLE)
def test_two_files_of_one_network_are_equal(target: str, tmp_path: Path) -> None:
    needing(target)
    for batch in (1, 4):
        export(target, called_with(batch), tmp_path / str(batch))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "4").read_bytes()


def called_with(batch: int) -> Deployment:
    """One calibration, verified with another call."""
    args, kwargs = built("mobile").call(batch)
    return replace(deployment("mobile"), args=args, kwargs=kwargs)


@pytest.mark.parametrize("target", EXPORTERS)
def test_every_row_says_what_it_needs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantizer.export.find_spec", lambda name: None)
    if not EXPORTERS[target].needs:
        require_extras([target])
        return
    with pytest.raises(UsageError, match=EXPORTERS[target].needs[0]) as refused:
        require_extras([target])
    assert refused.value.help == f"pip install 'quantizer-torch[{EXPORTERS[target].extra}]'"


def test_suffixes_are_distinct_and_modules_exist() -> None:
    rows: list[Exporter] = list(EXPORTERS.values())
    assert len({row.suffix for row in rows}) == len(rows)
    assert all(importlib.util.find_spec(row.function.partition(":")[0]) for row in rows)
