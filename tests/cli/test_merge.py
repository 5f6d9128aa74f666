"""`quantizer merge`: calibrations on parts of the data, as one on all of them; what cannot be
merged is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.extended import extended
from support.runs import differing
from test_ranks import MODEL, calib, config_file

from quantizer.cli.main import run_command

PARTS = """

def first():
    return calibration_data()[:3]

def rest():
    return calibration_data()[3:]
"""
Capture = pytest.CaptureFixture[str]
REPORT = {"report.html", "report.json"}


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL + PARTS)
    return str(tmp_path / "net.py")


def parts(net: str, config: str, tmp_path: Path) -> list[str]:
    """Two folders, calibrated on a part of the data each, and `whole`, calibrated on all."""
    for name, data in {"a": "first", "b": "rest", "whole": "calibration_data"}.items():
        assert (
            run_command([*calib(net, config, tmp_path / name, "-q"), "--data", f"{net}:{data}"])
            == 0
        )
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def header(folder: Path) -> dict[str, Any]:
    """That of quant_info.json, without what says which data there were."""
    found: dict[str, Any] = json.loads((folder / "quant_info.json").read_text())["header"]
    found["data"].pop("digest")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["percentile", "dpu", *extended("hierarchical")])
def test_it_is_one_run_over_all_batches(
    kind: str, net: str, tmp_path: Path, capsys: Capture
) -> None:
    folders = parts(net, config_file(tmp_path, kind), tmp_path)
    capsys.readouterr()
    merge = ["merge", "--model", net, "-q", "-o"]
    assert run_command([*merge, str(tmp_path / "c"), *folders]) == 0
    assert "calibrated on 7 batches" in capsys.readouterr().out
    assert (
        differing(tmp_path / "whole", tmp_path / "c")
        == {"quant_info.json", "checksums.json"} | REPORT
    )
    assert header(tmp_path / "whole") == header(tmp_path / "c")
    whole, merged = (
        json.loads((tmp_path / name / "quant_info.json").read_text()) for name in ("whole", "c")
    )
    assert whole["tensors"] == merged["tensors"]
    assert merged["header"]["data"]["digest"] != whole["header"]["data"]["digest"]
    test = ["--quant_mode", "test", "--model", net, "--output_dir", str(tmp_path / "c"), "-q"]
    assert run_command(test) == 0
    assert run_command([*merge, str(tmp_path / "more"), str(tmp_path / "c"), *folders[:1]]) == 0
    assert header(tmp_path / "more")["data"]["batches"] == 10


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "bias correction",
            "bias correction needs the outputs of the quantized network, whose scales change",
        ),
        ("gptq", "gptq needs the values that layers read, and statistics do not hold them"),
        ("weights", "it was quantized without data, so there is nothing to merge"),
    ],
)
def test_what_statistics_do_not_say_is_refused(
    kind: str, said: str, net: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = str(tmp_path / "a")
    assert run_command(calib(net, config_file(tmp_path, kind), tmp_path / "a", "-q")) == 0
    assert run_command(["merge", folder, folder, "-o", str(tmp_path / "c")]) == 5
    assert f"error: {folder} cannot be merged: {said}" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_calibrations_of_other_models_or_configs_are_refused(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert run_command(calib(net, config_file(tmp_path, "maxmin"), one, "-q")) == 0
    assert run_command(calib(net, config_file(tmp_path, "mse"), other, "-q")) == 0
    assert run_command(["merge", str(one), str(other)]) == 5
    assert (
        f"{other} cannot be merged with {one}: their configs quantize differently"
        in capsys.readouterr().err
    )
    Path(net).write_text(Path(net).read_text().replace("manual_seed(0)", "manual_seed(5)"))
    assert run_command(calib(net, config_file(tmp_path, "maxmin"), other, "-q")) == 0
    assert run_command(["merge", str(one), str(other)]) == 5
    assert f"{other} cannot be merged with {one}: the weight " in capsys.readouterr().err
    assert (
        run_command(["merge", str(one), str(one), "--model", net, "-o", str(tmp_path / "c")])
        == 5
    )
    assert "the weights are not those that were calibrated" in capsys.readouterr().err
    assert run_command(["merge", str(one)]) == 2


def test_no_code_runs_because_a_folder_names_it(
    net: str, tmp_path: Path, capsys: Capture
) -> None:
    folder, ran = tmp_path / "one", tmp_path / "ran"
    assert run_command(calib(net, config_file(tmp_path, "maxmin"), folder, "-q")) == 0
    Path(net).write_text(f"{Path(net).read_text()}\nopen({str(ran)!r}, 'w')\n")
    capsys.readouterr()
    assert run_command(["merge", str(folder), str(folder), "-o", str(tmp_path / "c")]) == 2
    assert "Missing option '--model'" in capsys.readouterr().err
    assert not ran.exists()
    assert not (tmp_path / "c").exists()
