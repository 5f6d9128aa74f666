"""The largest step of the weights that share a scale."""

from collections.abc import Callable, Iterable

from quantizer.layerwise.adjustment import Adjustment, Task
from quantizer.observers import Observer


def shared_steps(
    groups: Iterable[tuple[str, ...]], observer_of: Callable[[str], Observer]
) -> dict[str, float]:
    """Return the largest step of the weights that share a scale with a layer's, by layer.

    Args:
        groups: the layers whose weights share a scale.
        observer_of: returns the observer that has seen the weight of a layer.
    """
    steps: dict[str, float] = {}
    for group in groups:
        largest = 0.0
        for layer in group:
            observer = observer_of(layer)
            largest = max(largest, observer.largest_step())
        for layer in group:
            steps[layer] = largest
    return steps


def steps_before_rounding(
    task: Task, adjustment: Adjustment, layers: Iterable[str]
) -> dict[str, float]:
    """Return the shared steps of layers, for algorithms that find scales.

    Layers with a scale of their own are left out. The weights are those before rounding, so
    that all layers of a group get the same step, whatever rounds them.

    Raises:
        ObservationError: a weight holds NaN or infinity.
    """

    # It imports folds, which only algorithms need
    from quantizer.layerwise.fold import parameter

    def observed(layer: str) -> Observer:
        observer = Observer(task.specs[layer, "weights"])
        weight = parameter(task.graph, adjustment, layer)
        observer.observe(weight.detach())
        return observer

    groups: set[tuple[str, ...]] = set()
    for layer in layers:
        if layer in task.tied:
            groups.add(task.tied[layer])
    return shared_steps(groups, observed)
