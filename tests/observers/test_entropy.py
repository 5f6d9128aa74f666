"""The entropy method against the definition, written out loop by loop."""

import math

import pytest
import torch

from quantizer.config.model import QuantizationSpec
from quantizer.observers.methods import entropy
from quantizer.observers.observed_batch import ObservedBatch


def divergence(counts, clip, levels):
    """KL(P || Q) of one histogram and one clip."""
    inside, tail = counts[:clip], sum(counts[clip:])
    reference = [*inside[:-1], inside[-1] + tail]
    group = [place * levels // clip for place in range(clip)]
    sums, occupied = [0.0] * levels, [0] * levels
    for place, count in enumerate(inside):
        sums[group[place]] += count
        occupied[group[place]] += count > 0
    candidate = [
        sums[g] / occupied[g] if count else 0.0 for g, count in zip(group, inside, strict=True)
    ]
    p_total, q_total = sum(reference), sum(candidate)
    result = 0.0
    for p, q in zip(reference, candidate, strict=True):
        if p and not q:
            return math.inf
        if p:
            result += p / p_total * math.log(p / p_total * q_total / q)
    return result


DATA = {
    "gauss": lambda x: x,
    "heavy_tail": lambda x: x * x.abs().square(),
    "sparse": lambda x: (x[:300] * 4).round(),
    "relu": torch.relu,
    "outlier": lambda x: torch.cat([x, torch.tensor([30.0])]),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_clip_has_the_least_divergence_of_the_definition(data, bits):
    x = DATA[data](torch.randn(20_000, generator=torch.Generator().manual_seed(4))).unsqueeze(0)
    batch = ObservedBatch(x, x.amin(1).double(), x.amax(1).double())
    counts = batch.magnitudes[0].tolist()
    counts[0] = counts[1]
    clips = [*range(128, 1536, 32), *range(1536, 2049, 16)]
    scores = {clip: divergence(counts, clip, 2 ** (bits - 1)) for clip in clips}
    low, high = entropy(batch, QuantizationSpec(bit_width=bits))
    found = round(max(-low.item(), high.item()) / batch.amax.item() * 2048)
    assert scores[found] == pytest.approx(min(scores.values()), rel=1e-9)
