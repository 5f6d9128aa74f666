"""Positions that `attention_mask` excludes count in no figure of an output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.llamas import llama, tokens
from torch import Tensor

import quantizer
from quantizer.api.calibrate import CalibrationSettings, open_batches
from quantizer.calibration.events import NO_FOLLOWER
from quantizer.commands.searching.module_run import ModulePair

CONFIG = {"global_quant_config": {"weight": {"dtype": "int4", "qscheme": "per_tensor"}}}


def sequences(lengths: tuple[int, ...], size: int) -> dict[str, Tensor]:
    """Sequences of these lengths, with padding up to `size` on the right."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.zeros(len(lengths), size, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, 64, (length,), generator=generator)
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def result() -> quantizer.Result:
    batch = tokens()[0]
    mask = torch.ones_like(batch["input_ids"])
    return quantizer.calibrate(llama(), CONFIG, [{**batch, "attention_mask": mask}])


def figures(result: quantizer.Result, *batches: dict[str, Tensor]) -> dict[str, Any]:
    comparison = result.test(list(batches))
    return {"metrics": comparison.metrics, "outputs": comparison.to_json()["outputs"]}


def test_padding_does_not_change_the_figures_of_outputs(result: quantizer.Result) -> None:
    padded = figures(result, sequences((8, 5), 8))
    long, short = sequences((8, 5), 8), sequences((8, 5), 8)
    alone = figures(
        result,
        {name: value[:1] for name, value in long.items()},
        {name: value[1:, :5] for name, value in short.items()},
    )
    assert padded["metrics"]["sqnr_db"] == pytest.approx(alone["metrics"]["sqnr_db"], 1e-5)
    [output], [output_alone] = padded["outputs"], alone["outputs"]
    assert output.keys() == output_alone.keys()
    for name, value in output.items():
        if isinstance(value, float):
            assert value == pytest.approx(output_alone[name], 1e-4), name


def test_ids_at_excluded_positions_change_no_figure(result: quantizer.Result) -> None:
    batch = sequences((8, 5), 8)
    other = dict(batch, input_ids=batch["input_ids"].clone())
    other["input_ids"][1, 5:] = 9
    assert figures(result, batch) == figures(result, other)


def test_padding_counts_in_no_figure_of_modules() -> None:
    batch = sequences((8, 5), 8)
    other = dict(batch, input_ids=batch["input_ids"].clone())
    other["input_ids"][1, 5:] = 9
    reference, quantized = llama(), llama()
    with torch.no_grad():
        quantized.lm_head.weight.mul_(1.1)
    pair = ModulePair(reference, quantized, torch.device("cpu"))
    metrics: list[dict[str, float]] = []
    for data in (batch, other):
        batches = open_batches(reference, [data], CalibrationSettings())
        scores = pair.scores(batches, NO_FOLLOWER, function=None, check=len)
        metrics.append(scores.metrics)
    assert metrics[0] == metrics[1]
