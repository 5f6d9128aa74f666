"""The settings of rotation. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from quantizer.config.algorithms import MAX_SEED, PreQuantOptConfig, setting
from quantizer.config.typed_fields import type_checked


@type_checked
@dataclass
class RotationConfig(PreQuantOptConfig):
    """Rotation (QuaRot, arXiv 2404.00456): activations are multiplied by Hadamard matrices,
    which spread outliers over all channels; the float network computes the same. Not part of
    the documented format.
    """

    run: ClassVar[str] = "quantizer.algorithms.rotation.rotation:rotation"
    needs_data: ClassVar[bool] = False

    name: str = "rotation"
    residual: bool = setting(
        True, "Whether to rotate what runs between the blocks.", is_part=True
    )
    values: bool = setting(
        True, "Whether to rotate the values of each attention head.", is_part=True
    )
    online: bool = setting(
        True,
        "Whether to rotate the inputs of layers that nothing else can rotate, by an operator "
        "of its own.",
        is_part=True,
    )
    seed: int = setting(
        0, "Draws the signs of the Hadamard matrices.", minimum=0, maximum=MAX_SEED
    )
    model_decoder_layers: str | None = None
