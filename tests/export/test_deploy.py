"""`--deploy`: files, one line each, verify.json; usage errors before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deployments import FILES
from support.runs import calibrate, check

from quantizer.errors import UsageError, VerificationError
from quantizer.export import EXPORTERS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip(
        "sklearn", reason="the digits example reads scikit-learn's data (extra: examples)"
    )
    folder = tmp_path_factory.mktemp("deploy") / "out"
    assert calibrate(folder) == 0
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The results in another place, without what was exported."""
    copied = shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns("export"))
    capsys.readouterr()
    return Path(copied)


@pytest.mark.slow
def test_every_target_on_the_digits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in EXPORTERS["onnx"].needs:
        pytest.importorskip(package, reason="the ONNX target needs it (extra: onnx)")
    capsys.readouterr()
    assert check(folder, *(word for target in FILES for word in ("--deploy", target))) == 0
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("deployed: ")
    ]
    assert [line.split(",")[0].rpartition("/")[2] for line in lines] == [
        f"ResNet{EXPORTERS[target].suffix}" for target in FILES
    ]
    found = json.loads((folder / "export" / "verify.json").read_text())
    assert set(found) == {f"ResNet{EXPORTERS[target].suffix}" for target in FILES}
    assert found["ResNet.safetensors"]["max_difference"] == 0.0
    for name in ("ResNet.float.pt2", "ResNet.onnx"):
        # Codes that two correct convolutions may round apart
        assert found[name]["equal"] >= 0.995, name
    assert sorted(path.name for path in (folder / "export").iterdir()) == sorted(
        [*found, "verify.json"]
    )


def test_json_lists_the_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert check(folder, "--deploy", "safetensors", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["deployed"]) == {"ResNet.safetensors"}


def test_deploying_goes_with_test_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path / "out", "--deploy", "pt2") == 2
    assert "--deploy needs test mode" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_told_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.export.find_spec", lambda name: None)
    assert check(tmp_path / "none", "--deploy", "onnx", model="nothing.py") == 2
    assert "pip install 'quantizer-torch[onnx]'" in capsys.readouterr().err


def test_an_unknown_target_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path / "none", "--deploy", "tflite") == 2
    assert "'onnx', 'pt2', 'pt2_float', 'safetensors'" in capsys.readouterr().err


def test_a_linked_folder_is_refused(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (copy / "export").symlink_to(tmp_path / "elsewhere")
    assert check(copy, "--deploy", "safetensors") == 5
    assert "is a link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


def raising(error: Exception) -> Callable[..., None]:
    def export(*_: object) -> None:
        raise error

    return export


def test_a_refused_target_does_not_keep_the_others_away(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = raising(UsageError("--deploy pt2 cannot express this"))
    monkeypatch.setattr("quantizer.export.torch_export.pt2.Pt2Exporter.verify", refused)
    assert check(copy, "--deploy", "pt2") == 2
    assert not (copy / "export").exists()
    assert check(copy, "--deploy", "pt2", "--deploy", "safetensors") == 2
    said = capsys.readouterr()
    assert "--deploy pt2 cannot express this" in said.err
    assert "sqnr_db" in said.out, "what was measured before is shown"
    assert "deployed: " in said.out
    assert set(json.loads((copy / "export" / "verify.json").read_text())) == {
        "ResNet.safetensors"
    }
    assert (copy / "export" / "ResNet.safetensors").exists()


def test_what_was_measured_is_shown_whatever_happens_then(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quantizer.export.torch_export.pt2.Pt2Exporter.verify",
        raising(RuntimeError("no such thing")),
    )
    assert check(copy, "--deploy", "pt2", "--deploy", "safetensors") == 70
    said = capsys.readouterr()
    assert "internal error: RuntimeError: no such thing" in said.err
    assert "sqnr_db" in said.out and "deployed: " in said.out


def test_a_failed_gate_deploys_nothing(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert check(copy, "--deploy", "safetensors", "--gate", "sqnr_db>=99") == 1
    said = capsys.readouterr()
    assert "not met: sqnr_db>=99; nothing is deployed" in said.err
    assert "sqnr_db" in said.out
    assert not (copy / "export").exists()
    assert check(copy, "--deploy", "safetensors", "--gate", "onnx_int8_share==1") == 2
    assert "there is no metric 'onnx_int8_share'" in capsys.readouterr().err


def test_a_file_that_fails_its_verification_is_exit_1_and_leaves_none_of_an_earlier_run(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(copy, "--deploy", "safetensors") == 0

    def refused(*_: object) -> None:
        raise VerificationError("ResNet.safetensors is not written: 8.80% are equal")

    monkeypatch.setattr("quantizer.export.safetensors.SafetensorsExporter.verify", refused)
    capsys.readouterr()
    assert check(copy, "--deploy", "safetensors") == 1
    assert "ResNet.safetensors is not written: 8.80% are equal" in capsys.readouterr().err
    assert not list((copy / "export").glob("ResNet*"))
    assert json.loads((copy / "export" / "verify.json").read_text()) == {}
