"""`quantizer run` quantizes the weights of a model that cannot be traced, module by module."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended
from support.llamas import saved
from support.runs import calibrate
from torch import nn

from quantizer import ModelQuantizer
from quantizer.cli.main import run_command
from quantizer.results.result_set import mark_result_folder

MODEL = """import torch

class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x):
        hidden = self.up(x)
        if hidden.sum() > 0:
            hidden = hidden.relu()
        return {"logits": self.head(hidden)}

def model():
    torch.manual_seed(0)
    return Branching()

def calibration_data():
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 64, generator=generator) for _ in range(2)]
    return [(batch, torch.arange(8) % 4) for batch in inputs]
"""
FILE = Path("quantize_result/export/Branching-modules")
Write = Callable[[str], str]
Capture = pytest.CaptureFixture[str]


def built() -> tuple[nn.Module, list[Any]]:
    """The model in float and its data."""
    names: dict[str, Any] = {}
    exec(MODEL, names)
    return names["model"](), names["calibration_data"]()


def result_of_run() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path("quantize_result/run.json").read_text())
    return dict(facts["tested"])


@pytest.mark.parametrize(("to", "levels"), [("w8", 255), ("w4", 15)])
def test_what_is_saved_computes_what_was_tested(
    write: Write, capsys: Capture, to: str, levels: int
) -> None:
    assert run_command(["run", write(MODEL), "--to", to, "--gate", "top1>=0"]) == 0
    shown = capsys.readouterr()
    judged, wrote, *_ = shown.out.splitlines()
    assert judged.startswith("PASS: gate top1>=0: met (")
    assert wrote.startswith(f"Wrote {FILE}: int{to[1]} weights, float activations")
    notes = [line for line in shown.err.splitlines() if "cannot be traced" in line]
    assert len(notes) == 1
    assert "modules" in notes[0]
    assert "if hidden.sum() > 0" in notes[0]
    floating, data = built()
    loaded = ModelQuantizer.load(built()[0], FILE)
    # Each row of 32 or 64 weights has its own scale
    row = loaded.get_parameter("head.weight")[0]
    assert len(row.unique()) <= levels
    signal = 0.0
    error = 0.0
    correct = 0
    with torch.no_grad():
        for inputs, target in data:
            expected = floating(inputs)["logits"].double()
            logits = loaded(inputs)["logits"].double()
            signal += float(expected.square().sum())
            error += float((expected - logits).square().sum())
            correct += int((logits.argmax(1) == target).sum())
    metrics = result_of_run()["metrics"]
    sqnr_db = 10 * math.log10(signal / error)
    assert metrics["sqnr_db"] == pytest.approx(sqnr_db, abs=1e-3)
    assert metrics["top1"] == correct / 16
    assert result_of_run()["outputs"][0]["name"] == "logits"
    assert result_of_run()["gates"] == {"top1>=0": True}


def test_two_runs_give_the_same_bytes_and_an_evaluate_is_asked(write: Write) -> None:
    evaluate = "def evaluate(model, data):\n    return {'rows': sum(len(x) for x, _ in data)}\n"
    model = write(f"{MODEL}\n{evaluate}")
    assert run_command(["run", model, "-q", "--to", "w8"]) == 0
    files = {path.name: path.read_bytes() for path in FILE.iterdir()}
    assert set(files) == {".quantizer.json", "model.safetensors", "quantizer.json"}
    assert result_of_run()["pairs"] == {"rows": {"float": 16.0, "quantized": 16.0}}
    assert run_command(["run", model, "-q", "--to", "w8", "--gate", "rows==16"]) == 0
    assert {path.name: path.read_bytes() for path in FILE.iterdir()} == files
    assert run_command(["run", model, "-q", "--to", "w8", "--gate", "lines==16"]) == 2


def test_a_gate_about_an_output_that_is_not_there_is_refused(
    write: Write, capsys: Capture
) -> None:
    asked = ["--to", "w8", "--gate", "sqnr_db[scores]>=1"]
    assert run_command(["run", write(MODEL), *asked]) == 2
    assert "sqnr_db[logits]" in capsys.readouterr().err
    assert not FILE.exists()


def test_nothing_is_written_where_a_gate_does_not_hold(write: Write, capsys: Capture) -> None:
    asked = ["--to", "w4", "--gate", "sqnr_db[logits]>=90"]
    assert run_command(["run", write(MODEL), *asked]) == 1
    shown = capsys.readouterr()
    judged, wrote, *_ = shown.out.splitlines()
    assert judged.startswith("FAIL: gate sqnr_db[logits]>=90: not met (")
    assert wrote == "Nothing was written of Branching."
    assert "no better config is looked for" in shown.err
    assert "not met: sqnr_db[logits]>=90; nothing is deployed" in shown.err
    assert not FILE.exists()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["--to", "onnx"], "--to onnx needs a trace"),
        (["--to", "w8a8"], "the config quantizes the input of "),
        (["--to", "w4", "--preset", "gptq_int4_group"], "gptq works on a trace"),
        (["--to", "w8", "--preset", "cpu_int8"], "which needs a trace of the model"),
        (["--to", "w8", "--fast_finetune"], "--fast_finetune works on a trace"),
    ],
)
def test_what_needs_a_trace_is_refused_with_the_way_that_needs_none(
    write: Write, capsys: Capture, asked: list[str], reason: str
) -> None:
    assert run_command(["run", write(MODEL), *asked]) == 3
    error = capsys.readouterr().err
    assert "error: Branching cannot be traced: its control flow depends on" in error
    assert "--to w8` needs no trace" in error
    assert reason in error
    assert not Path("quantize_result").exists()


def test_calib_mode_names_the_way_that_needs_no_trace(write: Write, capsys: Capture) -> None:
    assert calibrate(Path("out"), model=write(MODEL), config=None) == 3
    assert (
        "`quantizer run MODEL --to w4` or `--to w8` needs no trace" in capsys.readouterr().err
    )


def test_a_folder_of_the_user_is_not_replaced(write: Write, capsys: Capture) -> None:
    mark_result_folder(FILE.parents[1])
    FILE.mkdir(parents=True)
    notes = FILE / "notes.txt"
    notes.write_text("mine")
    assert run_command(["run", write(MODEL), "-q", "--to", "w8"]) == 2
    assert "holds notes.txt and is not a folder of quantizer's" in capsys.readouterr().err
    assert [path.name for path in FILE.iterdir()] == ["notes.txt"]


def longformer(transformers: Any) -> Any:
    config = transformers.LongformerConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        attention_window=8,
        max_position_embeddings=64,
    )
    return transformers.LongformerForMaskedLM(config)


def switch(transformers: Any) -> Any:
    config = transformers.SwitchTransformersConfig(
        vocab_size=64,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "to", "suffix"),
    [
        (longformer, "w4", "compressed-tensors"),
        *extended(
            (longformer, "w8", "compressed-tensors"),
            (switch, "w8", "compressed-tensors"),
            # transformers' code reads weights of its layers, which are packed: it loads the
            # folder with dequantize=True, as a note says
            (switch, "w4", "compressed-tensors"),
        ),
    ],
)
def test_folders_that_cannot_be_traced_become_checkpoints(
    make: Callable[[Any], Any], to: str, suffix: str, write: Write
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    write("")
    torch.manual_seed(0)
    folder = saved(Path("float"), make(transformers))
    asked = ["--to", to, "--seq_len", "16", "-q"]
    assert run_command(["run", str(folder), *asked]) == 0
    (path,) = Path("quantize_result/export").iterdir()
    assert path.name.endswith(suffix)
    assert result_of_run()["metrics"]["sqnr_db"] > 10
    (export,) = result_of_run()["exports"]
    assert all(check["agrees"] for check in export["checks"])
