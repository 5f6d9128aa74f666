"""A layer whose weight GPTQ, GPTAQ or Qronos rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from quantizer.config.model import QuantizationSpec
from quantizer.layerwise.patches import matrix_weight, weight_matrix
from quantizer.layerwise.round_to_nearest import layer_qparams, nearest, nearest_qparams
from quantizer.numerics.qparams import QParams


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
    shared_step: float | None = None

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

    def with_fixed(self, qparams: QParams) -> Member:
        """Return the same layer with these scales, which rounding must use."""
        return replace(self, qparams=qparams, is_fixed=True)

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
