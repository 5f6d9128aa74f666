"""The settings of AWQ. Imports no torch."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quantizer.config.algorithms import (
    ONLINE,
    AlgoConfig,
    AlgorithmStage,
    ConfigChange,
    ConfigStep,
    setting,
)
from quantizer.config.typed_fields import type_checked


@type_checked
@dataclass
class AWQConfig(AlgoConfig):
    """AWQ (arXiv 2306.00978): input channels that matter are scaled up before weights are
    rounded, and ranges are clipped.
    """

    run: ClassVar[str] = "quantizer.algorithms.awq.awq:awq"
    stage: ClassVar[AlgorithmStage] = "rescale"
    matrices: ClassVar[int] = 3

    name: str = "awq"
    bit: int = 4
    sym: bool = False
    group_size: int = 128
    algo_processor: type[object] | None = None
    scaling_layers: list[dict[str, Any]] | None = None
    model_decoder_layers: str | None = None
    embedding_layers: list[str] | None = None
    scale_search: bool = setting(
        True, "Whether to search for factors of input channels.", is_part=True
    )
    clip_search: bool = setting(
        True, "Whether to search for smaller ranges of the weights.", is_part=True
    )
    grid: int = setting(20, "Candidates of the search for factors.", minimum=1, maximum=1000)
    online: bool = setting(True, ONLINE)
    num_attention_heads: int = -1
    num_key_value_heads: int = -1


_ENTRY = {"name": "awq", "online": False}
STEP = ConfigStep(
    "smoothing",
    "a pass over the data",
    (ConfigChange("AWQ", algorithm=_ENTRY, needs_activations=False),),
    place=3,
)
