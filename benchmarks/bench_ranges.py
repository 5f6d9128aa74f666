"""How activations' ranges are best found: output SQNR of W8A8 on data that calibration did not
see, method by method.

    python benchmarks/bench_ranges.py  # all of networks.py, which says what to install
    python benchmarks/bench_ranges.py minilm digits

Everything but the method is as in configs/cpu_int8.json. A line is a row of the table in
docs/ranges.md.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import networks
import torch

import quantizer

PRESET = json.loads(
    (Path(__file__).parents[1] / "configs" / "cpu_int8.json").read_text("utf-8")
)
SYMMETRIC = {"symmetry": True, "signed": True}
METHODS: dict[str, dict[str, Any]] = {
    "auto": {"method": "auto"},
    "maxmin, max": {"method": "maxmin", "calib_statistic_method": "max"},
    "maxmin, mean": {"method": "maxmin", "calib_statistic_method": "mean"},
    "percentile 99.999, mean": {
        "method": "percentile",
        "percentage": 99.999,
        "calib_statistic_method": "mean",
    },
    "percentile 99.99, max": {
        "method": "percentile",
        "percentage": 99.99,
        "calib_statistic_method": "max",
    },
    "mse, max": {"method": "mse", "calib_statistic_method": "max", **SYMMETRIC},
    "entropy, max": {"method": "entropy", "calib_statistic_method": "max", **SYMMETRIC},
}


def config(words: Mapping[str, Any]) -> dict[str, Any]:
    """The preset with another method for activations."""
    found: dict[str, Any] = copy.deepcopy(
        {key: value for key, value in PRESET.items() if key not in ("$schema", "//")}
    )
    activation = found["tensor_quantize_config"]["activation"]
    activation.pop("percentage", None)
    activation |= words
    return found


def figures(case: networks.Case, words: Mapping[str, Any]) -> str:
    """Output SQNR in dB, and for classifiers the share of samples with the float network's
    class.
    """
    found = (
        quantizer.calibrate(case.model, config(words), case.calibration)
        .test(case.held_out)
        .to_json()["metrics"]
    )
    agreement = f", {found['top1_agreement']:.1%}" if case.is_classifier else ""
    return f"{found['sqnr_db']:.1f}{agreement}"


def main() -> None:
    """A row for each network."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = {**networks.RANDOM, **networks.REAL}
    names = sys.argv[1:] or [*networks.REAL, *networks.RANDOM]
    print("| network |", " | ".join(METHODS), "|")
    print("|---|" + "---|" * len(METHODS))
    for name in names:
        torch.manual_seed(0)
        case = table[name]()
        print(
            f"| {name} |",
            " | ".join(figures(case, words) for words in METHODS.values()),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
