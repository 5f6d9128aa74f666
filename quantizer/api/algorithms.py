"""Settings of the algorithms that change weights, as dataclasses with the fields of the hierarchical file form.

Source of the names, order and defaults of SmoothQuantConfig, AWQConfig and GPTQConfig, up to additions: AMD Quark for
PyTorch, documentation of `quark.torch.quantization.config.config`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quantizer.api.fields import checked


class AlgoConfig:
    """Settings of an algorithm that changes weights when their scales are known."""


class PreQuantOptConfig:
    """Settings of an algorithm that changes weights before they are quantized."""


@checked
@dataclass
class SmoothQuantConfig(PreQuantOptConfig, AlgoConfig):
    """SmoothQuant (arXiv 2211.10438): moves the range of activations into weights; in either of the two fields.

    `alpha` is one strength, a list to choose from for each group of layers, or "auto": 0, 0.1, …, 1.
    """

    name: str = "smoothquant"
    alpha: float | list[float] | Literal["auto"] = 1
    scale_clamp_min: float = 1e-3
    scaling_layers: list[dict[str, Any]] | None = None
    embedding_layers: list[str] | None = None
    model_decoder_layers: str | None = None


@checked
@dataclass
class RotationConfig(PreQuantOptConfig, AlgoConfig):
    """Rotation by Hadamard matrices (QuaRot, arXiv 2404.00456); in either of the two fields. An addition."""

    name: str = "rotation"
    residual: bool = True
    values: bool = True
    online: bool = True
    seed: int = 0
    model_decoder_layers: str | None = None


@checked
@dataclass
class AWQConfig(AlgoConfig):
    """Activation-aware weight quantization (arXiv 2306.00978). `algo_processor` is accepted and not used.

    The weights' specification decides on their grid; a `bit`, `sym` or `group_size` that says otherwise is told. The
    fields from `scale_search` on are additions.
    """

    name: str = "awq"
    bit: int = 4
    sym: bool = False
    group_size: int = 128
    algo_processor: type[object] | None = None
    scaling_layers: list[dict[str, Any]] | None = None
    model_decoder_layers: str | None = None
    embedding_layers: list[str] | None = None
    scale_search: bool = True
    clip_search: bool = True
    grid: int = 20


@checked
@dataclass
class GPTQConfig(AlgoConfig):
    """GPTQ (arXiv 2210.17323): rounds weights column by column, each making up for the errors before.

    The weights' specification decides on their grid; a `bit`, `sym` or `group_size` that says otherwise is told. With
    `desc_act` groups are static, whatever `static_groups` says by default. `block_size` is an addition.
    """

    name: str = "gptq"
    bit: int = 4
    sym: bool = False
    group_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = False
    true_sequential: bool = True
    inside_layer_modules: list[str] | None = None
    model_decoder_layers: str | None = None
    embedding_layers: list[str] | None = None
    block_size: int = 128


@checked
@dataclass
class GPTAQConfig(AlgoConfig):
    """GPTAQ (arXiv 2504.02692): GPTQ that makes up for a share `alpha` of its inputs' error. An addition."""

    name: str = "gptaq"
    alpha: float = 0.25
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    true_sequential: bool = True
    inside_layer_modules: list[str] | None = None
    model_decoder_layers: str | None = None
    embedding_layers: list[str] | None = None
    block_size: int = 128


@checked
@dataclass
class QronosConfig(AlgoConfig):
    """Qronos (arXiv 2505.11695): GPTQ on columns that are fitted to the float network's outputs. An addition.

    `alpha` is the damping, as a share of the Hessian's largest eigenvalue.
    """

    name: str = "qronos"
    alpha: float = 1e-3
    desc_act: bool = True
    static_groups: bool = True
    true_sequential: bool = True
    inside_layer_modules: list[str] | None = None
    model_decoder_layers: str | None = None
    embedding_layers: list[str] | None = None
    block_size: int = 128


ALGORITHMS: dict[str, type] = {
    kind().name: kind for kind in (SmoothQuantConfig, RotationConfig, AWQConfig, GPTQConfig, GPTAQConfig, QronosConfig)
}
"""The class of each name in a file."""
