"""The same jobs by this package and by public ones: time, memory and error, each as a whole
process, in turns.

`python benchmarks/bench_peers.py [rounds] [--python NAME=PATH …] [--job NAME]`. Packages that
want an environment of their own are run by its interpreter: `--python
amd-quark=envs/quark/bin/python`; NAME is what pip installs. A process counts from its start to
the quantized network, imports included; memory is its peak over the import of torch. One more
round before is not counted: some compile at their first use.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from layer_errors import layer_errors
from peer_job import OURS, build
from peers import LANGUAGE_PEERS
from torch import Tensor, nn
from vision_peers import VISION_PEERS
from workloads import images, llama, resnet18, tokens

HERE = Path(__file__).parent
OTHERS = ("quark GPTAQ", "quark Qronos", "AutoRound", "neural-compressor AWQ", "quark AWQ")
"""What is run with `--all` alone, as it is not GPTQ."""
PACKAGES = {
    "torchao": "torchao==0.18.0",
    "nncf": "nncf==3.4.0 ninja",
    "onnxruntime": "onnx==1.23.2 onnxruntime==1.31.1 onnxscript==0.7.2",
    "amd-quark": "amd-quark==0.13 transformers onnx",
    "llmcompressor": "llmcompressor==0.14.0.1 transformers==5.17.0",
    "auto-round": "auto-round==0.16.1",
    "neural-compressor-pt": "neural-compressor-pt==3.10 transformers==5.17.0",
}
JOBS = ("ResNet-18", "EfficientNet-Lite0", "LLaMA")


@dataclass
class Runs:
    """What one tool's processes said; `failure` if one failed."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""


def main() -> None:
    """Write the jobs' files, run them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--python", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--job", choices=JOBS, action="append", help="these alone")
    parser.add_argument("--all", action="store_true", help="algorithms other than GPTQ, too")
    given = parser.parse_args()
    pythons = {
        name: str(Path(path).absolute())
        for name, _, path in (each.partition("=") for each in given.python)
    }
    missing: set[str] = set()
    print(
        f"{'job':19}{'tool':35}{'wall s':>22}{'CPU s':>8}{'ratio':>7}{'of CPU':>8}"
        f"{'memory MB':>11}  error"
    )
    for job in given.job or JOBS:
        peers = LANGUAGE_PEERS if job == "LLaMA" else VISION_PEERS
        tools = {
            name: sys.executable for name in OURS if (name == "ours, GPTQ") == (job == "LLaMA")
        }
        for name, peer in peers.items():
            python = pythons.get(peer.package, sys.executable)
            if name in OTHERS and not given.all:
                continue
            if has(python, peer.package):
                tools[name] = python
            else:
                missing.add(peer.package)
        with tempfile.TemporaryDirectory() as place:
            measure(job, tools, Path(place), given.rounds)
    for name in sorted(missing):
        print(
            f"not installed: {name}: pip install torch=={torch.__version__.partition('+')[0]} "
            f"{PACKAGES[name]}"
        )


def has(python: str, package: str) -> bool:
    """Whether an interpreter finds the package."""
    asked = f"import importlib.metadata as m; m.version({package!r})"
    return (
        subprocess.run([python, "-c", asked], capture_output=True, check=False).returncode == 0
    )


def measure(job: str, tools: dict[str, str], folder: Path, rounds: int) -> None:
    """Run one job with all tools in turns, and print its rows."""
    try:
        model, work = inputs(job)
    except ImportError as error:
        print(f"{job:19}left out: {error}")
        return
    torch.save(work, folder / f"{job}.pt")
    found = {tool: Runs() for tool in tools}
    for count in range(rounds + 1):
        for tool, python in tools.items():
            if not found[tool].failure:
                run(tool, python, job, folder, found[tool], counted=count > 0)
    with torch.no_grad():
        expected = [model(x) for x in work["heldout"]]
    base = next(iter(found.values()))
    for tool, runs in found.items():
        print(f"{job:19}" + row(tool, runs, base, model, expected, work["heldout"]), flush=True)


def inputs(job: str) -> tuple[nn.Module, dict[str, Any]]:
    """The float network, and what its job's file holds: weights, data to calibrate on, and
    held-out data.

    Raises:
        ImportError: a package that has the network is missing.
    """
    if job == "LLaMA":
        model: nn.Module = llama()
        work: dict[str, Any] = {"data": tokens(), "heldout": tokens(8, seed=77)}
    elif job == "ResNet-18":
        model, work = resnet18(), {"data": images(), "heldout": images(20, seed=5)}
    else:
        sys.path.append(str(HERE.parent / "examples"))
        example = importlib.import_module("efficientnet_lite")
        model = build(job)
        model.load_state_dict(example.model().state_dict())
        data = example.calibration_data()
        photos = torch.split(torch.cat([x for x, _ in example.evaluation_data()]), len(data[0]))
        work = {"data": data, "heldout": photos[:2]}  # some tools fix the size of a batch
    work["data"], work["heldout"] = (
        [x.clone() for x in work[key]] for key in ("data", "heldout")
    )
    return model.eval(), work | {"weights": model.state_dict()}


def run(tool: str, python: str, job: str, folder: Path, runs: Runs, *, counted: bool) -> None:
    """One process."""
    (folder / "result.pt").unlink(missing_ok=True)
    # Some call programs of their environment
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "PYTHONWARNINGS": "ignore",
        "NNCF_EXTENSION_LOAD_TIMEOUT": "600",
    }
    command = [python, str(HERE / "peer_job.py"), tool, job, str(folder), str(time.time())]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    if ended.returncode:
        runs.failure = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[
            -1
        ]
    elif counted:
        runs.rows.append(torch.load(folder / "result.pt", weights_only=True))


def row(
    tool: str,
    runs: Runs,
    base: Runs,
    model: nn.Module,
    expected: list[Tensor],
    heldout: list[Tensor],
) -> str:
    """Medians and the spread; ratios are to ours of the same round."""
    if runs.failure or not base.rows:
        return f"{tool:35}failed: {runs.failure[:150]}"
    wall, cpu = ([each[key] for each in runs.rows] for key in ("wall", "cpu"))
    pairs = list(zip(runs.rows, base.rows, strict=True))
    ratio, of_cpu = (
        statistics.median(one[key] / our[key] for one, our in pairs) for key in ("wall", "cpu")
    )
    last, memory = runs.rows[-1], statistics.median(each["memory"] for each in runs.rows)
    named = f"{tool} ({last['version']})"
    shown = f"{statistics.median(wall):.1f} [{min(wall):.1f} .. {max(wall):.1f}]"
    figures = f"{shown:>22}{statistics.median(cpu):8.1f}{ratio:7.2f}{of_cpu:8.2f}{memory:11.0f}"
    text = f"logits {error(expected, last['logits']):.5f}"
    if last.get("layers"):
        layers = layer_errors(model, last["layers"], heldout)
        text += f", layers {statistics.mean(layers.values()):.5f}"
    return f"{named:35}{figures}  {text}"


def error(expected: list[Tensor], found: list[Tensor]) -> float:
    """Squared error as a share of the float outputs' variance."""
    want, got = torch.cat(expected), torch.cat(found)
    return float((got - want).square().sum() / (want - want.mean()).square().sum())


if __name__ == "__main__":
    main()
