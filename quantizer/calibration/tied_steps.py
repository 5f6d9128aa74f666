"""The largest step of the weights that share a scale, from what their observers have seen."""

from collections.abc import Mapping

from quantizer.observers import Observer
from quantizer.plan.model import Key, Plan
from quantizer.plan.tied_scales import tied_layers


def tied_steps(plan: Plan, observers: Mapping[Key, Observer]) -> dict[Key, float]:
    """Return the largest step of all weights that share a scale with a weight, by its key."""
    specs = {key: tensor.spec for key, tensor in plan.tensors.items()}
    steps: dict[Key, float] = {}
    for group in tied_layers(plan.graph, specs):
        keys = [(layer, "weights") for layer in group]
        largest = max(observers[key].largest_step() for key in keys)
        steps.update(dict.fromkeys(keys, largest))
    return steps
