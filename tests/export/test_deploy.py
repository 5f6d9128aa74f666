"""`--deploy`: files, one line each, verify.json; usage errors before any work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.deployments import FILES, WIDEST_IN_INT8
from support.runs import calibrate
from support.runs import check as check_model

from quantizer.errors import UsageError, VerificationError
from quantizer.export.targets import EXPORTERS
from quantizer.installation import pip_line

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head((self.second(x).relu() + x).mean((2, 3)))


def model():
    torch.manual_seed(0)
    return Net()


def calibration_data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(32, 3, 8, 8, generator=generator) for _ in range(2)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("deploy")
    (parent / "net.py").write_text(MODEL)
    assert calibrate(parent / "out", model=str(parent / "net.py")) == 0
    return parent / "out"


@pytest.fixture(scope="module")
def check(folder: Path) -> Callable[..., int]:
    """Run test mode with the model of `folder`; return the exit code."""

    def run(results: Path, *more: str, model: str = str(folder.parent / "net.py")) -> int:
        return check_model(results, *more, model=model)

    return run


@pytest.fixture
def copy(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The results in another place, without what was exported."""
    copied = shutil.copytree(folder, tmp_path / "out", ignore=shutil.ignore_patterns("export"))
    capsys.readouterr()
    return Path(copied)


@pytest.mark.slow
def test_every_target_on_the_shell(
    folder: Path, capsys: pytest.CaptureFixture[str], check: Callable[..., int]
) -> None:
    for package in EXPORTERS["openvino"].needs:
        pytest.importorskip(package, reason="the OpenVINO target needs it (extra: openvino)")
    targets = FILES
    if WIDEST_IN_INT8 < 8:
        # The config has 8 bits, and OpenVINO adds up their products wrong on this processor
        targets = [target for target in FILES if target != "openvino"]
    capsys.readouterr()
    assert check(folder, *(word for target in targets for word in ("--deploy", target))) == 0
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("deployed: ")
    ]
    assert [line.split(",")[0].rpartition("/")[2] for line in lines] == [
        f"Net{EXPORTERS[target].suffix}" for target in targets
    ]
    found = json.loads((folder / "export" / "verify.json").read_text())
    assert set(found) == {f"Net{EXPORTERS[target].suffix}" for target in targets}
    assert found["Net.safetensors"]["max_difference"] == 0.0
    for name in ("Net.float.pt2", "Net.onnx"):
        # Codes that two correct convolutions may round apart
        assert found[name]["equal"] >= 0.995, name
    beside = ["Net.encodings.onnx", *(["Net.bin"] if "openvino" in targets else [])]
    assert sorted(path.name for path in (folder / "export").iterdir()) == sorted(
        [*found, *beside, "verify.json"]
    )


def test_json_lists_the_files(
    folder: Path, capsys: pytest.CaptureFixture[str], check: Callable[..., int]
) -> None:
    capsys.readouterr()
    assert check(folder, "--deploy", "safetensors", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["deployed"]) == {"Net.safetensors"}


def test_deploying_goes_with_test_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path / "out", "--deploy", "pt2") == 2
    assert "--deploy needs test mode" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_told_before_any_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., int],
) -> None:
    monkeypatch.setattr("quantizer.export.refusals.find_spec", lambda name: None)
    assert check(tmp_path / "none", "--deploy", "onnx", model="nothing.py") == 2
    assert pip_line("onnx") in capsys.readouterr().err


def test_an_unknown_target_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], check: Callable[..., int]
) -> None:
    assert check(tmp_path / "none", "--deploy", "tflite") == 2
    known = f"known are {', '.join(EXPORTERS)}"
    assert known in capsys.readouterr().err
    assert check(tmp_path / "none", "--deploy", "unheard-of") == 2
    remedy = "install the package whose plug-in adds unheard-of"
    assert f"{known}; {remedy}" in capsys.readouterr().err


def test_a_linked_folder_is_refused(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], check: Callable[..., int]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (copy / "export").symlink_to(tmp_path / "elsewhere")
    assert check(copy, "--deploy", "safetensors") == 2
    assert "is a link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())


def raising(error: Exception) -> Callable[..., None]:
    def export(*_: object) -> None:
        raise error

    return export


@pytest.mark.slow
def test_a_refused_target_does_not_keep_the_others_away(
    copy: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., int],
) -> None:
    refused = raising(UsageError("--to pt2 cannot express this"))
    monkeypatch.setattr("quantizer.export.torch_export.exporter.Pt2Exporter.verify", refused)
    assert check(copy, "--deploy", "pt2") == 2
    assert not (copy / "export").exists()
    assert check(copy, "--deploy", "pt2", "--deploy", "safetensors") == 2
    said = capsys.readouterr()
    assert "--to pt2 cannot express this" in said.err
    assert "sqnr_db" in said.out, "what was measured before is shown"
    assert "deployed: " in said.out
    assert set(json.loads((copy / "export" / "verify.json").read_text())) == {"Net.safetensors"}
    assert (copy / "export" / "Net.safetensors").exists()


@pytest.mark.parametrize(
    ("verify", "code", "sentence"),
    [
        (
            raising(RuntimeError("no such thing")),
            3,
            "a library that writes it fails at Net: RuntimeError: no such thing",
        ),
        (None, 70, "internal error: TypeError: 'NoneType' object is not callable"),
    ],
    ids=["of a library", "internal"],
)
def test_what_was_measured_is_shown_whatever_happens_then(
    verify: Callable[..., None] | None,
    code: int,
    sentence: str,
    copy: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., int],
) -> None:
    monkeypatch.setattr("quantizer.export.torch_export.exporter.Pt2Exporter.verify", verify)
    assert check(copy, "--deploy", "pt2", "--deploy", "safetensors") == code
    said = capsys.readouterr()
    assert sentence in said.err
    assert "sqnr_db" in said.out and "deployed: " in said.out


def test_a_failed_gate_deploys_nothing(
    copy: Path, capsys: pytest.CaptureFixture[str], check: Callable[..., int]
) -> None:
    capsys.readouterr()
    assert check(copy, "--deploy", "safetensors", "--gate", "sqnr_db>=99") == 1
    said = capsys.readouterr()
    assert "not met: sqnr_db>=99; nothing is deployed" in said.err
    assert "sqnr_db" in said.out
    assert not (copy / "export").exists()
    assert check(copy, "--deploy", "safetensors", "--gate", "onnx_int8_share==1") == 2
    assert "there is no metric 'onnx_int8_share'" in capsys.readouterr().err


def test_a_file_that_fails_its_verification_is_exit_1_and_leaves_none_of_an_earlier_run(
    copy: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[..., int],
) -> None:
    assert check(copy, "--deploy", "safetensors") == 0

    def refused(*_: object) -> None:
        raise VerificationError("Net.safetensors is not written: 8.80% are equal")

    monkeypatch.setattr(
        "quantizer.export.safetensors.exporter.SafetensorsExporter.verify", refused
    )
    capsys.readouterr()
    assert check(copy, "--deploy", "safetensors") == 1
    assert "Net.safetensors is not written: 8.80% are equal" in capsys.readouterr().err
    assert not list((copy / "export").glob("Net*"))
    assert json.loads((copy / "export" / "verify.json").read_text()) == {}
