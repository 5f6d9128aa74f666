"""The real proof: 3.2 billion parameters in bfloat16, 6.4 GB in shards, are quantized in 4 GB
of memory.

`pytest -m large tests/calibration/test_large_models.py`: an hour and 15 GB of disk.
LARGE_LLAMA_LAYERS=1 makes a model of one layer instead of 28, which takes as much memory, in
minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = os.environ.get("LARGE_LLAMA_LAYERS", "28")
LIMIT = 4_000_000_000
INT4 = {
    "dtype": "int4",
    "qscheme": "per_group",
    "ch_axis": 1,
    "group_size": 64,
    "symmetric": True,
}
CONFIG = {"global_quant_config": {"weight": INT4}, "exclude": ["kind:embedding", "kind:head"]}
DATA = """
import torch

def data():
    return [{"input_ids": torch.arange(512)[None] * 61 % 32000}]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by another process, as large_llama.py reads the package's files."""
    folder = tmp_path_factory.mktemp("large")
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "large_llama.py"),
        str(folder / "llama"),
        LAYERS,
    ]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (folder / "data.py").write_text(DATA, encoding="utf-8")
    return folder / "llama"


@pytest.fixture
def control_group() -> Iterator[Path | None]:
    """With the limit on what is resident, where this user may make one; elsewhere the figure
    must do.
    """
    group = limited_group()
    yield group
    if group is not None:
        group.rmdir()


def limited_group() -> Path | None:
    """Of either version of control groups."""
    for name, limit in (
        ("memory/quantizer-large", "memory.limit_in_bytes"),
        ("quantizer-large", "memory.max"),
    ):
        group = Path("/sys/fs/cgroup", name)
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            (group / limit).write_text(str(LIMIT))
            return group
    return None


@pytest.mark.large
@pytest.mark.parametrize("algorithm", [None, "gptq"])
def test_a_model_larger_than_memory(
    model: Path, tmp_path: Path, control_group: Path | None, algorithm: str | None
) -> None:
    def join() -> None:
        if control_group is not None:
            (control_group / "cgroup.procs").write_text(str(os.getpid()))

    config = CONFIG | ({"algo_config": {"name": algorithm}} if algorithm else {})
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    arguments = [
        "--quant_mode",
        "calib",
        "--config_file",
        "config.json",
        "--model",
        str(model),
        "--quiet",
    ]
    data = ["--data", f"{model.parent / 'data.py'}:data"] if algorithm else ["--seq_len", "512"]
    done = subprocess.run(
        [sys.executable, "-m", "quantizer", *arguments, *data],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=join,
    )
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "quantize_result" / "run.json").read_text(encoding="utf-8"))
    print(
        f"{LAYERS} layers, {algorithm}: {run['peak_memory_bytes'] / 1e9:.2f} GB, "
        f"{run['seconds']:.0f} s"
    )
    assert run["peak_memory_bytes"] < LIMIT
