"""Round-to-nearest (RTN) of a weight, which every other rounding is measured against."""

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.nn.quantizer import quantize_tensor
from quantizer.numerics.qparams import QParams
from quantizer.observers import ObservationError, Observer

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
