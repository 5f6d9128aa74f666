"""Counts stay exact beyond 2^24, where a float32 that counts stands still."""

from __future__ import annotations

import pytest
import torch

from quantizer.config.model import QuantizationSpec
from quantizer.observers import Observer
from quantizer.observers.observed_batch import ObservedBatch
from quantizer.tables import RANGE_METHODS

MANY = 2**24 + 3
ONES = torch.ones(1).expand(1, MANY)


def test_a_bin_holds_more_values_than_float32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sample that large; the bounded one has fewer."""
    monkeypatch.setattr(ObservedBatch, "sample", lambda batch, _: batch.rows.contiguous())
    counts = ObservedBatch(ONES, torch.ones(1), torch.ones(1)).histogram
    assert counts.sum() == counts.max() == MANY


@pytest.mark.parametrize("method", RANGE_METHODS)
def test_a_constant_of_many_values_has_the_scale_of_few(method: str) -> None:
    """Whatever the method counts."""
    spec = QuantizationSpec(method=method, scale_type="poweroftwo")
    few, many = Observer(spec), Observer(spec)
    few.observe(torch.ones(1, 8))
    many.observe(ONES)
    assert torch.equal(few.qparams().scale, many.qparams().scale)
