"""The drawings of a report as files, in a notebook, and for TensorBoard."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from support.configs import document
from support.reports import Net

import quantizer
from quantizer.api.comparison import Report
from quantizer.api.result import Result
from quantizer.cli.main import run_command
from quantizer.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def result() -> Result:
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    return quantizer.calibrate(Net().eval(), document(), data)


@pytest.fixture(scope="module")
def report(result: Result) -> Report:
    return result.report(tested=result.test())


def test_each_drawing_is_a_file_of_its_own(report: Report, tmp_path: Path) -> None:
    written = report.save_plots(tmp_path)
    assert len({path.name for path in written}) == len(written) == len(list(tmp_path.iterdir()))
    kinds = [path.name.partition("_")[0] for path in written]
    activations = sum("histogram" in row for row in report.values["layers"])
    assert kinds.count("values") == activations > 2
    assert kinds.count("limits") == activations
    assert "sqnr_by_depth.svg" in {path.name for path in written}
    for path in written:
        root = ElementTree.parse(path).getroot()
        assert root.tag == f"{SVG}svg" and float(root.attrib["width"]) > 100
        text = path.read_text(encoding="utf-8")
        assert "var(" not in text and text.count("http") == 1, (
            "its colours are in it, and it loads nothing"
        )


def test_the_page_has_the_same_drawings(report: Report, tmp_path: Path) -> None:
    bodies = {
        path.read_text(encoding="utf-8").partition("/>")[2].strip()
        for path in report.save_plots(tmp_path)
    }
    assert all(body and body in report.html for body in bodies)


def test_a_notebook_shows_the_page_in_a_frame(report: Report) -> None:
    shown = report._repr_html_()
    assert shown.startswith("<iframe ")
    assert "<script" not in shown, "a page in an attribute is text"
    assert "&lt;h1&gt;Net&lt;/h1&gt;" in shown


def test_png_needs_an_extra_and_other_kinds_are_refused(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="PNG needs the extra plots")
    (first, *_) = report.save_plots(tmp_path, "png")
    content = first.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG") and width == 1440 and height > 100
    with pytest.raises(UsageError, match="'gif'"):
        report.save_plots(tmp_path, "gif")


def test_tensorboard_reads_the_figures(report: Report, tmp_path: Path) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard"
    )
    report.save_tensorboard(tmp_path)
    events = reader.EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("metric/sqnr_db")[0].value == pytest.approx(
        report.values["metrics"]["sqnr_db"]
    )
    depth = [row for row in report.values["layers"] if row["accumulated_sqnr_db"] is not None]
    assert len(events.Scalars("depth/accumulated_sqnr_db")) == len(depth)
    drawn = [row for row in report.values["layers"] if "histogram" in row]
    assert len(events.Tags()["histograms"]) == len(drawn)


def test_the_shell_writes_them_too(result: Result, tmp_path: Path) -> None:
    folder, plots = tmp_path / "out", tmp_path / "plots"
    result.save(folder)
    assert run_command(["report", str(folder), "--plots", str(plots)]) == 0
    assert any(path.suffix == ".svg" for path in plots.iterdir())
