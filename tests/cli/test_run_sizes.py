"""`quantizer run --to w4 --max_mb`: 4 or 8 bits for each weight, within a size of the file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.extended import extended
from support.llamas import text_llama, text_mixture

from quantizer.cli.main import run_command

Q, K, V, GATE, UP = "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"
MODELS = {
    # 4 bits everywhere take 0.198 MB, and 8 bits 0.256 MB
    "my_llama": (text_llama, 0.25),
    # All experts have one width: 0.265 or 0.418 MB
    "my_mixture": (text_mixture, 0.34),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sized(model: str, *words: str) -> int:
    return run_command(["run", model, "-q", "-o", "out", *words])


@pytest.mark.parametrize("model", ["my_llama", *extended("my_mixture")])
def test_the_weights_take_at_most_so_many_bytes(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model, limit = MODELS[model]
    write_model(folder)
    size = ["--to", "w4", "--data", "book.txt", "--max_mb", str(limit)]
    assert sized(model, *size) == 0
    assert re.search("int[48] and int[48] weights, float", capsys.readouterr().out)
    [checkpoint] = (folder / "out" / "export").glob("*-compressed-tensors")
    written = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert 0.9 * limit * 1e6 < written <= limit * 1e6
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    groups = config["quantization_config"]["config_groups"].values()
    assert sorted(group["weights"]["num_bits"] for group in groups) == [4, 8]
    for group in groups:
        targets = " ".join(group["targets"])
        for fused in ((Q, K, V), (GATE, UP)):
            assert len({name in targets for name in fused}) == 1, "engines fuse them"
    # The same run again takes the config as it is
    assert sized(model, *size) == 0
    assert sized(model, *size[:-1], "0.22") == 2
    made_for = f"was made for --to w4 --max_mb {limit}, not for --to w4 --max_mb 0.22\n"
    assert made_for in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max_mb", "0.1"], r"too small: with 4 bits everywhere the file takes 0\.1\d+ MB"),
        (["--max_mb", "-1"], "is not a size"),
        (["--max_mb", "nan"], "is not a size"),
        (["--max_mb", "1e305"], "is not a size"),
        (["--max_mb", "0.2", "--to", "w8"], "--to w8 has one width"),
        (["--max_mb", "0.2", "--config_file", "c.json"], "this run has one already"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused_before_calibration(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_llama(folder)
    assert sized("my_llama", "--to", "w4", "--data", "book.txt", *words) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (folder / "out").exists()


def test_a_limit_that_8_bits_keep_gives_8_bits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_llama(folder)
    assert (
        run_command(["run", "my_llama", "--data", "book.txt", "--max_mb", "5", "-o", "out"])
        == 0
    )
    printed = capsys.readouterr()
    assert re.search(r"8 bits everywhere take 0\.2\d+ MB, within the limit", printed.err)
    [checkpoint] = (folder / "out" / "export").glob("*-compressed-tensors")
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    groups = config["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {8}


def test_a_size_needs_data_and_a_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_llama(folder)
    assert sized("my_llama", "--max_mb", "0.2") == 2
    assert "there is no data" in capsys.readouterr().err
    network = "import torch\n\ndef model():\n    return torch.nn.Linear(4, 4)\n"
    (folder / "net.py").write_text(network, "utf-8")
    sizes = ["--to", "w4", "--data", "random:2x4", "--max_mb", "0.2"]
    assert sized("net.py", *sizes) == 2
    assert "this model becomes safetensors" in capsys.readouterr().err
