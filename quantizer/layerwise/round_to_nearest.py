"""Round-to-nearest (RTN) of a weight, which every other rounding is measured against."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from quantizer.config.algorithms import named_algorithms
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.layerwise.adjustment import Adjustment, Remark, Task
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.qparams import QParams
from quantizer.observers import ObservationError, Observer
from quantizer.plan.joining.tied_scales import tied_steps

_SEARCHED_ROWS = 512
"""Rows of a group's layers that a search looks at."""


def nearest_qparams(
    spec: QuantizationSpec, weight: Tensor, shared_step: float | None = None
) -> QParams:
    """Return the scale and zero point of the weight's range, as calibration finds them, on the
    weight's device.

    Args:
        spec: of the weight.
        weight: of a layer.
        shared_step: as `Observer.qparams` takes it.

    Raises:
        ObservationError: the weight holds NaN or infinity.
        ValueError: the spec has no scale.
    """
    observer = Observer(spec)
    observer.observe(weight.detach())
    return observer.qparams(shared_step).to(weight.device)


def layer_qparams(
    layer: str, spec: QuantizationSpec, weight: Tensor, shared_step: float | None = None
) -> QParams:
    """Return the same for the weight of a named layer.

    Raises:
        DataError: the weight holds NaN or infinity; the layer is named.
    """
    try:
        return nearest_qparams(spec, weight, shared_step)
    except ObservationError as error:
        raise DataError(
            f"the weight of {layer} has no range: {error}", help="check the checkpoint"
        ) from error


def nearest(weight: Tensor, spec: QuantizationSpec, qparams: QParams) -> Tensor:
    """Return the weight, each value rounded on its own."""
    return quantize_tensor(weight.detach(), spec, qparams.scale, qparams.zero_point)


def sampled_rows(
    weight: Tensor, spec: QuantizationSpec, node: Node, rows: int
) -> tuple[Tensor, float]:
    """Return evenly strided rows of a weight, and how many rows each of them stands for.

    These are all rows where their scales depend on each other or their inputs differ.

    Args:
        weight: of a layer.
        spec: of the weight.
        node: the layer.
        rows: of all layers of its group.
    """
    axis_across_rows = 0 if spec.qscheme == "per_group" else 1
    has_groups = spec.qscheme in ("per_channel", "per_group")
    is_apart = has_groups and spec.ch_axis != axis_across_rows
    is_grouped = node.row.transposed or node.attrs.get("groups", 1) != 1
    stride = -(-rows // _SEARCHED_ROWS)
    if stride == 1 or is_grouped or not is_apart:
        return weight, 1.0
    sample = weight[::stride]
    return sample, len(weight) / len(sample)


def super_block_remarks(task: Task) -> Iterator[Remark]:
    """Yield a sentence for each layer whose scales share a factor in super-blocks."""
    others = named_algorithms(lambda kind: kind.needs_groups)
    more = f"; the algorithm {others} searches them by the data" if others else ""
    for group in task.structure.groups:
        for name in group.layers:
            spec = task.specs.get((name, "weights"))
            if spec is not None and spec.scale_type == "superblock":
                text = (
                    f"groups of {spec.dtype} share the factor of their scales, so it keeps the "
                    f"scales of the weights alone{more}"
                )
                yield Remark(name, text)


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
    return tied_steps(groups, observed)
