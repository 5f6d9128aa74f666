"""Round-to-nearest of a weight, which every other rounding is measured against, and the measure."""

from __future__ import annotations

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.nn.quantizer import place
from quantizer.numerics.qparams import QParams
from quantizer.observers import Observer


def nearest_qparams(spec: QuantizationSpec, weight: Tensor) -> QParams:
    """Scale and zero point that the range of `weight` gives, as calibration finds them.

    Raises:
        ObservationError: the weight holds NaN or infinity.
        ValueError: the spec has no scale.
    """
    observer = Observer(spec)
    observer.observe(weight.detach())
    return observer.qparams()


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
    return float((difference @ gram).mul_(difference).sum(dtype=difference.double().dtype))
