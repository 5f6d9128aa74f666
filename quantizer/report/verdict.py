"""Writes the verdict of a run in at most eight lines: PASS or FAIL, files, distance from float,
speed, layers that stay float, and the next step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quantizer.calibration.held_back import MIN_SAMPLES
from quantizer.config.json_types import JsonMapping
from quantizer.config.roles import base_role
from quantizer.graph.modules import Untraced
from quantizer.graph.names import path_names
from quantizer.plan.model import Key, Plan
from quantizer.plan.resolve import NO_RULES
from quantizer.plan.size import weight_bytes
from quantizer.report.next_step import next_step
from quantizer.report.rows import float_lines, judgement, measured_lines, warning_lines
from quantizer.report.tables import describe_spec
from quantizer.storage.process_memory import size_text

MAX_LINES = 8
_NOTHING = Untraced()
_BYTES = ("int8", "uint8")


class VerifiedFile(Protocol):
    """What a verdict takes from the verification of a file; see `Verification`."""

    @property
    def in_runtime(self) -> tuple[str, Mapping[str, str] | None]: ...
    @property
    def limits(self) -> tuple[str, ...]: ...
    @property
    def float_activations(self) -> tuple[Key, ...]: ...
    @property
    def activation_codes(self) -> str: ...
    @property
    def uint8_weights(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class VerdictFacts:
    """What a verdict is about.

    Attributes:
        model: the name of the model.
        formats: the number formats of weights and activations.
        path: of the written file; None if none was written.
        size: of the file, in bytes.
        float_size: of the float weights, in bytes.
        quantized_size: of the same weights with those that are quantized as codes with scales.
        tested: the content of report.json.
        runtime: a sentence on the speed and the kernels of the file; empty if unknown.
        left_float: the reasons why layers with weights stay in float, by layer.
        gates: a line for each gate, met or not.
        not_met: the gates that do not hold.
        is_failed: whether that is so, or there is an error.
        config: the path of the config.
        is_in_shell: whether a command has made it.
        notes: what users of the file have to know.
    """

    model: str
    formats: str
    path: str | None
    size: int
    float_size: int
    quantized_size: int
    tested: JsonMapping
    config: str
    is_in_shell: bool = False
    runtime: str = ""
    left_float: Mapping[str, str] = field(default_factory=dict)
    gates: Sequence[str] = ()
    not_met: Sequence[str] = ()
    is_failed: bool = False
    notes: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        plan: Plan,
        verified: VerifiedFile | None = None,
        *,
        untraced: Untraced = _NOTHING,
        remarks: Iterable[str] = (),
        **facts: Any,
    ) -> VerdictFacts:
        """Return the facts about a plan, with others given by name.

        Args:
            plan: of the calibration.
            verified: the verification of the file; None if none was written.
            untraced: what the file holds besides the layers of the plan.
            remarks: notes on the data.
            facts: the other attributes.
        """
        floating: Mapping[str, str] | None = None
        if verified is None:
            formats = _main_formats(plan, "", ())
        else:
            facts["runtime"], floating = verified.in_runtime
            facts["notes"] = (*verified.limits, *remarks)
            tensors = dict(plan.tensors)
            for key in verified.float_activations:
                tensors.pop(key, None)
            plan = replace(plan, tensors=tensors)
            formats = _main_formats(plan, verified.activation_codes, verified.uint8_weights)
        reasons = _left_float_of(plan) if floating is None else floating
        names = path_names(plan.graph)
        left_float: dict[str, str] = {}
        for product, reason in reasons.items():
            # Products inside an operator, and repeated ones, have a suffix
            layer = product.partition("#")[0]
            left_float[names.get(layer, layer)] = reason
        float_size, quantized_size = weight_bytes(plan)
        return cls(
            model=plan.graph.model,
            formats=formats,
            float_size=float_size + untraced.size,
            quantized_size=quantized_size + untraced.size,
            left_float={**left_float, **untraced.reasons},
            **facts,
        )


def _main_formats(plan: Plan, activation_codes: str, uint8_weights: Collection[str]) -> str:
    """Return the most frequent number formats: two of weights, and one of activations.

    Example: "int4 and int8 weights, uint8 activations". The format of keys and values is named
    if no other activations are quantized.
    """
    # Only sentences on files need it
    from quantizer.graph.structure.transformer_parts import cached_values

    counts: dict[str, Counter[str]] = {
        "weights": Counter(),
        "activations": Counter(),
        "keys and values": Counter(),
    }
    cached_keys = {(cached.layer, cached.role) for cached in cached_values(plan.graph)}
    for key, tensor in plan.tensors.items():
        kind = "weights" if base_role(key[1]) == "weights" else "activations"
        number_format = describe_spec(tensor.spec).partition(" ")[0]
        if key in cached_keys:
            kind = "keys and values"
        elif kind == "weights" and key[0] in uint8_weights:
            number_format = "uint8"
        elif kind == "activations" and number_format in _BYTES:
            number_format = activation_codes or number_format
        if base_role(key[1]) != "bias":
            counts[kind][number_format] += 1
    cache = counts.pop("keys and values")
    if counts["activations"]:
        counts["activations"] += cache
    elif cache:
        counts["keys and values"] = cache
    parts = []
    for kind, formats in counts.items():
        count = 2 if kind == "weights" else 1
        names = [name for name, _ in formats.most_common(count)] or ["float"]
        parts.append(f"{' and '.join(names)} {kind}")
    return ", ".join(parts)


def _left_float_of(plan: Plan) -> dict[str, str]:
    """Return the reasons why layers with weights stay in float."""
    reasons = {}
    for node in plan.graph.nodes:
        # Recurrent layers have several weights
        is_quantized = "weights" in map(base_role, plan.of_layer(node.name))
        is_layer = node.row.kind == "mac" or node.row.looks_up
        if is_layer and node.row.weight and not is_quantized:
            reasons[node.name] = plan.floats.get(node.name, NO_RULES)
    return reasons


def verdict(facts: VerdictFacts) -> list[str]:
    """Return at most eight lines of plain words about a run. The first says PASS or FAIL; in
    Python it is left out without gates, as the caller judges.
    """
    lines: list[str] = []
    is_failed = facts.is_failed or bool(facts.not_met) or facts.path is None
    if facts.gates or facts.is_in_shell or is_failed:
        lines.append(judgement(facts.gates, is_failed=is_failed))
    text = f"Nothing was written of {facts.model}."
    if facts.path is not None:
        text = (
            f"Wrote {facts.path}: {facts.formats}; {size_text(facts.size)}. Weights take "
            f"{size_text(facts.float_size)} in float"
        )
        # Some files store scales in fewer bits
        if facts.quantized_size < facts.size:
            text += f", {size_text(facts.quantized_size)} quantized"
        text += "."
    lines.append(text)
    if facts.notes:
        lines.append(f"Note: {'; '.join(facts.notes)}.")
    measured = [*measured_lines(facts.tested)]
    judged_on = facts.tested.get("judged_on") or {}
    is_on_all = str(judged_on.get("text")).startswith("on the calibration data")
    if measured and is_on_all and judged_on["samples"] < MIN_SAMPLES:
        why = f"fewer than {MIN_SAMPLES} samples hold nothing back"
        measured[0] = f"{measured[0][:-1]}: {why}."
    lines += [*measured, *warning_lines(facts.tested)]
    if facts.runtime:
        lines.append(f"{facts.runtime}.")
    # These come last, as the last lines are left out where there are too many
    lines += float_lines(facts.left_float)
    return [*lines[: MAX_LINES - 1], f"Next: {_next_step(facts)}"]


def _next_step(facts: VerdictFacts) -> str:
    if facts.path is None and not facts.not_met:
        return "the error below says why; run the command again when it is fixed."
    return next_step(facts.tested, facts.config, facts.not_met).line
