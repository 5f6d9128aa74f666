"""Adjust codes and scales after GPTQ, GPTAQ or Qronos, one at a time.

Rounding column by column, a code is chosen when the errors of later columns are not known yet.
A sweep goes through all scales and then through all columns once more. Each gets the value with
the least error, with all others as they are. So the error never rises.

Source: Chee et al. 2023, "QuIP" (arXiv 2307.13304), greedy updates; Nair and Suggala 2024,
"CDQuant: Greedy Coordinate Descent for Accurate LLM Quantization" (arXiv 2406.17542), for the
codes. A scale is the solution of a least-squares problem in one unknown.
"""

# ruff: noqa: N806 - the papers' letters
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.algorithms.gptq.rows import ColumnScales, Replay, is_worth_a_graph
from quantizer.algorithms.gptq.target import Member
from quantizer.layerwise.clip_search import has_row_scales
from quantizer.numerics.blocks import Kernel
from quantizer.numerics.qparams import QParams

_COLUMNS_AT_ONCE = 64
"""After so many columns, the change of the errors is computed in one product."""


def may_refit_scales(members: Sequence[Member]) -> bool:
    """Check whether each scale is that of one row, and may be any float times integer codes."""
    spec = members[0].spec
    is_free = spec.dtype == "int" and spec.scale_type == "float"
    return is_free and all(has_row_scales(member.layer, spec) for member in members)


@dataclass
class Refinement:
    """Holds a rounded weight whose codes and scales are improved.

    Attributes:
        W: the weight to approximate, float32 [depth, rows].
        Q: the rounded weight, each value a code times its scale; changed in place.
        gram: the sum of x x^T, [depth, depth].
        damping: what is added to its diagonal, [depth].
        columns: the scales, in the order of W.
    """

    W: Tensor
    Q: Tensor
    gram: Tensor
    damping: Tensor
    columns: ColumnScales

    def __post_init__(self) -> None:
        self._E = self.W - self.Q
        self._block = _ColumnBlock(self.W, self.columns.kernel)
        self._replay = Replay()

    def sweep(self, *, scales_too: bool) -> None:
        """Go through all scales, if `scales_too`, and then through all codes."""
        if scales_too:
            self._refit_scales()
        depth = len(self.W)
        for start in range(0, depth, _COLUMNS_AT_ONCE):
            self._recode(slice(start, start + _COLUMNS_AT_ONCE))

    def errors(self) -> Tensor:
        """Return the error of each row without the damping, float64 [rows]."""
        products = self.gram @ self._E
        products *= self._E
        return products.sum(0, dtype=torch.float64)

    def qparams(self, before: Sequence[QParams]) -> list[QParams]:
        """Return the scales of each layer, whose rows are one after the other.

        Args:
            before: the scales that each layer had.
        """
        rows = [len(qparams.scale) for qparams in before]
        scales = torch.split(self.columns.scale.T, rows)
        result = []
        for qparams, scale in zip(before, scales, strict=True):
            layer_scale = scale.reshape(qparams.scale.shape).contiguous()
            result.append(QParams(layer_scale, qparams.zero_point))
        return result

    def _residual(self, block: slice) -> Tensor:
        """Return half of the error's slope for some columns, [columns, rows]."""
        residual = self.gram[block] @ self._E
        damping = self.damping[block, None]
        residual += damping * self._E[block]
        return residual

    def _refit_scales(self) -> None:
        """Set the scales of each group to the least-squares solution, group after group."""
        scale = self.columns.scale.clone()
        self.columns = replace(self.columns, scale=scale)
        sizes = self.columns.index.bincount(minlength=len(scale))
        start = 0
        for number, size in enumerate(sizes.tolist()):
            self._refit_group(number, slice(start, start + size))
            start += size

    def _refit_group(self, number: int, group: slice) -> None:
        scale = self.columns.scale[number]
        ratio = self.Q[group] / scale
        codes = ratio.round_()
        H_codes = self.gram[group, group] @ codes
        damping = self.damping[group, None]
        H_codes += damping * codes
        curvature = (codes * H_codes).sum(0)
        residual = self._residual(group)
        slope = (codes * residual).sum(0)
        newton_step = slope / curvature
        refitted = scale + newton_step
        # A scale keeps its sign, so that codes stay what they are
        has_sign = refitted * scale > 0
        is_usable = has_sign & refitted.isfinite()
        refitted = torch.where(is_usable, refitted, scale)
        self.columns.scale[number] = refitted
        self.Q[group] = codes * refitted
        self._E[group] = self.W[group] - self.Q[group]

    # In operations this small, finding out that there is no gradient takes long
    @torch.inference_mode()
    def _recode(self, columns: slice) -> None:
        """Give each of some columns the codes with the least error, one after the other."""
        block = self._block
        count = len(self.Q[columns])
        inner = slice(0, count)
        numbers = self.columns.index[columns]
        block.Q[inner] = self.Q[columns]
        block.E[inner] = self._E[columns]
        block.residual[inner] = self._residual(columns)
        block.scale[inner] = self.columns.scale[numbers]
        block.zero_point[inner] = self.columns.zero_point[numbers]
        H = block.H[inner, inner]
        H.copy_(self.gram[columns, columns])
        H.diagonal().add_(self.damping[columns])
        if is_worth_a_graph(self.W):
            # Columns beyond the last one change nothing that is read
            self._replay(block.recode)
        else:
            block.recode(count)
        self.Q[columns] = block.Q[inner]
        self._E[columns] = block.E[inner]


class _ColumnBlock:
    """Holds some columns at fixed places, where recorded operations find them.

    Args:
        W: the weight that they are of, [depth, rows].
        kernel: as in `ColumnScales`.

    Attributes:
        Q, E: the columns' rounded values and errors, [columns, rows].
        residual: half of the error's slope, [columns, rows].
        scale, zero_point: [columns, rows].
        H: the damped gram of the columns, [columns, columns].
    """

    def __init__(self, W: Tensor, kernel: Kernel) -> None:  # noqa: N803 - the paper's letter
        depth, rows = W.shape
        count = min(_COLUMNS_AT_ONCE, depth)
        self.Q, self.E, self.residual, self.zero_point = W.new_zeros(4, count, rows)
        self.scale = W.new_ones(count, rows)
        self.H = W.new_zeros(count, count)
        self._kernel = kernel

    def recode(self, count: int | None = None) -> None:
        """Change Q and E of the first `count` columns, or of all."""
        steps = zip(
            self.Q[:count],
            self.E[:count],
            self.residual[:count],
            self.scale[:count],
            self.zero_point[:count],
            self.H[:count],
            self.H.diagonal()[:count],
            strict=True,
        )
        for q, e, r, scale, zero_point, H_row, curvature in steps:
            round_ = self._kernel.rounder(zero_point)
            best = q + r / curvature
            best /= scale
            new_q = round_(best)
            new_q *= scale
            change = new_q - q
            # Off by a rounding error, the code may be a worse one
            gain = 2 * r - curvature * change
            gain *= change
            change = torch.where(gain > 0, change, 0.0)
            q += change
            e -= change
            self.residual.addr_(H_row, change, alpha=-1)
