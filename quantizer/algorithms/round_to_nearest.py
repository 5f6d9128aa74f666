"""Round-to-nearest of a weight, which every other rounding is measured against, the measure, and rows to search on."""

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.nn.quantizer import place
from quantizer.numerics.qparams import QParams
from quantizer.observers import ObservationError, Observer

POWERS = 2
"""Steps of the power method towards the largest direction of inputs."""
ROWS = 512
"""Rows that a search over a group's layers looks at."""
TILE = 256
"""Columns of a symmetric matrix that are multiplied at once; what is above its diagonal tiles is not read."""


def nearest_qparams(spec: QuantizationSpec, weight: Tensor) -> QParams:
    """Scale and zero point that the range of `weight` gives, as calibration finds them, where the weight is.

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
        raise DataError(f"the weight of {layer} has no range: {error}", help="check the checkpoint") from error


def nearest(weight: Tensor, spec: QuantizationSpec, qparams: QParams) -> Tensor:
    """The weight, each value rounded on its own."""
    return place(weight.detach(), spec, qparams.scale, qparams.zero_point)


def output_error(gram: Tensor, difference: Tensor) -> float:
    """Squared error of a layer's outputs, summed over the inputs of which `gram` is the Gram matrix: tr(d H d^T).

    Args:
        gram: [groups, depth, depth].
        difference: of two weights, [groups, rows, depth].

    >>> import torch
    >>> output_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [0.0, 3.0]]]))
    14.0
    """
    wide, found = torch.promote_types(difference.dtype, torch.float64), 0.0
    for start in range(0, difference.shape[2], TILE):
        here, later = difference[..., start : start + TILE], difference[..., start + TILE :]
        columns = gram[..., start : start + TILE]
        products = here @ columns[:, start : start + TILE]
        products.baddbmm_(later, columns[:, start + TILE :], alpha=2)
        found += float(products.mul_(here).sum(-1).sum(dtype=wide))
    return found


def estimated_error(gram: Tensor, difference: Tensor, stride: int) -> float:
    """About `output_error`, from every `stride`-th row and what all rows make of the inputs' largest direction.

    With h = H u, tr(d H d^T) is |d h|^2 / u h, which costs next to nothing, and a rest, whatever u is. Rows differ less
    in the rest, as one direction often has most of the energy (Sun et al. 2024, "Massive Activations in Large Language
    Models").

    >>> import torch
    >>> estimated_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), 2)
    10.0
    """
    u = gram.diagonal(dim1=1, dim2=2)[..., None]
    for _ in range(POWERS):
        u = gram @ (u / u.norm(dim=1, keepdim=True).clamp(min=1e-30))
    h = gram @ u
    shares = (difference @ h).double().square() / (u.double() * h.double()).sum(1, keepdim=True).clamp(min=1e-300)
    some = difference[:, ::stride]
    rest = max(output_error(gram, some) - float(shares[:, ::stride].sum()), 0.0)
    return float(shares.sum()) + rest * difference.shape[1] / some.shape[1]


def sampled_rows(weight: Tensor, spec: QuantizationSpec, node: Node, rows: int) -> tuple[Tensor, float]:
    """Evenly strided rows of a weight, and how many each stands for, if all layers of its group have `rows`.

    All rows where their scales depend on each other, or their inputs differ.
    """
    across = 0 if spec.qscheme == "per_group" else 1
    own = spec.qscheme in ("per_channel", "per_group") and spec.ch_axis != across
    stride = -(-rows // ROWS)
    if not own or stride == 1 or node.row.transposed or node.attrs.get("groups", 1) != 1:
        return weight, 1.0
    sample = weight[::stride]
    return sample, len(weight) / len(sample)
