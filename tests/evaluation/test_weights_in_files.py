"""Test mode of a model whose weights are in files reads and decodes each of them a few times,
whatever the number of batches.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llamas import llama, saved

from quantizer.cli.main import run_command
from quantizer.storage import safetensors_file

MOST_READS = 8
"""Checks and digests of the model, both networks on all batches, and the search for the tensor
that costs most, on one batch.
"""
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]
CONFIG = {
    "global_quant_config": {
        "weight": {
            "dtype": "int3",
            "qscheme": "per_group",
            "ch_axis": 1,
            "group_size": 32,
            "symmetric": True,
        }
    }
}
DATA = """
import torch

def few():
    return [{"input_ids": torch.arange(16).view(2, 8) * step % 64} for step in range(1, 3)]

def many():
    return [{"input_ids": torch.arange(16).view(2, 8) * step % 64} for step in range(1, 13)]
"""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """How often each tensor was read, by its file and its place there."""
    counts: Counter[tuple[int, int]] = Counter()
    read_tensor = safetensors_file.read_tensor

    def counted(file: int, start: int, *form: Any) -> torch.Tensor:
        counts[file, start] += 1
        return read_tensor(file, start, *form)

    monkeypatch.setattr(safetensors_file, "read_tensor", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_reads_do_not_grow_with_batches(
    device: str,
    reads: Counter[tuple[int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved(tmp_path / "model", llama(num_hidden_layers=2))
    (tmp_path / "data.py").write_text(DATA, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    command = ["--model", "model", "--device", device, "-q", "--quant_mode"]
    config = ["--config_file", "config.json", "--data", "data.py:few"]
    assert run_command([*command, "calib", *config]) == 0
    totals = []
    for data in ("few", "many"):
        reads.clear()
        assert run_command([*command, "test", "--data", f"data.py:{data}"]) == 0
        assert max(reads.values()) <= MOST_READS
        totals.append(reads.total())
    assert totals[0] == totals[1]
