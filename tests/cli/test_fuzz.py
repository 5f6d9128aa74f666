"""A short run of the fuzzers: `make fuzz` and `make soak` run them for longer, with other
seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fuzz import checkpoints, configs, results, saved, soak
from support.extended import extended

from quantizer.results import checkpoint

pytestmark = pytest.mark.real


def test_edited_configs_are_planned_or_refused_with_a_sentence(tmp_path: Path) -> None:
    model = configs.prepared(tmp_path)
    ends = set()
    for seed in range(60):
        done, code, said, command = configs.one(seed, model)
        assert code in configs.ALLOWED, f"seed {seed}: {command}: {done}: {said}"
        ends.add(code)
    assert ends == {*configs.ALLOWED}


def test_edited_results_are_used_or_refused_with_a_sentence(tmp_path: Path) -> None:
    folders = results.prepared(tmp_path)
    for seed in range(100):
        done, code, said, command = results.one(seed, folders, tmp_path)
        assert code in results.ALLOWED, f"seed {seed}: {command}: {done}: {said}"


def test_edited_saved_models_load_and_run_or_are_refused(tmp_path: Path) -> None:
    folders = saved.prepared(tmp_path)
    ends = [saved.one(seed, folders, tmp_path) for seed in range(250)]
    assert not [each for each in ends if each[1] == "broken"]
    assert {end for _, end, _ in ends} == {"ok", "refused"}


def test_edited_checkpoints_are_gone_on_with_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SAVE_INTERVAL_S", 0.0)
    runs = checkpoints.prepared(tmp_path, step=17)
    for seed in range(25):
        done, code, said, is_right = checkpoints.one(seed, runs, tmp_path)
        assert code in (0, 5) and is_right, f"seed {seed}: exit {code}: {done}: {said}"


@pytest.mark.parametrize("seeds", [range(3), *extended(range(3, 6))], ids=str)
def test_random_networks_agree_with_themselves(
    seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SAVE_INTERVAL_S", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as forks have
    try:
        ends = {seed: soak.one(seed, tmp_path / "seed") for seed in seeds}
    finally:
        torch.set_num_threads(threads)
    assert not {seed: found for seed, (_, found) in ends.items() if found}
    assert sum(end == "ok" for end, _ in ends.values()) == len(seeds)
