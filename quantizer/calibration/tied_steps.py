"""The largest step of the weights that share a scale, from what their observers have seen."""

from collections.abc import Mapping

from quantizer.config.model import QuantizationSpec
from quantizer.observers import Observer
from quantizer.plan.model import (
    Key,
    Plan,
)
from quantizer.plan.tied_scales import tied_layers


def tied_steps(plan: Plan, observers: Mapping[Key, Observer]) -> dict[Key, float]:
    """Return the largest step of all weights that share a scale with a weight, by its key."""
    specs: dict[Key, QuantizationSpec] = {}
    for key, tensor in plan.tensors.items():
        specs[key] = tensor.spec
    steps: dict[Key, float] = {}
    for group in tied_layers(plan.graph, specs):
        keys: list[Key] = []
        largest = 0.0
        for layer in group:
            key = (layer, "weights")
            keys.append(key)
            step = observers[key].largest_step()
            largest = max(largest, step)
        for key in keys:
            steps[key] = largest
    return steps
