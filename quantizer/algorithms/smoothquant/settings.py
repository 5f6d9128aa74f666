"""The settings of SmoothQuant. Imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from quantizer.config.algorithms import (
    ONLINE,
    ConfigChange,
    ConfigStep,
    PreQuantOptConfig,
    setting,
)
from quantizer.config.typed_fields import type_checked


@type_checked
@dataclass
class SmoothQuantConfig(PreQuantOptConfig):
    """SmoothQuant (arXiv 2211.10438): the range of activations is moved into the weights; the
    float network computes the same.
    """

    run: ClassVar[str] = "quantizer.algorithms.smoothquant.smoothquant:smoothquant"
    eases_activations: ClassVar[bool] = True

    name: str = "smoothquant"
    alpha: float | list[float] | Literal["auto"] = setting(
        1.0,
        "How much of the difficulty moves into the weights, 0 to 1; a list to choose from for "
        "each group of layers, or "
        '"auto" for 0, 0.1, …, 1. Recommended: 0.5, as in the paper; 1 is the default of the '
        "format.",
        is_searched=True,
        minimum=0,
        maximum=1,
        title="strength",
        help='write a number from 0 to 1, a list of numbers, or "auto"',
        examples=[0.5],
    )
    scale_clamp_min: float = setting(
        1e-3, "Factors are at least this.", exclusiveMinimum=0, maximum=1e30
    )
    scaling_layers: list[dict[str, Any]] | None = None
    embedding_layers: list[str] | None = None
    model_decoder_layers: str | None = None
    num_attention_heads: int = -1
    num_key_value_heads: int = -1
    online: bool = setting(True, ONLINE)


_ENTRY = {"name": "smoothquant", "alpha": 0.5, "online": False}
STEP = ConfigStep(
    "smoothing",
    "a pass over the data, with alpha auto several",
    (
        ConfigChange("SmoothQuant, alpha 0.5", algorithm=_ENTRY, needs_activations=True),
        ConfigChange(
            "SmoothQuant, alpha auto",
            algorithm={**_ENTRY, "alpha": "auto"},
            needs_activations=True,
        ),
    ),
    place=3,
)
