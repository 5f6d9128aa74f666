"""Round-to-nearest (RTN) of a weight, which every other rounding is measured against. How far
the outputs of layers with other weights are off, from the Gram matrices of their inputs.
"""

from collections.abc import Iterable, Iterator

import torch
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

_POWER_STEPS = 2
"""Steps of the power method towards a direction that need not be the leading one."""
_TILE_COLUMNS = 256
"""Columns of a symmetric matrix that are multiplied at once. What is above its diagonal tiles
is not read.
"""


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


def output_error(gram: Tensor, difference: Tensor) -> float:
    """Return tr(d H d^T), the squared error of a layer's outputs summed over the inputs.

    Args:
        gram: H of these inputs, [groups, depth, depth].
        difference: d of two weights, [groups, rows, depth].

    >>> import torch
    >>> output_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [0.0, 3.0]]]))
    14.0
    """
    dtype = torch.promote_types(difference.dtype, torch.float64)
    total = 0.0
    for start in range(0, difference.shape[2], _TILE_COLUMNS):
        stop = start + _TILE_COLUMNS
        tile = difference[..., start:stop]
        columns = gram[..., start:stop]
        products = tile @ columns[:, start:stop]
        # Twice what is below the diagonal tile, as H is symmetric
        products.baddbmm_(difference[..., stop:], columns[:, stop:], alpha=2)
        errors = products.mul_(tile).sum(-1)
        total += float(errors.sum(dtype=dtype))
    return total


def estimated_error(gram: Tensor, difference: Tensor, stride: int) -> float:
    """Estimate `output_error` from every `stride`-th row, and from what all rows do to the
    inputs' largest direction.

    With h = H u for any u, tr(d H d^T) is |d h|^2 / u h plus a remainder. The first part costs
    little. Rows differ less in the remainder, as one direction often has most of the energy.

    Args:
        gram: H, positive semidefinite, [groups, depth, depth].
        difference: d of two weights, [groups, rows, depth].
        stride: with 1 nothing is estimated.

    Source: Sun et al. 2024, "Massive Activations in Large Language Models", for that direction.

    >>> import torch
    >>> estimated_error(torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [2.0, 1.0]]]), 2)
    10.0
    """
    u = leading(gram, _POWER_STEPS)
    h = gram @ u
    u_h = (u.double() * h.double()).sum(1, keepdim=True)
    along_u = (difference @ h).double().square() / u_h.clamp(min=1e-300)
    sample = difference[:, ::stride]
    sampled_along_u = float(along_u[:, ::stride].sum())
    remainder = max(output_error(gram, sample) - sampled_along_u, 0.0)
    return float(along_u.sum()) + remainder * difference.shape[1] / sample.shape[1]


def leading(gram: Tensor, steps: int) -> Tensor:
    """Estimate the leading eigenvector of each symmetric matrix [..., depth, depth] by the
    power method, as a column times its eigenvalue.

    >>> import torch
    >>> leading(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), 30).round().tolist()
    [[2.0], [0.0]]
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    vector = (diagonal + diagonal.mean(-1, keepdim=True))[..., None]
    for _ in range(steps):
        norm = vector.norm(dim=-2, keepdim=True).clamp(min=1e-30)
        vector = gram @ (vector / norm)
    return vector
