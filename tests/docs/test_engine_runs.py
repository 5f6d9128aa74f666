"""What `make engines` writes down of an engine: figures, or the message with which it failed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.runs import ROOT

sys.path.append(str(ROOT / "benchmarks"))

from engines import environments, figures
from engines.results import EngineResults, Machine, Row
from engines.table import ENGINES, Environment

ENGINE = replace(ENGINES[0], consumer="in_test.py")
SCALED = """
import work_folder
(values,) = work_folder.inputs()
facts = {"version": "1.2", "integer": 3, "multiplications": 4}
facts |= work_folder.times(lambda: values + 1, lambda: values + 2)
work_folder.finish([values * FACTOR], facts)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work folder whose network gives its input, in a place for consumers of a test."""
    consumers = tmp_path / "consumers"
    consumers.mkdir()
    source = figures.CONSUMERS / "work_folder.py"
    (consumers / source.name).write_text(source.read_text("utf-8"))
    monkeypatch.setattr(figures, "CONSUMERS", consumers)
    values = np.linspace(-1, 1, 8, dtype=np.float32)
    np.savez(tmp_path / "inputs.npz", input_0=values)
    np.savez(tmp_path / "test_mode.npz", output_0=values)
    np.savez(tmp_path / "float.npz", output_0=values * np.float32(1.1))
    (tmp_path / "settings.json").write_text('{"rounds": 3}')
    (tmp_path / "kernels.json").write_text('{"integer": 1, "multiplications": 4}')
    (tmp_path / "model.onnx").write_bytes(b"file")
    return tmp_path


def row_of(folder: Path, program: str) -> Row:
    """Return the row of an engine that this program stands for."""
    (folder / "consumers" / ENGINE.consumer).write_text(program)
    return figures.figures_of("digits", "cpu_int8", ENGINE, folder, Path(sys.executable))


def test_a_row_has_the_distance_to_test_mode_and_to_float(folder: Path) -> None:
    row = row_of(folder, SCALED.replace("FACTOR", "1.01"))
    assert row.sqnr_db == pytest.approx(40, abs=0.1)
    assert row.float_db == pytest.approx(21.7, abs=0.1)
    assert (row.version, row.integer, row.multiplications, row.size) == ("1.2", 3, 4, 4)
    assert row.speed is not None and row.speed["rounds"] == 3


def test_an_engine_that_does_not_count_has_the_counts_of_the_exporter(folder: Path) -> None:
    program = SCALED.replace("FACTOR", "1").replace(', "integer": 3, "multiplications": 4', "")
    row = row_of(folder, program)
    assert (row.integer, row.multiplications) == (1, 4)


def test_equal_outputs_have_no_distance(folder: Path) -> None:
    row = row_of(folder, SCALED.replace("FACTOR", "1"))
    assert (row.sqnr_db, row.failure) == (None, "")
    assert row.line.startswith("equal, 3 of 4 in integers")


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import os; os.abort()", "it crashes with signal 6"),
        ("raise ValueError('no such operator\\n\\nCaused by: rust')", "no such operator"),
        ("raise SystemExit(1)", "it fails without a message"),
        (SCALED.replace("FACTOR", "float('nan')"), "output 0 has values that are not finite"),
        (
            SCALED.replace("values * FACTOR", "values[:2]"),
            "output 0 has the shape [2], and [8]",
        ),
        (SCALED.replace("[values * FACTOR]", "[]"), "it has 0 outputs, and test mode 1"),
    ],
)
def test_a_failure_is_a_row_with_the_message(program: str, failure: str, folder: Path) -> None:
    assert failure in row_of(folder, program).failure


def test_a_new_row_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    machine = Machine("any", 2, ("avx2",), is_quiet=True)
    for row in (Row("vit"), Row("digits", failure="no"), Row("vit", sqnr_db=40.0)):
        EngineResults.stored(ENGINE, tmp_path).with_row(row, machine).store(tmp_path)
    stored = EngineResults.stored(ENGINE, tmp_path)
    assert [(row.network, row.sqnr_db, row.failure) for row in stored.rows] == [
        ("digits", None, "no"),
        ("vit", 40.0, ""),
    ]


def test_an_engine_that_only_converts_has_a_row(folder: Path) -> None:
    program = "import work_folder\n"
    program += "work_folder.store_facts({'version': '9', 'kept': 3, 'weights': 4})"
    row = row_of(folder, program)
    assert (row.version, row.kept, row.weights, row.failure) == ("9", 3, 4, "")
    assert row.line == "converts, with codes and scales of 3 of 4 weights"


def test_a_failing_install_is_told_with_what_pip_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment with the packages of its row is used again, and another is not."""
    missing = str(tmp_path / "missing.whl")
    monkeypatch.setitem(environments.ENVIRONMENTS, "test", Environment((missing,)))
    engine = replace(ENGINE, environment="test")
    with pytest.raises(RuntimeError) as failed:
        environments.python_of(engine, tmp_path)
    assert "-m pip install" in str(failed.value)
    assert "missing.whl" in str(failed.value).partition("fails:")[2]
    place = tmp_path / ".venv-engine-test"
    (place / environments.STAMP).write_text(f"{missing}\n")
    assert environments.python_of(engine, tmp_path) == place / "bin" / "python"
