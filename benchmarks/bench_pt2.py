"""What a `.pt2` with integer weights costs: compiled by torch against the compiled float model,
and as it is against test mode.

`python benchmarks/bench_pt2.py [rounds]`; the digits in batches of 100, and three linear layers
of 2048 with 64 rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch._inductor.config
import torch.ao.quantization.fx._decomposed
from measure import ratios, report
from torch import Tensor, nn

import quantizer
from quantizer.sources.models import load_model

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "cpu_int8.json"
EAGER, COMPILED = 1.0, 1.0
"""Targets: no slower than test mode, no slower than float."""


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    torch._inductor.config.freezing = True
    digits = load_model(str(ROOT / "examples" / "digits.py"))
    assert digits.calibration_data
    images = torch.cat([item[0] for item in digits.calibration_data()])[:100]
    torch.manual_seed(0)
    measure("digits", digits.module.eval(), images, rounds)
    measure("linear", mlp(), torch.randn(64, 2048), rounds)


def mlp() -> nn.Module:
    """Three linear layers."""
    layers = [
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
    ]
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def measure(name: str, model: nn.Module, x: Tensor, rounds: int) -> None:
    """Calibrate on the batch that is then timed, and compare."""
    result = quantizer.calibrate(model, CONFIG, [x])
    with TemporaryDirectory() as folder:
        result.export("pt2", Path(folder) / "net.pt2")
        result.export("pt2_float", Path(folder) / "net.float.pt2")
        programs = {form: load(Path(folder) / f"net{form}.pt2") for form in ("", ".float")}
    network, compiled = result.network, torch.compile(programs[""])
    eager = {"pt2": call(programs[""], x), "pt2_float": call(programs[".float"], x)}
    report(
        f"{name}: the program as it is, ratio to test mode",
        ratios(call(network, x), eager, rounds),
        dict.fromkeys(eager, EAGER),
        {},
    )
    parts = {"pt2": call(compiled, x), "test mode": call(network, x)}
    equal = float((network(x) == compiled(x)).float().mean())
    report(
        f"{name}: compiled with freezing, ratio to the compiled float model",
        ratios(call(torch.compile(model), x), parts, rounds),
        dict.fromkeys(parts, COMPILED),
        {"pt2": f"{equal:.1%} of the outputs are test mode's", "test mode": "not compiled"},
    )


def load(path: Path) -> nn.Module:
    """The program of a file."""
    return torch.export.load(path).module()


def call(module: Callable[..., Any], x: Tensor) -> Callable[[], object]:
    """A part to be timed."""
    return functools.partial(module, x)


if __name__ == "__main__":
    main()
