"""Configs drawn at random, in the other form: refused with a reason and a place, or valid and
planned alike.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support import drawn_configs
from support.toys import traced

from quantizer.commands.start.findings import ConvertedDocument
from quantizer.commands.start.start import convert_config
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.config.model import QuantizationSpec, ResolvedConfig
from quantizer.config.roles import base_role
from quantizer.config.rules.spec_rules import effective
from quantizer.graph.passes import run_passes
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan

drawn = settings(
    max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
# Uniform draws: hypothesis' own prefer what is rare, which one form lacks
SEEDS = st.integers(0, 2**32)


def planned(config: ResolvedConfig) -> Plan:
    graph = traced("residual")
    return resolve_plan(config, run_passes(graph, config.settings), graph)


def errors(findings: Any) -> list[Any]:
    return [found for found in findings if found.severity == "error"]


@pytest.mark.slow
@drawn
@given(SEEDS)
def test_the_layered_form_plans_the_same(seed: int) -> None:
    _compare(drawn_configs.hierarchical(random.Random(seed)), "layered")


@pytest.mark.slow
@drawn
@given(SEEDS)
def test_the_hierarchical_form_plans_the_same(seed: int) -> None:
    _compare(drawn_configs.layered(random.Random(seed)), "hierarchical")


def _compare(value: dict[str, Any], form: Any) -> None:
    config = check_document(Document.of(value, "Config")).config
    assume(config is not None)
    assert config is not None
    other, ours = convert_config(config, form), planned(config)
    assume(not errors(ours.diagnostics))
    if refused := errors(other.findings):
        assert all(found.code == "QZ124" and found.place for found in refused)
        assert len({found.message for found in refused}) == len(refused)
        return
    result = check_document(Document.of(other.document, "Converted"))
    assert errors(result.diagnostics) == []
    theirs = planned(result.require())
    assert errors(theirs.diagnostics) == []
    assert decided(theirs, other) == decided(ours, other)
    assert theirs.graph.changes == ours.graph.changes


def decided(plan: Plan, other: ConvertedDocument) -> dict[Any, QuantizationSpec]:
    """The specs that have to be the same: without what a warning is about, and without inputs,
    which depend on that.
    """
    warnings = " ".join(found.message for found in other.findings)
    specs = {
        key: replace(effective(tensor.spec), statistic="max")
        for key, tensor in plan.tensors.items()
    }
    kept = {"weights", "bias", "activation", "input"}
    if "may inherit" in warnings:
        kept -= {"activation", "input"}
    weighted = {node.name for node in plan.graph.nodes if node.params}
    if "is about layers with weights" in warnings:
        kept -= {"input"}
        specs = {
            key: spec
            for key, spec in specs.items()
            if weighted.intersection(plan.tensors[key].members)
        }
    return {key: spec for key, spec in specs.items() if base_role(key[1]) in kept}
