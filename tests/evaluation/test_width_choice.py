"""Whether a changed config quantizes each tensor as chosen and nothing else otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.configs import config, document
from support.toys import traced

from quantizer.evaluation.width_choice import unwanted_changes
from quantizer.graph.passes import run_passes
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

LAYER = "Residual::Residual/Linear[fc]/linear"
KEY = (LAYER, "weights")


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., Plan]:
    """Plan a toy with these fields of its weights."""

    def plan(**weights: Any) -> Plan:
        parsed = config(tmp_path, document(tensor={"weights": weights}))
        original = traced("residual")
        return resolve_plan(parsed, run_passes(original, parsed.settings), original)

    return plan


def with_spec(plan: Plan, **fields: Any) -> Plan:
    """Return the plan with other fields in one layer's weights."""
    tensor = plan.tensors[KEY]
    changed = replace(tensor, spec=replace(tensor.spec, **fields))
    return replace(plan, tensors={**plan.tensors, KEY: changed})


def test_a_scale_of_another_kind_is_a_change(planned: Callable[..., Plan]) -> None:
    before = planned(bit_width=8)
    after = with_spec(before, bit_width=4)
    assert unwanted_changes(before, before, {}) == []
    assert unwanted_changes(before, after, {}) == [f"weights of {LAYER}"]
    chosen = {LAYER: {"weights": after.tensors[KEY].spec}}
    assert unwanted_changes(before, after, chosen) == []
    assert unwanted_changes(before, before, chosen) == [f"weights of {LAYER}"]


def test_what_describes_a_scale_means_nothing_in_a_format_without_one(
    planned: Callable[..., Plan],
) -> None:
    before = with_spec(planned(bit_width=8), dtype="float16")
    assert unwanted_changes(before, with_spec(before, bit_width=4), {}) == []
    other = with_spec(before, dtype="bfloat16")
    assert unwanted_changes(before, other, {}) == [f"weights of {LAYER}"]
