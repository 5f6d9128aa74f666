"""Names the layers of a plan whose rounded weights a target has no codes for."""

from collections.abc import Callable, Iterator, Mapping

from quantizer.config.wording import first_names
from quantizer.declarations import CheckedTarget
from quantizer.export.exporting import exporter_of, planned_refusals
from quantizer.export.targets import checked_target
from quantizer.graph.names import is_operator_name
from quantizer.plan.model import Plan

_PLAIN = "engines build poolers and classifiers behind the blocks of a model in float"
_COMPUTED = "the model computes the weight, and has no place for a rounded one"


def planned_values(checked: CheckedTarget, plan: Plan) -> tuple[str, ...]:
    """Return the layers whose rounded weights a target stores as floats."""
    exporter = exporter_of(checked.target, checked.choices)
    return exporter.value_layers(plan.graph, plan.specs)


def plan_remarks(checked: CheckedTarget, plan: Plan) -> Iterator[str]:
    """Yield what users of a target's files have to know, and a sentence on the layers whose
    rounded weights it stores as floats.
    """
    exporter = exporter_of(checked.target, checked.choices)
    yield from exporter.notes(plan.graph, plan.specs)
    layers = planned_values(checked, plan)
    if not layers:
        return
    names = first_names(layers)
    yield (
        f"{checked.target} stores the rounded weights of {names} as floats, "
        "which saves nothing: `exclude` keeps their accuracy"
    )


def layers_to_leave(name: str, choices: Mapping[str, str]) -> Callable[[Plan], dict[str, str]]:
    """Return a function that finds the layers of a plan to leave in float for a target.

    Its files have no place for their rounded weights, or store them as floats, or engines build
    these layers in float. The function returns the reasons by layer.
    """
    checked = checked_target(name, choices)
    as_values = f"{checked.target} stores the weight as floats, so rounding saves nothing"

    def to_leave(plan: Plan) -> dict[str, str]:
        """Return the layers of a plan to leave in float, with the reasons."""
        reasons: dict[str, str] = {}
        for refusal in planned_refusals(checked, plan):
            if refusal.role != "weights":
                continue
            node = plan.graph.by_name[refusal.layer]
            path = node.params.get("weight", "")
            if is_operator_name(path):
                reasons[refusal.layer] = _COMPUTED
        for layer in planned_values(checked, plan):
            reasons.setdefault(layer, as_values)
        exporter = exporter_of(checked.target, checked.choices)
        for layer in exporter.plain_layers(plan.graph):
            if (layer, "weights") in plan.specs:
                reasons.setdefault(layer, _PLAIN)
        return reasons

    return to_leave
