"""What `--dpu_accuracy high` gains and costs: output SQNR on data that calibration did not see,
and seconds.

    python benchmarks/bench_dpu_accuracy.py  # convolutional ones of benchmarks/networks.py
    python benchmarks/bench_dpu_accuracy.py digits

A line is a row of the table in docs/dpu.md.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from pathlib import Path

import networks
import torch

import quantizer

CONFIG = Path(__file__).parents[1] / "configs" / "dpu.json"
CONVOLUTIONAL = (
    *("digits", "digits_mobile", "mtcnn_refine", "mtcnn_output", "mobilenet_v2"),
    *("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"),
)


def figures(case: networks.Case, level: str | None) -> tuple[str, float]:
    """Output SQNR in dB, for classifiers the share of samples with the float network's class;
    seconds to calibrate.
    """
    start = time.perf_counter()
    result = quantizer.calibrate(case.model, CONFIG, case.calibration, dpu_accuracy=level)
    seconds = time.perf_counter() - start
    found = result.test(case.held_out).to_json()["metrics"]
    agreement = f", {found['top1_agreement']:.1%}" if case.is_classifier else ""
    return f"{found['sqnr_db']:.1f}{agreement}", seconds


def main() -> None:
    """A row for each network."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print("| network | `configs/dpu.json` | high | seconds |")
    print("|---|---|---|---|")
    for name in sys.argv[1:] or CONVOLUTIONAL:
        torch.manual_seed(0)
        case = networks.REAL[name]()
        (plain, before), (high, after) = (figures(case, level) for level in (None, "high"))
        print(f"| {name} | {plain} | {high} | {before:.0f}, {after:.0f} |", flush=True)


if __name__ == "__main__":
    main()
