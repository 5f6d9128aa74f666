"""`quantizer run --to w4 --max_mb`: 4 or 8 bits for each weight, within a size of the file."""

from __future__ import annotations

import json
import re
import shlex
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
        (["--max_mb", "0.1", "--to", "w8"], "the weights take 0.2\\d+ MB with the preset"),
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


CNN = """
import torch

def model():
    torch.manual_seed(0)
    convolution = torch.nn.Conv2d(3, 64, 3)
    return torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.Conv2d(64, 64, 3))

def calibration_data():
    return [torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))]
"""


@pytest.mark.parametrize("target", ["onnx", "pt2"])
def test_a_network_of_one_width_is_within_the_limit_or_refused(
    target: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if target == "onnx":
        pytest.importorskip("onnxruntime", reason="--to onnx needs it (extra: onnx)")
    (folder / "net.py").write_text(CNN, "utf-8")
    run = ["run", "net.py", "-o", "out", "--to", target]
    assert run_command([*run, "--max_mb", "1"]) == 0
    assert re.search(
        r"note: the weights take 0\.0\d+ MB with the preset", capsys.readouterr().err
    )
    [file] = (folder / "out" / "export").glob("Sequential.*")
    assert file.stat().st_size <= 1e6
    again = [*run, "--overwrite", "--max_mb"]
    assert run_command([*again, "0.01"]) == 2
    assert "--max_mb 0.01 is too small: the weights take 0.0" in capsys.readouterr().err
    # A file has more than its weights
    size = f"{(file.stat().st_size - 1) / 1e6:.6f}"
    assert run_command([*again, size]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"FAIL: gate file_mb<={float(size):g}: not met (")
    assert f"error: not met: file_mb<={float(size):g}\nhelp: choose a smaller" in printed.err
    # A config of the user is not changed, and its file is checked
    config = ["--config_file", "out/quantize_config.json", "--max_mb", "1"]
    assert run_command([*run, *config]) == 0
    shown = capsys.readouterr().out
    assert "gate file_mb<=1: met" in shown
    report = json.loads((folder / "out" / "report.json").read_text("utf-8"))
    assert report["gates"] == {"file_mb<=1": True}, "the page judges as the terminal does"
    # Test mode has no limit of size, and so the gate
    (test,) = re.findall(r"`(quantizer --quant_mode test [^`]*)`", shown)
    assert test.endswith("--gate 'file_mb<=1'")
    monkeypatch.chdir(folder)
    assert run_command(shlex.split(test)[1:]) == 0


def test_a_gguf_has_the_widest_blocks_within_the_limit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="--to gguf needs it (extra: llm)")
    text_llama(folder, inputs=256)
    gguf = ["run", "my_llama", "-o", "out", "--to", "gguf", "--data", "book.txt"]
    gguf += ["--overwrite", "--max_mb"]
    written = {}
    for limit in ("0.7", "0.6"):
        assert run_command([*gguf, limit]) == 0
        [preset] = re.findall(r"MB with the preset (\w+)", capsys.readouterr().err)
        [file] = (folder / "out" / "export").glob("*.gguf")
        assert file.stat().st_size <= float(limit) * 1e6
        written[preset] = file.stat().st_size
    assert list(written) == ["gguf_q8_0", "gguf_q6_k"]
    # The size has the keys: a byte less gives the next preset
    largest = written["gguf_q8_0"]
    for size, preset in ((largest, "gguf_q8_0"), (largest - 1, "gguf_q6_k")):
        assert run_command([*gguf, f"{size / 1e6:.6f}"]) == 0
        assert f"MB with the preset {preset}\n" in capsys.readouterr().err
    assert run_command([*gguf, "0.3"]) == 2
    error = capsys.readouterr().err
    assert "--max_mb 0.3 is too small: the file takes 0.4" in error
    assert "MB with the preset gguf_q4_k_m" in error


def test_layers_that_share_a_weight_stay_in_float_together(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="--to gguf needs it (extra: llm)")
    text_llama(folder, tie_word_embeddings=True)
    run = ["run", "my_llama", "-q", "--to", "gguf", "-o"]
    assert run_command([*run, "one", "--keep_float", "lm_head"]) == 0
    assert run_command([*run, "two", "--keep_float", "kind:embedding"]) == 0
    for name, excluded in (
        ("one", ["lm_head", "model.embed_tokens"]),
        ("two", ["kind:embedding", "lm_head"]),
    ):
        config = json.loads(Path(name, "quantize_config.json").read_text())
        assert config["exclude"][-2:] == excluded
