"""What `test_devices` shows on a stand-in, on a GPU: the same as on the CPU, up to the order of
sums and ties.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configs import document
from support.device_runs import CPU, HIERARCHICAL, LAYERED, batches_of, layer_errors, run

CUDA = torch.device("cuda:0")
TOLERANCE = 1e-5
TIES = 1e-3  # of the codes, each by one step
LAYER_ERROR = 0.005

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _float32_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def near(config: Any, model: str, finetune: str | None = None) -> None:
    """Scales, corrections and float weights within TOLERANCE, codes equal but for ties."""
    ours, theirs = (
        run(model, torch.float32, device, config, finetune) for device in (CUDA, CPU)
    )
    assert ours.found.keys() == theirs.found.keys()
    for key, wanted in theirs.found.items():
        value = ours.found[key].cpu()
        if wanted.element_size() == 1:
            different = value.float() != wanted.float()
            assert different.count_nonzero() <= max(1, TIES * wanted.numel()), key
        elif wanted.is_floating_point():
            torch.testing.assert_close(value, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            steps = (value.long() - wanted.long()).abs()
            assert steps.max() <= 1, key
            assert steps.count_nonzero() <= max(1, TIES * steps.numel()), key


@pytest.mark.parametrize("name", LAYERED)
def test_observers_and_passes(name: str) -> None:
    near(LAYERED[name], "network")


SEARCHED_NOWHERE = ["dynamic", "smoothquant", "key_value_cache", "fp8_blocks", "nvfp4", "mxfp4"]


@pytest.mark.parametrize("name", SEARCHED_NOWHERE)
def test_scales_without_a_search(name: str) -> None:
    near(HIERARCHICAL[name], "language_model")


SEARCHES = ["gptq", "gptq with open groups", "gptaq", "qronos", "awq", "rotation"]


@pytest.mark.parametrize("name", SEARCHES)
def test_layers_are_as_good(name: str) -> None:
    """A search that is at a tie goes on elsewhere, so that errors are compared and not codes."""
    model = "wide_language_model"
    errors = {}
    for device in (CUDA, CPU):
        found = run(model, torch.float32, device, HIERARCHICAL[name])
        errors[device] = layer_errors(found.calibrated, batches_of(model))
    ours, theirs = errors[CUDA], errors[CPU]
    assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=LAYER_ERROR)
    for layer, error in theirs.items():
        assert ours[layer] == pytest.approx(error, rel=10 * LAYER_ERROR), layer


@pytest.mark.parametrize("mode", ["adaround", "adaquant"])
def test_fast_finetuning_is_as_good(mode: str) -> None:
    ours, theirs = (
        run("network", torch.float32, device, document(), mode) for device in (CUDA, CPU)
    )
    assert ours.scores.metrics["sqnr_db"] == pytest.approx(
        theirs.scores.metrics["sqnr_db"], abs=0.5
    )


def test_activations_beyond_the_budget_change_nothing() -> None:
    kept, spilled = (
        run("language_model", torch.float32, CUDA, HIERARCHICAL["gptq"], memory=m)
        for m in (None, 1)
    )
    assert all(torch.equal(value, spilled.found[key]) for key, value in kept.found.items())


@pytest.mark.parametrize("name", [*HIERARCHICAL])
def test_bfloat16_runs(name: str) -> None:
    found = run("language_model", torch.bfloat16, CUDA, HIERARCHICAL[name])
    assert all(
        value.float().isfinite().all()
        for value in found.found.values()
        if value.is_floating_point()
    )
