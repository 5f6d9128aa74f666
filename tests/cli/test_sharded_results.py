"""Parameters beyond the size of a file lie in several, which every command reads as it reads
one.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.configs import document
from support.runs import calibrate, check
from torch import Tensor, nn

from quantizer.cli.main import run_command

LIMIT = 300  # bytes; all have some more
MODEL = (
    "return torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.ReLU(), torch.nn.Linear(64, "
    "2))"
)
BATCHES = "return [torch.randn(4, 3)] * 4"
SHARDS = [f"weights-0000{number}-of-00002.safetensors" for number in (1, 2)]
INDEX = "weights.safetensors.index.json"


@pytest.fixture
def folders(
    toy: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path, Path]:
    """A model, its results in one file, and in shards."""
    model, config = toy(BATCHES, MODEL), tmp_path / "config.json"
    config.write_text(json.dumps(document()))
    assert calibrate(tmp_path / "whole", model=model, config=str(config)) == 0
    monkeypatch.setattr("quantizer.storage.files.MAX_SHARD_BYTES", LIMIT)
    assert calibrate(tmp_path / "sharded", model=model, config=str(config)) == 0
    return model, tmp_path / "whole", tmp_path / "sharded"


def stored(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("weights*"))


def network(folder: Path) -> nn.Module:
    """What the generated code makes of a folder."""
    spec = importlib.util.spec_from_file_location("generated", folder / "Sequential.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: nn.Module = module.Sequential()
    return found


def test_shards_hold_what_one_file_does(folders: tuple[str, Path, Path]) -> None:
    _, whole, sharded = folders
    assert stored(whole) == ["weights.safetensors"]
    assert stored(sharded) == [*SHARDS, INDEX]
    parts = [load_file(sharded / name) for name in SHARDS]
    assert all(sum(tensor.nbytes for tensor in part.values()) <= LIMIT for part in parts)
    found: dict[str, Tensor] = parts[0] | parts[1]
    one = load_file(whole / "weights.safetensors")
    assert found.keys() == one.keys() and len(found) == len(parts[0]) + len(parts[1])
    assert all(torch.equal(found[name], tensor) for name, tensor in one.items())
    index = json.loads((sharded / INDEX).read_text())
    names = {name: file for file, part in zip(SHARDS, parts, strict=True) for name in part}
    assert index == {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in one.values())},
        "weight_map": names,
    }
    header = json.loads((sharded / "quant_info.json").read_text())["header"]
    assert {*SHARDS, INDEX} <= header["files"].keys()


def test_all_commands_read_them(folders: tuple[str, Path, Path], tmp_path: Path) -> None:
    model, whole, sharded = folders
    assert [
        check(folder, "--deploy", "safetensors", model=model) for folder in (whole, sharded)
    ] == [0, 0]
    tables = [(folder / "layers.csv").read_bytes() for folder in (whole, sharded)]
    files = [
        (folder / "export" / "Sequential.safetensors").read_bytes()
        for folder in (whole, sharded)
    ]
    assert tables[0] == tables[1] and files[0] == files[1]
    x = torch.linspace(-2, 2, 12).reshape(4, 3)
    assert torch.equal(network(sharded)(x), network(whole)(x))
    assert run_command(["diff", str(whole), str(sharded)]) == 0


def test_a_retuned_folder_has_them_too(folders: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, whole, sharded = folders
    for folder in (whole, sharded):
        out = str(tmp_path / f"{folder.name}_mean")
        assert (
            run_command(["retune", str(folder), "--statistic", "mean", "--output_dir", out])
            == 0
        )
    assert stored(tmp_path / "whole_mean") == [*SHARDS, INDEX], (
        "what is written is sharded, whatever was read"
    )
    assert stored(tmp_path / "sharded_mean") == [*SHARDS, INDEX]
    names = [*SHARDS, INDEX, "quant_info.json"]
    one, other = (
        [(tmp_path / f"{kind}_mean" / name).read_bytes() for name in names]
        for kind in ("whole", "sharded")
    )
    assert one == other


def test_one_file_takes_their_place(
    folders: tuple[str, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole, sharded = folders
    monkeypatch.undo()
    (sharded / "weights-of-mine.safetensors").write_text("mine")
    assert calibrate(sharded, model=model, config=str(whole.with_name("config.json"))) == 0
    assert stored(sharded) == ["weights-of-mine.safetensors", "weights.safetensors"]
    assert (sharded / "weights.safetensors").read_bytes() == (
        whole / "weights.safetensors"
    ).read_bytes()


def test_a_missing_shard_is_told(
    folders: tuple[str, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model, _, sharded = folders
    (sharded / SHARDS[1]).unlink()
    assert check(sharded, model=model) == 5
    assert f"{sharded / SHARDS[1]} is missing" in capsys.readouterr().err
