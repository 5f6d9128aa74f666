"""Every algorithm on every kind of model: language models, encoders, experts, vision,
convolutions; no tables.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from support.extended import extended, extended_except
from support.rescaling import CASES, built, task_of
from torch import nn

from quantizer.calibration.run_algorithms import load_run
from quantizer.config.algorithms import ALGORITHMS
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.adjustment import Adjustment, Task

INT4 = QuantizationSpec(bit_width=4, qscheme="per_channel", ch_axis=0)
READS_DATA = [name for name, row in ALGORITHMS.items() if row.needs_data]
FOR_GROUPS = ("imatrix",)
"""Algorithms that search the scales of groups and leave other weights alone."""
ROUNDING = [
    name for name in READS_DATA if ALGORITHMS[name].stage == "round" and name not in FOR_GROUPS
]
USUAL = ("Llama", "GPT2", "experts", "mobile", "grouped", "outliers")
NOISE = ("outliers",)
"""Inputs without any correlation, where these algorithms promise nothing."""


@cache
def four_bits(model: str) -> Task:
    """Of the model's layers, once for all algorithms."""
    network, inputs = built(model)
    return task_of(network, inputs, INT4)


def run(name: str, task: Task) -> Adjustment:
    """With the algorithm's defaults."""
    return load_run(name)(task, ALGORITHMS[name](), Adjustment())


@pytest.mark.slow
@pytest.mark.parametrize("model", extended_except(CASES, *USUAL))
@pytest.mark.parametrize("name", ROUNDING)
def test_every_layer_is_rounded_and_none_is_worse_for_it(name: str, model: str) -> None:
    task = four_bits(model)
    found = run(name, task)
    assert set(found.rounded) == {layer for layer, _ in task.specs}
    for rounded in found.rounded.values():
        assert rounded.weight.isfinite().all()
        assert rounded.after <= rounded.before
    plain, left = (
        sum(getattr(each, when) for each in found.rounded.values())
        for when in ("before", "after")
    )
    assert left < 0.9 * plain or model in NOISE


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Llama", "experts", *extended("grouped")])
@pytest.mark.parametrize("name", READS_DATA)
def test_a_layer_runs_at_most_once_for_each_batch(name: str, model: str) -> None:
    """Errors come from sums of products of the inputs, not from running the model with each
    candidate. Short batches of token ids may run as one.
    """
    network, inputs = built(model)
    eases_activations = ALGORITHMS[name].eases_activations
    task = task_of(network, inputs, INT4, QuantizationSpec() if eases_activations else None)
    calls: Counter[nn.Module] = Counter()

    def called(module: nn.Module, *_: Any) -> None:
        calls[module] += 1

    hook = nn.modules.module.register_module_forward_hook(called)
    try:
        run(name, task)
    finally:
        hook.remove()
    assert len(calls) >= len(task.specs)
    short = model == "Llama" and not eases_activations and name not in FOR_GROUPS
    assert max(calls.values()) == (1 if short else len(inputs))
