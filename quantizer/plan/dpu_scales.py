"""The finest powers of two that a device takes. Computes no scale."""

from __future__ import annotations

from dataclasses import replace

from quantizer.config.model import QuantizationSpec


def with_finest_position(spec: QuantizationSpec, device: str) -> QuantizationSpec:
    """The spec as `device` takes it: the DPU's scales have at most 12 fraction bits up to 8 bits, else 15.

    Source: pytorch_nndct 3.5. Other devices have no limit.
    """
    if device != "DPU" or spec.dtype != "int" or spec.scale_type != "poweroftwo":
        return spec
    return replace(spec, finest_position=12 if spec.bit_width <= 8 else 15)
