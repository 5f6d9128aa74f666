"""The largest step of the weights that share a scale, for algorithms that find scales."""

from collections.abc import Iterable

from quantizer.algorithms.adjustment import Adjustment, Task
from quantizer.algorithms.fold import parameter
from quantizer.observers import Observer


def shared_steps(
    task: Task,
    adjustment: Adjustment,
    layers: Iterable[str],
) -> dict[str, float]:
    """Return the largest step of all layers that share a scale with a layer, by layer.

    Layers with a scale of their own are left out. The weights are those before rounding, so
    that all layers of a group get the same step, whatever rounds them.

    Raises:
        ObservationError: a weight holds NaN or infinity.
    """
    by_group: dict[tuple[str, ...], float] = {}
    steps: dict[str, float] = {}
    for layer in layers:
        group = task.tied.get(layer)
        if group is None:
            continue
        if group not in by_group:
            largest = 0.0
            for member in group:
                observer = Observer(task.specs[member, "weights"])
                observer.observe(parameter(task.graph, adjustment, member).detach())
                largest = max(largest, observer.largest_step())
            by_group[group] = largest
        steps[layer] = by_group[group]
    return steps
