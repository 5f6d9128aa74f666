"""What calibration and the quantized pass of ResNet-18 cost on a GPU, as ratios to the float
pass there.

`python benchmarks/bench_device.py [rounds]`; 100 images of 224x224 in batches of 10. Without a
GPU it says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from bench_passes import METHODS, ROUND_MODES, calibration, plan, quantized, run
from measure import ratios, report
from workloads import images, resnet18

from quantizer.config.model import Settings
from quantizer.graph.parameters import placed
from quantizer.graph.passes import run_passes
from quantizer.graph.trace import trace
from quantizer.sources.batches import Batch


def main() -> None:
    """Measure and print."""
    if not torch.cuda.is_available():
        print("bench_device measures a GPU, and torch finds no CUDA device here")
        return
    rounds, device = int(sys.argv[1]) if len(sys.argv) > 1 else 5, torch.device("cuda:0")
    torch.backends.cudnn.allow_tf32 = False
    model, batches = (
        resnet18().to(device),
        [Batch((x,), {}, None, x).to(device) for x in images()],
    )
    original = trace(model, batches[0].args)
    graph = run_passes(original, Settings())
    float_pass = finished(functools.partial(run, model, batches))
    print(torch.cuda.get_device_name(device))

    parts: dict[str, Callable[[], object]] = {
        name: finished(
            functools.partial(calibration, plan(graph, original, method=name), batches)
        )
        for name in METHODS
    }
    memory = {name: peak(part) for name, part in {"float": float_pass, **parts}.items()}
    report(
        "calibration, all search included, ratio to the float pass",
        ratios(float_pass, parts, rounds),
        METHODS,
        memory,
    )

    parts = {}
    for name in ROUND_MODES:
        network = placed(quantized(plan(graph, original, round_mode=name), batches[:2]), device)
        parts[name] = finished(functools.partial(run, network, batches))
    memory = {name: peak(part) for name, part in parts.items()}
    report(
        "quantized pass of test mode, ratio to the float pass",
        ratios(float_pass, parts, rounds),
        ROUND_MODES,
        memory,
    )


def finished(part: Callable[[], object]) -> Callable[[], object]:
    """The part, which waits for the device."""

    def waiting() -> object:
        found = part()
        torch.cuda.synchronize()
        return found

    return waiting


def peak(part: Callable[[], object]) -> str:
    """The most memory of the device that is in use while a part runs."""
    torch.cuda.reset_peak_memory_stats()
    part()
    return f"memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MB"


if __name__ == "__main__":
    main()
