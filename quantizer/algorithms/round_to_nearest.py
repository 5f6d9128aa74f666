"""Round-to-nearest of a weight, which every other rounding is measured against, and rows to
search on.
"""

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.nn.quantizer import place
from quantizer.numerics.qparams import QParams
from quantizer.observers import ObservationError, Observer

ROWS = 512
"""Rows that a search over a group's layers looks at."""


def nearest_qparams(spec: QuantizationSpec, weight: Tensor) -> QParams:
    """Scale and zero point that the range of `weight` gives, as calibration finds them, where
    the weight is.

    Raises:
        ObservationError: the weight holds NaN or infinity.
        ValueError: the spec has no scale.
    """
    observer = Observer(spec)
    observer.observe(weight.detach())
    return observer.qparams().to(weight.device)


def layer_qparams(layer: str, spec: QuantizationSpec, weight: Tensor) -> QParams:
    """The same; instead of an ObservationError, a DataError that names the layer."""
    try:
        return nearest_qparams(spec, weight)
    except ObservationError as error:
        raise DataError(
            f"the weight of {layer} has no range: {error}", help="check the checkpoint"
        ) from error


def nearest(weight: Tensor, spec: QuantizationSpec, qparams: QParams) -> Tensor:
    """The weight, each value rounded on its own."""
    return place(weight.detach(), spec, qparams.scale, qparams.zero_point)


def sampled_rows(
    weight: Tensor, spec: QuantizationSpec, node: Node, rows: int
) -> tuple[Tensor, float]:
    """Evenly strided rows of a weight, and how many each stands for, if all layers of its group
    have `rows`.

    All rows where their scales depend on each other, or their inputs differ.
    """
    across = 0 if spec.qscheme == "per_group" else 1
    own = spec.qscheme in ("per_channel", "per_group") and spec.ch_axis != across
    stride = -(-rows // ROWS)
    if not own or stride == 1 or node.row.transposed or node.attrs.get("groups", 1) != 1:
        return weight, 1.0
    sample = weight[::stride]
    return sample, len(weight) / len(sample)
