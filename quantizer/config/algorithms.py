"""The table of algorithms that a config may list. A row is a dataclass of settings with the
field names of the file.

Source of names, order and defaults (but that of `static_groups`) in SmoothQuantConfig,
AWQConfig and GPTQConfig, up to additions: AMD Quark for PyTorch,
`quark.torch.quantization.config.config`. Imports no torch.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from quantizer.config.algorithm_settings import (
    ALGORITHMS,
    SHARED_SETTINGS,
    AlgoConfig,
    PreQuantOptConfig,
    Setting,
    algorithm,
    setting,
)
from quantizer.config.forms.form import Form
from quantizer.config.typed_fields import type_checked

__all__ = ["ALGORITHMS", "SWITCHES", "AlgoConfig", "PreQuantOptConfig", "algorithm", "setting"]
"""What a row in another file needs."""

_IGNORED = "The weights' specification decides; another value only draws a warning."
_ONLINE = (
    "Whether an operator divides the inputs of layers where no layer before them can. "
    "Checkpoints have no place for it; with false, such layers keep their inputs."
)
MAX_SEED = 2**64 - 1
"""The largest seed that torch's generators and result folders take."""
_HEADS = Setting(
    "Of older files; not read.",
    unread="heads are found on the graph",
    keywords={"minimum": -1, "title": "heads"},
)
_LAYERS = {"items": {"title": "layer", "type": "string", "minLength": 1}, "uniqueItems": True}

SHARED_SETTINGS |= {
    "bit": Setting(
        f"Bits of the weights. {_IGNORED}",
        decided_by="bit_width",
        keywords={"minimum": 2, "maximum": 16},
    ),
    "sym": Setting(
        f"Whether weights are quantized symmetrically. {_IGNORED}", decided_by="symmetric"
    ),
    "group_size": Setting(
        f"Weights per scale, -1 for a whole row. {_IGNORED}",
        decided_by="group_size",
        keywords={"minimum": -1},
    ),
    "algo_processor": Setting(
        "The class that runs the algorithm; not read.",
        unread="an algorithm is run by a function of its own",
    ),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "model_decoder_layers": Setting(
        "The module that holds the decoder's blocks, such as model.layers; null: found on the "
        "graph."
    ),
    "inside_layer_modules": Setting(
        "Names of the layers of a block, relative to it, in the order in which they are "
        "rounded; null or []: found on the graph.",
        keywords=_LAYERS,
    ),
    "scaling_layers": Setting(
        "Which layers are scaled together; null or []: found on the graph.",
        keywords={"items": {"$ref": "#/definitions/scaling_layer"}},
    ),
    "embedding_layers": Setting(
        "Names of embedding layers; they have to exist, and nothing else is done with them.",
        keywords=_LAYERS,
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


@algorithm(
    run="quantizer.algorithms.smoothquant:smoothquant",
    stage="rescale",
    aliases=["smooth"],
    eases_activations=True,
)
@dataclass
class SmoothQuantConfig(PreQuantOptConfig):
    """SmoothQuant (arXiv 2211.10438): the range of activations is moved into the weights; the
    float network computes the same.
    """

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
    online: bool = setting(True, _ONLINE)


@algorithm(
    run="quantizer.algorithms.rotation:rotation",
    stage="rescale",
    needs_data=False,
    aliases=["quarot"],
)
@dataclass
class RotationConfig(PreQuantOptConfig):
    """Rotation (QuaRot, arXiv 2404.00456): activations are multiplied by Hadamard matrices,
    which spread outliers over all channels; the float network computes the same. Not part of
    the documented format.
    """

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


@algorithm(run="quantizer.algorithms.awq:awq", stage="rescale", matrices=3)
@dataclass
class AWQConfig(AlgoConfig):
    """AWQ (arXiv 2306.00978): input channels that matter are scaled up before weights are
    rounded, and ranges are clipped.
    """

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
    online: bool = setting(True, _ONLINE)
    num_attention_heads: int = -1
    num_key_value_heads: int = -1


class ColumnRounding(AlgoConfig):
    """Settings of GPTQ and its kin, which round a weight column by column."""

    # Where the algorithm has another damping
    damp_percent: float = 0.0
    desc_act: bool
    static_groups: bool
    true_sequential: bool
    block_size: int
    scale_search: bool
    sweeps: int
    guidance: float


@algorithm(run="quantizer.algorithms.gptq.algorithms:gptq", stage="round", matrices=5)
@dataclass
class GPTQConfig(ColumnRounding):
    """GPTQ (arXiv 2210.17323): weights are rounded one column after another, each making up for
    the error of those before.
    """

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


@algorithm(
    run="quantizer.algorithms.gptq.algorithms:gptaq", stage="round", matrices=7, networks=2
)
@dataclass
class GPTAQConfig(DriftRounding):
    """GPTAQ (arXiv 2504.02692): GPTQ that also makes up for the error of a layer's inputs. Not
    part of the documented format.
    """

    name: str = "gptaq"
    alpha: float = setting(
        0.25,
        "The share of the inputs' error that is made up for, 0 to 1; 0 is GPTQ.",
        minimum=0,
        maximum=1,
    )
    damp_percent: float = 0.01


@algorithm(
    run="quantizer.algorithms.gptq.algorithms:qronos", stage="round", matrices=7, networks=2
)
@dataclass
class QronosConfig(DriftRounding):
    """Qronos (arXiv 2505.11695): GPTQ on columns that are first fitted to what the float
    network computes. Not part of the documented format.
    """

    name: str = "qronos"
    alpha: float = setting(
        1e-3,
        "Damping of the Hessian, as a share of its largest eigenvalue.",
        exclusiveMinimum=0,
        maximum=1,
    )


@algorithm(run="quantizer.algorithms.imatrix:imatrix", stage="round", needs_groups=True)
@dataclass
class IMatrixConfig(AlgoConfig):
    """Importance matrix, as in llama.cpp: the scales of groups are searched with each weight's
    squared error times the mean square of its input. It is for q4_k, q5_k, q6_k, iq4_nl, and
    symmetric integers in groups. Not part of the documented format.
    """

    name: str = "imatrix"


def _only(value: Any, why: str) -> dict[str, Any]:
    """Return the keywords of a setting that has one value here and more in other tools."""
    remedy = "remove the key"
    if value is not None:
        remedy = f"write {json.dumps(value)}, or remove the key"
    return {"enum": [value], "code": "QZ118", "errorMessage": why, "help": remedy}


@type_checked
@dataclass
class CLEConfig(PreQuantOptConfig):
    """Cross-layer equalization (arXiv 1906.04721): the channels of a layer and of the next one
    get equal ranges; the float network computes the same.

    What `include_cle` is in the layered form. It comes before all algorithms, so it is the
    first of its list.

    Source of the names: AMD Quark, `CLEConfig`.
    """

    switch: ClassVar[str] = "include_cle"

    name: str = "cle"
    cle_balance_method: Literal["max"] = setting(
        "max",
        "What a channel's range is: its largest magnitude.",
        **_only("max", "cle_balance_method: a channel's range is its largest magnitude, max"),
    )
    cle_steps: int = setting(
        -1,
        "How often all pairs of layers are equalized: -1, until no factor changes by more "
        "than a percent.",
        **_only(
            -1,
            "cle_steps: pairs of layers are equalized until no factor changes by more than a "
            "percent, -1",
        ),
    )
    cle_scale_append_bias: bool = setting(
        True,
        "Whether the range of outputs, which a folded norm or the bias promises, counts as "
        "that of the weights does.",
        **_only(True, "cle_scale_append_bias: the range of a channel's outputs always counts"),
    )
    cle_scale_use_threshold: bool = setting(
        False,
        "Whether channels with small weights keep them.",
        **_only(
            False, "cle_scale_use_threshold: channels with small weights are equalized, too"
        ),
    )
    cle_weight_threshold: float | None = setting(
        None,
        "Which weights are small; there is no such threshold.",
        **_only(
            None, "cle_weight_threshold: no threshold keeps a channel from being equalized"
        ),
    )
    cle_total_layer_diff_threshold: float | None = setting(
        None,
        "When there is nothing more to do; that is a percent, for any number of layers.",
        **_only(
            None,
            "cle_total_layer_diff_threshold: equalization ends when no factor changes by more "
            "than a percent",
        ),
    )


SWITCHES: dict[str, type[AlgoConfig]] = {CLEConfig().name: CLEConfig}
"""The algorithms of the hierarchical form that are passes over the graph."""


def entry_kinds(form: Form) -> dict[str, type[AlgoConfig]]:
    """Return what the lists of a form may hold, by name. The layered form has switches for
    `SWITCHES`.
    """
    return ALGORITHMS | SWITCHES if form == "hierarchical" else dict(ALGORITHMS)
