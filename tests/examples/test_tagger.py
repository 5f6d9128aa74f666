"""The example of partial quantization, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import ROOT, calibrate, check

TAGGER = str(ROOT / "examples" / "tagger.py")
INT8 = str(ROOT / "configs" / "cpu_int8.json")


@pytest.mark.slow
def test_only_what_lies_between_the_stubs_is_quantized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(tmp_path, "--config_file", INT8, model=TAGGER, config=None) == 0
    info = json.loads((tmp_path / "quant_info.json").read_text("utf-8"))
    modules = {name.rpartition("/")[0].rpartition("/")[2] for name in info["tensors"]}
    assert modules == {"QuantStub[quant]", "Conv1d[conv]", "LSTM[lstm]", "Tagger::Tagger"}
    assert len(info["tensors"]["Tagger::Tagger/LSTM[lstm]/lstm"]) == 8
    capsys.readouterr()
    assert check(tmp_path, "--json", "--gate", "sqnr_db>=30", model=TAGGER) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["sqnr_db"] > 30
