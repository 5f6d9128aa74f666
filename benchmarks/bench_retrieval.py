"""A sentence encoder under five configs: output SQNR, and how well it still finds the text to a
sentence.

    python benchmarks/bench_retrieval.py  # benchmarks/networks.py says what to install

Of 200 docstrings the first sentence is to find the rest of its own: the mean reciprocal rank
(MRR) by cosine. A line is a row of the table in docs/ranges.md.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import networks
import torch
from torch import Tensor
from torch.nn.functional import normalize

import quantizer

PRESETS = Path(__file__).parents[1] / "configs"
WEIGHT = {
    "dtype": "int8",
    "qscheme": "per_channel",
    "ch_axis": 0,
    "observer_cls": "PerChannelMinMaxObserver",
}
STATIC = {
    "weight": WEIGHT,
    "input_tensors": {
        "dtype": "uint8",
        "symmetric": False,
        "observer_cls": "PerTensorMinMaxObserver",
    },
}
DYNAMIC = {
    "weight": WEIGHT,
    "input_tensors": {"dtype": "int8", "qscheme": "per_token", "is_dynamic": True},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "`configs/cpu_int8.json`": json.loads((PRESETS / "cpu_int8.json").read_text("utf-8")),
    "hierarchical, static, maxmin": {"global_quant_config": STATIC},
    "hierarchical, static, maxmin, SmoothQuant": {
        "global_quant_config": STATIC,
        "pre_quant_opt_config": {"name": "smoothquant"},
    },
    "hierarchical, dynamic per token": {"global_quant_config": DYNAMIC},
    "hierarchical, dynamic per token, SmoothQuant": {
        "global_quant_config": DYNAMIC,
        "pre_quant_opt_config": {"name": "smoothquant"},
    },
}


@torch.no_grad()
def mean_reciprocal_rank(
    encode: Callable[..., Tensor], batches: list[Mapping[str, Tensor]]
) -> float:
    """Of the first half of all sentences, each beside its text in the second half."""
    questions, texts = torch.cat(
        [normalize(encode(**batch), dim=-1) for batch in batches]
    ).chunk(2)
    near = questions @ texts.T
    ranks = (near >= near.diagonal()[:, None]).sum(1)
    return float((1 / ranks).mean())


def main() -> None:
    """A row for each config."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    case = networks.REAL["minilm"]()
    print("| config | SQNR | MRR |")
    print("|---|---|---|")
    print(f"| float | | {mean_reciprocal_rank(case.model, case.held_out):.3f} |")
    for name, config in CONFIGS.items():
        found = quantizer.calibrate(case.model, config, case.calibration)
        figure = found.test(case.held_out).to_json()["metrics"]["sqnr_db"]
        print(
            f"| {name} | {figure:.1f} dB | "
            f"{mean_reciprocal_rank(found.network, case.held_out):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
