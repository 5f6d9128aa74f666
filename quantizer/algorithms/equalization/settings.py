"""The settings of cross-layer equalization. Imports no torch."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from quantizer.config.algorithms import ConfigChange, ConfigStep, PreQuantOptConfig, setting
from quantizer.config.typed_fields import type_checked


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


STEP = ConfigStep(
    "equalization",
    "a calibration; nothing at run time",
    (ConfigChange("neighbouring layers equalized", algorithm={"name": "cle"}),),
    place=2,
)
