"""The layers whose weights GPTQ, GPTAQ and Qronos round, and the outputs that each of the three
tries to match: their only difference. Rounds nothing.

GPTQ matches the outputs that the float weight gives on the inputs of the quantized network.
GPTAQ and Qronos match the outputs of the float network. Each becomes a target weight, which
`rows.round_columns` then rounds.

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative
Pre-trained Transformers" (arXiv 2210.17323); Li et al. 2025, "GPTAQ: Efficient Finetuning-Free
Quantization for Asymmetric Calibration" (arXiv 2504.02692); Zhang et al. 2025, "Qronos:
Correcting the Past by Shaping the Future... in Post-Training Quantization" (arXiv 2505.11695).
"""

# ruff: noqa: N803, N806 - the papers' letters
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quantizer.algorithms.gptq.rows import ColumnScales, Factor, factorize
from quantizer.algorithms.gptq.settings import ColumnRounding, GPTAQConfig, QronosConfig
from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.clip_search import group_size
from quantizer.layerwise.patches import is_linear, matrix_shape, matrix_weight, weight_matrix
from quantizer.layerwise.round_to_nearest import (
    layer_qparams,
    leading,
    nearest,
    nearest_qparams,
)
from quantizer.numerics.granularity import from_rows, to_rows
from quantizer.numerics.qparams import QParams
from quantizer.observers import kernel_of


@dataclass(frozen=True)
class Member:
    """Holds a layer to round, with the scales of its weight.

    Attributes:
        qparams: scales that an earlier algorithm has fixed, or those of the weight's range.
        is_fixed: whether an earlier algorithm has fixed the scales.
        weight: the float weight as a float32 matrix [groups, rows, depth].
        rtn: the weight rounded to nearest, in the same shape.
        shared_step: as `nearest_qparams` takes it.
    """

    name: str
    layer: nn.Module
    spec: QuantizationSpec
    qparams: QParams
    is_fixed: bool
    weight: Tensor
    rtn: Tensor
    shared_step: float | None

    @staticmethod
    def of(
        name: str,
        layer: nn.Module,
        spec: QuantizationSpec,
        fixed: QParams | None,
        *,
        shared_step: float | None = None,
    ) -> Member:
        """Create a member with the `fixed` scales, or with those of the weight's range.

        Raises:
            DataError: there is NaN or infinity in the weight.
        """
        weight = layer.get_parameter("weight").detach()
        qparams = fixed or layer_qparams(name, spec, weight, shared_step)
        return Member(
            name,
            layer,
            spec,
            qparams,
            fixed is not None,
            weight_matrix(layer, weight).float(),
            weight_matrix(layer, nearest(weight, spec, qparams)).float(),
            shared_step,
        )

    def with_spec(self, spec: QuantizationSpec) -> Member:
        """Return the same layer with the scales of its range under another spec."""
        weight = self.layer.get_parameter("weight")
        qparams = nearest_qparams(spec, weight, self.shared_step)
        return replace(self, spec=spec, qparams=qparams)

    @property
    def may_have_dynamic_groups(self) -> bool:
        """Check whether groups are runs of columns whose scales are not fixed. Then a group's
        scale can be found when the columns before it are rounded.
        """
        is_grouped = (self.spec.qscheme, self.spec.ch_axis) == ("per_group", 1)
        return isinstance(self.layer, nn.Linear) and is_grouped and not self.is_fixed

    def stored(self, matrix: Tensor) -> Tensor:
        """Return a weight matrix as the layer stores its weight."""
        dtype = self.layer.get_parameter("weight").dtype
        return matrix_weight(self.layer, matrix.to(dtype).contiguous())


_ALONG_ROWS = (("per_tensor", None), ("per_channel", 0), ("per_group", 1))


def column_scales(
    layers: Sequence[nn.Module], spec: QuantizationSpec, qparams: Sequence[QParams], group: int
) -> ColumnScales:
    """Return the scales of one group of channels, of several layers with one spec; their weight
    matrices are one below the other.
    """
    is_along_rows = (spec.qscheme, spec.ch_axis) in _ALONG_ROWS
    is_direct = is_along_rows and all(map(is_linear, layers))
    scales, zero_points = [], []
    for layer, of_layer in zip(layers, qparams, strict=True):
        if is_direct:
            scale = _by_row(layer, of_layer.scale)
            zero_point = _by_row(layer, of_layer.zero_point)
        else:
            scale = _by_value(layer, spec, of_layer.scale)
            zero_point = _by_value(layer, spec, of_layer.zero_point)
        scales.append(scale[group])
        zero_points.append(zero_point[group])
    scale = torch.cat(scales).float()
    zero_point = torch.cat(zero_points).float()
    if is_direct:
        depth = layers[0].get_parameter("weight").shape[1]
        index = scale_index(spec, depth, scale.device)
    else:
        # Neighbouring columns of equal scales share one
        is_new = torch.ones(scale.shape[1], dtype=torch.bool, device=scale.device)
        is_new[1:] = (scale.diff() != 0).any(0) | (zero_point.diff() != 0).any(0)
        scale = scale[:, is_new]
        zero_point = zero_point[:, is_new]
        index = is_new.cumsum(0) - 1
    return ColumnScales(kernel_of(spec), scale.T.contiguous(), zero_point.T.contiguous(), index)


def scale_index(spec: QuantizationSpec, depth: int, device: torch.device) -> Tensor:
    """Return the number of the scale that each column has in its row, int64 [depth]."""
    columns_per_scale = group_size(spec, depth) // spec.scales_per_group
    return torch.arange(depth, device=device) // columns_per_scale


def _by_row(layer: nn.Module, values: Tensor) -> Tensor:
    """Return the scales or zero points of a linear layer, none of which is across rows, as
    [groups, rows, scales of a row].
    """
    groups, rows, _ = matrix_shape(layer)
    is_of_whole_matrix = values.dim() < 2 and values.numel() != groups * rows
    if is_of_whole_matrix:
        return values.reshape(-1, 1, 1).expand(groups, rows, 1)
    return values.reshape(groups, rows, -1)


def _by_value(layer: nn.Module, spec: QuantizationSpec, values: Tensor) -> Tensor:
    """Return the scale or zero point of each value of the weight matrix, float32 [groups, rows,
    depth].
    """
    shape = tuple(layer.get_parameter("weight").shape)
    length = to_rows(torch.empty(shape, device="meta"), spec.cut).shape[1]
    rows = values.float().reshape(-1, 1).expand(-1, length).contiguous()
    return weight_matrix(layer, from_rows(rows, shape, spec.cut))


POWER_ITERATIONS = 30


@dataclass(frozen=True)
class Products:
    """Holds sums over all tokens of one group of channels, [depth, depth].

    Attributes:
        gram: the sum of x x^T.
        drift: the sum of (f - x) x^T, where f is the same token in the float network; None if
            that is not known.
    """

    gram: Tensor
    drift: Tensor | None = None


@dataclass(frozen=True)
class Hessian:
    """Holds H of the paper: a Gram matrix, permuted, damped and factored.

    Attributes:
        order: the columns in the order in which they are rounded, int64 [depth].
        damping: what was added to the diagonal, in that order [depth].
        factor: of the damped matrix, in that order.
        raised: the damping as a share of the mean diagonal, if it had to be larger than the
            settings ask for.
    """

    order: Tensor
    damping: Tensor
    factor: Factor
    raised: float | None

    def permuted(self, columns: Tensor) -> Tensor:
        """Return columns [depth, …] in the order of rounding."""
        # From a transposed view, values would be gathered one by one: three times as long
        return columns.contiguous().index_select(0, self.order)

    def restored(self, columns: Tensor) -> Tensor:
        """Return permuted columns in the order of the weight."""
        return columns.index_select(0, self.order.argsort())


@dataclass(frozen=True)
class GptqTarget:
    """Targets, for GPTQ, the outputs of the float weight on the quantized network's inputs."""

    settings: ColumnRounding
    needs_float = False
    """Whether the inputs of the float network are needed as well."""
    tokens_per_input = 0
    """Tokens that there should be for each input channel; with fewer, the result may not hold
    for other data.
    """

    def damping(self, gram: Tensor) -> float:
        """Return what is added to the diagonal at first, in units of `gram`."""
        return self.settings.damp_percent * _mean_diagonal(gram)

    def target(
        self, W: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weight [depth, rows] to approximate instead of W, and what to round for
        its first column, if not that weight.
        """
        return W, None

    def hessian(self, gram: Tensor, *, by_size: bool) -> Hessian | None:
        """Return the Gram matrix [depth, depth] permuted, damped and factored.

        The damping grows tenfold until the matrix is positive definite.

        Args:
            gram: of one group of channels.
            by_size: round columns with large inputs first (`desc_act`).

        Returns:
            None if the whole mean diagonal as damping is not enough.
        """
        diagonal = gram.diagonal()
        if by_size:
            order = diagonal.argsort(descending=True, stable=True)
        else:
            order = torch.arange(len(gram), device=gram.device)
        mean = _mean_diagonal(gram)
        least = self.damping(gram)
        damp = least
        while True:
            # A column of zeros gets the mean, so that it stays on its own
            damping = torch.where(diagonal == 0, mean, damp)[order]
            H = _permuted_matrix(gram, order)
            H.diagonal().add_(damping)
            factor = factorize(H)
            if factor is not None:
                raised = damp / mean if damp > least else None
                return Hessian(order, damping, factor, raised)
            if damp >= mean:
                return None
            damp = min(mean, max(10 * damp, 1e-4 * mean))


class GptaqTarget(GptqTarget):
    """Targets, for GPTAQ, the outputs of the float network, as far as columns that are rounded
    later can make up for the change of an input.
    """

    settings: GPTAQConfig
    needs_float = True

    def target(
        self, W: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """Return W (I + alpha P), with P = triu(dXX U^T, 1) U, U^T U = H^-1 and dXX the drift.

        Row i of P is what the columns after i add to make up for the error of input i (the
        paper's parallel form). W is the float weight in all columns. The authors' code uses
        each column as the errors before it have left it; the difference was too small to
        measure.
        """
        assert products.drift is not None
        M, D = hessian.factor.M, hessian.factor.D
        dXX = _permuted_matrix(products.drift, hessian.order)
        # U = D^-1/2 M^-1, so P = triu(dXX M^-T, 1) D^-1 M^-1
        dXX_U = torch.linalg.solve_triangular(M, dXX.T, upper=True, unitriangular=True).T
        later = dXX_U.triu(1) / D
        P = torch.linalg.solve_triangular(M, later, upper=True, left=False, unitriangular=True)
        return torch.addmm(W, P.T, W, alpha=self.settings.alpha), None


class QronosTarget(GptqTarget):
    """Targets, for Qronos, the outputs of the float network, by the weight that fits them best
    on the inputs of the quantized network.
    """

    settings: QronosConfig
    needs_float = True
    tokens_per_input = 4

    def damping(self, gram: Tensor) -> float:
        """Return a share of the largest eigenvalue."""
        return self.settings.alpha * float(leading(gram, POWER_ITERATIONS).norm())

    def target(
        self, W: Tensor, hessian: Hessian, products: Products
    ) -> tuple[Tensor, Tensor | None]:
        """Return W + W dXX H^-1 with dXX the drift, and a first column of its own.

        The first column is rounded as if the others stayed W. From the second on, the paper
        refits the columns that are left, as GPTQ does with this target.
        """
        assert products.drift is not None
        M, D = hessian.factor.M, hessian.factor.D
        W_dXX = _permuted_matrix(products.drift, hessian.order).T @ W
        # H^-1 = M^-T D^-1 M^-1
        fit = torch.linalg.solve_triangular(M, W_dXX, upper=True, unitriangular=True)
        fit = fit / D[:, None]
        fit = torch.linalg.solve_triangular(M.T, fit, upper=False, unitriangular=True)
        first = hessian.order[0]
        H_first = products.gram[first, first] + hessian.damping[0]
        return W + fit, W[0] + W_dXX[0] / H_first


def _permuted_matrix(matrix: Tensor, order: Tensor) -> Tensor:
    """Permute rows and columns; `index_select` takes a third of the time of an index."""
    return matrix.index_select(0, order).index_select(1, order)


def _mean_diagonal(gram: Tensor) -> float:
    """Return the mean over columns that were not always zero, or 1 if there are none."""
    diagonal = gram.diagonal()
    live = diagonal[diagonal != 0]
    return float(live.mean()) if len(live) else 1.0
