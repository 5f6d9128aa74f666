"""The settings of GPTQ and its kin. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from quantizer.config.algorithms import (
    LAYERS,
    SHARED_SETTINGS,
    AlgoConfig,
    ConfigChange,
    ConfigStep,
    Setting,
    setting,
)
from quantizer.config.typed_fields import type_checked

_SETTINGS = {
    "inside_layer_modules": Setting(
        "Names of the layers of a block, relative to it, in the order in which they are "
        "rounded; null or []: found on the graph.",
        keywords=LAYERS,
    ),
    "damp_percent": Setting(
        "Share of the mean diagonal added to the Hessian; if that is not enough, ten times "
        "as much, up to 1.",
        keywords={"exclusiveMinimum": 0, "maximum": 1},
    ),
    "desc_act": Setting("Whether columns whose inputs are large are rounded first."),
    "static_groups": Setting(
        "Whether the scales of all groups are found before the first weight is rounded. With "
        "false, the scales of a group are found when the first of its columns is rounded, from "
        "the weights as they are then."
    ),
    "scale_search": Setting(
        "Whether the scale of each group or channel is searched for the least error of the "
        "outputs, before the first weight is rounded; for 4 bits and fewer. Needs "
        "static_groups.",
        needs="static_groups",
    ),
    "sweeps": Setting(
        "How often all scales and codes are adjusted after rounding, each for the least error "
        "with all others as they are; for 4 bits and fewer. 2 take about half as long again.",
        keywords={"minimum": 0, "maximum": 100},
    ),
    "guidance": Setting(
        "How much more a token counts if the loss depends strongly on what linear layers "
        "compute for it: the power of the squared gradient, 0 to 1. With 0, all count alike. "
        "The backward pass needs the whole network in memory.",
        keywords={"minimum": 0, "maximum": 1},
    ),
    "true_sequential": Setting(
        "Whether each layer sees the rounded ones before it in its block; with false a "
        "block's inputs are collected once, from the blocks before."
    ),
    "block_size": Setting(
        "Columns that are rounded before the rest of the weight is updated; changes the "
        "speed, and the result only in the last digits.",
        keywords={"minimum": 1},
    ),
}


class ColumnRounding(AlgoConfig):
    """Settings of GPTQ and its kin, which round a weight column by column."""

    meanings: ClassVar[Mapping[str, Setting]] = {**SHARED_SETTINGS, **_SETTINGS}

    # Where the algorithm has another damping
    damp_percent: float = 0.0
    desc_act: bool
    static_groups: bool
    true_sequential: bool
    block_size: int
    scale_search: bool
    sweeps: int
    guidance: float


@type_checked
@dataclass
class GPTQConfig(ColumnRounding):
    """GPTQ (arXiv 2210.17323): weights are rounded one column after another, each making up for
    the error of those before.
    """

    run: ClassVar[str] = "quantizer.algorithms.gptq.algorithms:gptq"
    matrices: ClassVar[int] = 5

    name: str = "gptq"
    bit: int = 4
    sym: bool = False
    group_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    true_sequential: bool = True
    inside_layer_modules: list[str] | None = None
    model_decoder_layers: str | None = None
    embedding_layers: list[str] | None = None
    block_size: int = 128
    scale_search: bool = False
    sweeps: int = 0
    guidance: float = 0.0


@dataclass
class DriftRounding(ColumnRounding):
    """Settings of algorithms that also read what the float network computes."""

    matrices: ClassVar[int] = 7
    networks: ClassVar[int] = 2

    name: str = ""
    alpha: float = 0.0
    desc_act: bool = True
    static_groups: bool = True
    true_sequential: bool = True
    inside_layer_modules: list[str] | None = None
    model_decoder_layers: str | None = None
    embedding_layers: list[str] | None = None
    block_size: int = 128
    scale_search: bool = False
    sweeps: int = 0
    guidance: float = 0.0


@type_checked
@dataclass
class GPTAQConfig(DriftRounding):
    """GPTAQ (arXiv 2504.02692): GPTQ that also makes up for the error of a layer's inputs. Not
    part of the documented format.
    """

    run: ClassVar[str] = "quantizer.algorithms.gptq.algorithms:gptaq"

    name: str = "gptaq"
    alpha: float = setting(
        0.25,
        "The share of the inputs' error that is made up for, 0 to 1; 0 is GPTQ.",
        minimum=0,
        maximum=1,
    )
    damp_percent: float = 0.01


@type_checked
@dataclass
class QronosConfig(DriftRounding):
    """Qronos (arXiv 2505.11695): GPTQ on columns that are first fitted to what the float
    network computes. Not part of the documented format.
    """

    run: ClassVar[str] = "quantizer.algorithms.gptq.algorithms:qronos"

    name: str = "qronos"
    alpha: float = setting(
        1e-3,
        "Damping of the Hessian, as a share of its largest eigenvalue.",
        exclusiveMinimum=0,
        maximum=1,
    )


STEP = ConfigStep(
    "rounding",
    "a Hessian for each layer, column after column",
    (
        ConfigChange("gptq", algorithm={"name": "gptq"}),
        ConfigChange("qronos", algorithm={"name": "qronos"}),
        ConfigChange(
            "qronos with searched scales",
            algorithm={"name": "qronos", "scale_search": True, "sweeps": 4},
            most_bits=4,
        ),
    ),
    place=5,
)
