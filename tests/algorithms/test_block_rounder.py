"""Columns rounded by replaying a recorded graph, as on a GPU, are those rounded one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantizer.algorithms.gptq import rows, sweeps
from quantizer.algorithms.gptq.rows import ColumnScales
from quantizer.numerics.fake_quantize import IntegerKernel

DEPTH, ROWS, GROUP = 300, 24, 60


@pytest.mark.parametrize("largest_zero_point", [0, 15])
@pytest.mark.parametrize("sweep_count", [0, 2])
def test_a_replay_repeats_the_operations(
    largest_zero_point: int, sweep_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = rounded(largest_zero_point, sweep_count)
    recordings = []

    def record(operations):  # type: ignore[no-untyped-def]
        recordings.append(operations)
        return operations

    monkeypatch.setattr(rows, "record_graph", record)
    for module in (rows, sweeps):
        monkeypatch.setattr(module, "is_worth_a_graph", lambda _: True)
    replayed = rounded(largest_zero_point, sweep_count)
    # One for all blocks of the rounding, and one for those of all sweeps
    assert len(recordings) == (2 if sweep_count else 1)
    for values, wanted in zip(replayed, one_by_one, strict=True):
        assert torch.equal(values, wanted)


def rounded(largest_zero_point: int, sweep_count: int) -> tuple[Tensor, Tensor]:
    """Round a weight whose groups have scales of their own, in blocks of 128 columns."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(DEPTH, ROWS, generator=generator)
    inputs = torch.randn(2 * DEPTH, DEPTH, generator=generator)
    gram = inputs.T @ inputs
    factor = rows.factorize(gram)
    assert factor is not None
    low = 0 if largest_zero_point else -8
    groups = (DEPTH // GROUP, ROWS)
    zero_point = torch.randint(0, largest_zero_point + 1, groups, generator=generator)
    columns = ColumnScales(
        IntegerKernel.of(low, low + 15, "half_even"),
        torch.rand(groups, generator=generator) * 0.1 + 0.1,
        zero_point.float(),
        torch.arange(DEPTH) // GROUP,
    )
    values, errors = rows.round_columns(weight, factor, columns, block_size=128)
    if sweep_count:
        damping = torch.ones(DEPTH)
        refinement = sweeps.Refinement(weight, values, gram, damping, columns)
        for _ in range(sweep_count):
            refinement.sweep(scales_too=not largest_zero_point)
        errors = refinement.errors()
    return values, errors
