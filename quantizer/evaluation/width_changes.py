"""Turns chosen bit widths into specs, and checks that a changed config has exactly these."""

from collections.abc import Mapping
from typing import Any

from quantizer.config.diagnostics import ConfigError
from quantizer.config.document.document import Document
from quantizer.config.load import check_document
from quantizer.config.model import QuantizationSpec, Role
from quantizer.config.roles import base_role
from quantizer.errors import UsageError
from quantizer.evaluation.analyze import Analysis, WidthChoice
from quantizer.graph.ir import Graph
from quantizer.plan.model import Key, Plan
from quantizer.plan.resolve import resolve_plan

WidthChanges = Mapping[str, Mapping[Role, QuantizationSpec]]
"""For each layer with another width, the specs of its tensors."""


def chosen_specs(plan: Plan, analysis: Analysis, choice: WidthChoice) -> WidthChanges:
    """Return the specs of all tensors of each layer whose chosen width is not the config's."""
    changed: dict[str, dict[Role, QuantizationSpec]] = {}
    for row, index in zip(analysis.rows, choice, strict=True):
        width = analysis.widths[index]
        candidate = row.candidate
        specs = zip(candidate.layers, candidate.specs, strict=True)
        for name, spec in specs:
            resized = candidate.with_width(spec, width)
            if resized != spec:
                changed[name] = _specs_of_layer(plan, name)
                changed[name]["weights"] = resized
    return changed


def _specs_of_layer(plan: Plan, name: str) -> dict[Role, QuantizationSpec]:
    specs: dict[Role, QuantizationSpec] = {}
    for tensor in plan.tensors.values():
        if name in tensor.members:
            role = base_role(tensor.role)
            specs[role] = tensor.spec
    return specs


def unwanted_changes(before: Plan, after: Plan, changed: WidthChanges) -> list[str]:
    """Return the tensors, besides the weights of `changed`, whose spec differs in `after`."""
    differing = []
    for key in before.tensors.keys() | after.tensors.keys():
        name, role = key
        expected = _spec(before, key)
        if role == "weights" and name in changed:
            expected = changed[name]["weights"]
        if not _is_same(expected, _spec(after, key)):
            differing.append(f"{role} of {name}")
    return sorted(differing)


def _spec(plan: Plan, key: Key) -> QuantizationSpec | None:
    tensor = plan.tensors.get(key)
    return None if tensor is None else tensor.spec


def _is_same(expected: QuantizationSpec | None, actual: QuantizationSpec | None) -> bool:
    """Return whether two specs quantize alike."""
    if expected is None or actual is None:
        return expected is actual
    if not expected.is_scaled:
        # The other fields of a format without a scale have no meaning.
        return expected.dtype == actual.dtype
    return expected == actual


def require_exact(
    plan: Plan, original: Graph, changes: WidthChanges, config: dict[str, Any]
) -> None:
    """Check that a changed config gives each weight the chosen width and changes nothing else.

    Raises:
        ConfigError: it is not valid, for example because the device lacks a width.
        UsageError: its form cannot express the widths.
    """
    checked = check_document(Document.of(config, "the config with the chosen widths"))
    after = resolve_plan(checked.require(), plan.graph, original)
    if any(finding.severity == "error" for finding in after.diagnostics):
        raise ConfigError(after.diagnostics, checked.sources)
    wrong = unwanted_changes(plan, after, changes)
    if wrong:
        raise UsageError(
            f"the config cannot be changed in place: {wrong[0]} would not be as chosen",
            help="state the weights' dtype, scheme and axis in one place, global or overall",
        )
