"""Only the DPU limits how fine a power of two may be."""

from __future__ import annotations

import pytest
import torch

from quantizer import (
    Config,
    Dtype,
    ModelQuantizer,
    QuantizationConfig,
    QuantizationSpec,
    ScaleType,
)
from quantizer.config.model import QuantizationSpec as Spec
from quantizer.numerics.metrics import sqnr_db
from quantizer.plan.match import with_finest_position


@pytest.mark.parametrize(("bits", "position"), [(4, 12), (8, 12), (9, 15), (16, 15)])
def test_the_dpu_has_twelve_or_fifteen_fraction_bits(bits: int, position: int) -> None:
    spec = Spec(bit_width=bits, scale_type="poweroftwo")
    assert with_finest_position(spec, "DPU").finest_position == position
    assert with_finest_position(spec, "CPU") == spec


def test_small_weights_keep_their_codes_elsewhere() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).requires_grad_(False)
    model.weight.mul_(1e-3)
    exact = model.weight.clone()
    spec = QuantizationSpec(dtype=Dtype.int8, scale_type=ScaleType.pof2)
    ModelQuantizer(Config(QuantizationConfig(weight=spec))).quantize_model(model)
    assert sqnr_db(exact, model.weight) > 35
