"""The auto method: either end of a range where the error is least, over all batches at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantizer.config.model import AUTO_METHOD, POOLED, QuantizationSpec
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.qparams import QParams
from quantizer.observers import Observer

UINT8 = QuantizationSpec(signed=False, symmetric=False, method=AUTO_METHOD, statistic=POOLED)
OTHERS = (("maxmin", 100.0), ("percentile", 99.9), ("percentile", 99.0))


def observed(batches: list[Tensor], **words: Any) -> tuple[QuantizationSpec, QParams]:
    spec = replace(UINT8, **words)
    observer = Observer(spec)
    for batch in batches:
        observer.observe(batch)
    return spec, observer.qparams()


def error(batches: list[Tensor], values: Tensor | None = None, **words: Any) -> float:
    """The error of all values, or of others, under the range that is found, as the method
    weighs it.
    """
    spec, qparams = observed(batches, **words)
    values = torch.cat([batch.flatten() for batch in batches]) if values is None else values
    return float(
        (quantize_tensor(values, spec, qparams.scale, qparams.zero_point) - values)
        .abs()
        .pow(2.2)
        .sum()
    )


def drawn(seed: int, shape: str) -> list[Tensor]:
    """Three batches, one of them with values far away."""
    values = torch.randn(3, 2, 500, generator=torch.Generator().manual_seed(seed))
    values[2, 0, 0] *= 30
    shapes = {
        "two-sided": values,
        "one-sided": values.relu(),
        "gelu": torch.nn.functional.gelu(values),
        "far": values + 9,
    }
    return list(shapes[shape])


@pytest.mark.parametrize("bit_width", [4, 8])
@pytest.mark.parametrize("shape", ["two-sided", "one-sided", "gelu", "far"])
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_no_other_method_has_a_smaller_error(bit_width: int, shape: str, seed: int) -> None:
    """Where all values are known, as a weight's are; up to a few percent, for bins are wide
    beside most values if one is far away, and the ends are tried in steps.
    """
    whole = [torch.cat(drawn(seed, shape))]
    words: dict[str, Any] = {"bit_width": bit_width, "statistic": "max"}
    least = min(error(whole, method=name, percentage=share, **words) for name, share in OTHERS)
    assert error(whole, **words) <= 1.1 * least


@pytest.mark.parametrize("symmetric", [False, True])
def test_of_few_values_the_range_is_as_wide_as_others_need(symmetric: bool) -> None:
    """What a network gives for 200 samples: the values of 200 others go beyond the extremes,
    and cutting them off costs more than wider steps.
    """
    samples = torch.randn(100, 200, generator=torch.Generator().manual_seed(0)).unbind()
    words = {"symmetric": symmetric, "signed": symmetric}
    auto, maxmin = (
        sum(error([one], other, method=method, **words) for one, other in pairwise(samples))
        for method in (AUTO_METHOD, "maxmin")
    )
    assert auto < 0.5 * maxmin


def test_where_values_lie_close_at_the_ends_nothing_is_left_beyond() -> None:
    values = torch.rand(500, generator=torch.Generator().manual_seed(0)) - 0.5
    _, found = observed([values])
    assert 255 * float(found.scale) == pytest.approx(1, abs=0.05)


def test_it_cuts_one_end_alone() -> None:
    values = torch.cat([torch.linspace(-1, 1, 20_000), torch.tensor([4.0])])
    _, found = observed([values], bit_width=4)
    low, high = -found.zero_point * found.scale, (15 - found.zero_point) * found.scale
    assert low == pytest.approx(-1, abs=0.1)
    assert 1 <= high < 1.5


def test_a_symmetric_range_is_cut_alike() -> None:
    """Nearly as mse cuts it, which weighs errors by their square."""
    symmetric = {"signed": True, "symmetric": True, "bit_width": 4}
    auto, mse = (
        observed(drawn(0, "two-sided"), method=method, **symmetric)[1]
        for method in (AUTO_METHOD, "mse")
    )
    assert not auto.zero_point.any()
    assert mse.scale <= auto.scale <= 1.5 * mse.scale


@pytest.mark.parametrize(
    "words", [{}, {"method": "mse", "signed": True, "symmetric": True}], ids=["auto", "mse"]
)
def test_one_far_value_in_a_large_sample_is_not_overlooked(words: dict[str, Any]) -> None:
    """A transformer's first token may have one value a hundred times as large as all others,
    which attention needs.
    """
    values = torch.randn(4, 128, 384, generator=torch.Generator().manual_seed(0))
    # Costs 4 * 60^2 if it is cut off, and rounding the others costs less
    values[:, 0, 7] = 60.0
    _, found = observed([*values.split(1)], **words)
    assert found.scale * (255 if not words else 127) > 50
