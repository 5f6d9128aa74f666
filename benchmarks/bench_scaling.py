"""Whether cost is linear over a factor of 16 in images, layers and channels; what tracing costs
beside torch.export.

`python benchmarks/bench_scaling.py [rounds]`; one thread. Figures are processor times for each
unit, relative to those of the smallest size in the same round, so that 1 is linear and less
than 1 a fixed cost that is shared out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from bench_passes import calibration, plan
from measure import Part
from torch import Tensor, nn
from torch.export import Dim
from workloads import Llama, images, llama, resnet18, tokens

from quantizer.algorithms.gptq.settings import GPTQConfig
from quantizer.calibration.run_algorithms import load_run
from quantizer.config.model import QuantizationSpec, Settings
from quantizer.graph.passes import run_passes
from quantizer.graph.structure.find import find_structure
from quantizer.graph.tracing.trace import quiet, trace
from quantizer.layerwise.adjustment import Adjustment, Task
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch

METHODS = ("maxmin", "mse")
INT8 = QuantizationSpec(bit_width=8, qscheme="per_channel", ch_axis=0)
INT4 = QuantizationSpec(
    bit_width=4, symmetric=False, qscheme="per_group", ch_axis=1, group_size=128
)
LAYERS_TARGET, TRACE_TARGET = 4.2, 1.1
REPEATS = 16  # at most, so that small sizes take about as long as large ones
ROOT = Path(__file__).parents[1]

Call = tuple[nn.Module, tuple[Tensor, ...]]


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    print(
        "processor time a unit, relative to the smallest size (median [least .. most] of "
        f"{rounds}; one thread)"
    )
    over_images(rounds)
    over_layers(rounds)
    over_channels(rounds)
    of_tracing(rounds)


def over_images(rounds: int) -> None:
    """Calibration, all search included."""
    batches = [Batch.of(x) for x in images(64, batch=4, size=48)]
    model = plain(6)
    graph = trace(model, batches[0].args)
    for method in METHODS:
        planned = plan(run_passes(graph, Settings()), graph, method=method)
        parts = {
            4 * n: functools.partial(calibration, planned, batches[:n])
            for n in (1, 2, 4, 8, 16)
        }
        show(f"calibration, {method}, images", parts, rounds)


def over_layers(rounds: int) -> None:
    """Convolutions, and blocks of a LLaMA of which 32 are to cost little more than 4 times what
    8 cost.
    """
    batches = [Batch.of(x) for x in images(4, batch=4, size=32)]
    graphs = {n: trace(plain(n), batches[0].args) for n in (4, 8, 16, 32, 64)}
    passed = {n: run_passes(graph, Settings()) for n, graph in graphs.items()}
    for method in METHODS:
        planned = {n: plan(passed[n], graph, method=method) for n, graph in graphs.items()}
        parts = {
            n: functools.partial(calibration, each, batches) for n, each in planned.items()
        }
        show(f"calibration, {method}, blocks", parts, rounds)
    steps: dict[str, Callable[[int], object]] = {
        "passes and plan": lambda n: plan(run_passes(graphs[n], Settings()), graphs[n]),
        "plan.json": lambda n: plan(passed[n], graphs[n]).to_json(),
        "structure": lambda n: find_structure(passed[n]),
        "network": lambda n: Network(passed[n]),
    }
    for name, step in steps.items():
        show(f"{name}, blocks", {n: functools.partial(step, n) for n in graphs}, rounds)

    models = {n: Llama(100, 32, 64, n).eval() for n in (2, 8, 32)}
    tracing = {n: functools.partial(traced_and_planned, model) for n, model in models.items()}
    found = show("trace and plan, LLaMA's blocks", tracing, rounds, most=1)
    ratio = [4 * more / less for less, more in zip(found[8], found[32], strict=True)]
    print(f"  {'32 of them against 8':34}{spread(ratio)}  target {LAYERS_TARGET}", flush=True)


def over_channels(rounds: int) -> None:
    """Weights by channels and by groups; GPTQ with four tokens for each of `n` channels, for
    each of n³ operations.
    """
    weights = {
        n: torch.randn(n, 1024, generator=torch.Generator().manual_seed(n))
        for n in (128, 256, 512, 1024, 2048)
    }
    for name, spec in (("int8, output channels", INT8), ("int4 groups, output channels", INT4)):
        show(
            name,
            {n: functools.partial(rounded, spec, weight) for n, weight in weights.items()},
            rounds,
        )
    tasks = {n: gptq_task(n) for n in (128, 256, 512, 1024, 2048)}
    run = load_run("gptq")
    parts = {
        n: functools.partial(run, task, GPTQConfig(), Adjustment()) for n, task in tasks.items()
    }
    show("GPTQ, channels, an operation", parts, rounds, units=lambda n: n**3)


def of_tracing(rounds: int) -> None:
    """`trace` against one `torch.export` with an open batch, and against one with the lengths
    open, too.
    """
    print(f"\ntracing, ratio to one torch.export with an open batch; target {TRACE_TARGET}")
    for name, (model, args) in networks().items():
        graph = trace(model, args)
        parts: dict[str, Part] = {
            "batch": functools.partial(exported, model, args),
            "lengths": functools.partial(exported, model, args, lengths=True),
            "ours": functools.partial(trace, model, args),
        }
        if not graph.lengths:
            del parts["lengths"]
        found: dict[str, list[float]] = {key: [] for key in parts}
        for _ in range(rounds + 1):
            for key, part in parts.items():
                found[key].append(cost(part))
        shown = {
            key: spread(
                [ours / base for ours, base in zip(found["ours"][1:], values[1:], strict=True)]
            )
            for key, values in found.items()
            if key != "ours"
        }
        also = f"  with lengths open {shown['lengths']}" if "lengths" in shown else ""
        print(
            f"  {name:18}{statistics.median(found['batch'][1:]):6.2f} s{shown['batch']}{also}",
            flush=True,
        )


def show(
    title: str,
    parts: Mapping[int, Part],
    rounds: int,
    units: Callable[[int], int] = lambda size: size,
    most: int = REPEATS,
) -> dict[int, list[float]]:
    """Print and give for each size the cost of a unit relative to that of the smallest, in each
    round.
    """
    first, last = min(parts), max(parts)
    found: dict[int, list[float]] = {size: [] for size in parts}
    for count in range(rounds + 1):
        costs = {
            size: each(part, min(most, max(1, last // size))) / units(size)
            for size, part in parts.items()
        }
        if count:  # the round before is not counted
            for size, value in costs.items():
                found[size].append(value / costs[first])
    row = "".join(
        f"  {size}:{spread(values)}" for size, values in found.items() if size != first
    )
    print(f"  {title:34}{row}", flush=True)
    return found


def each(part: Part, repeats: int) -> float:
    """Processor time of one call, mean of several."""

    def repeated() -> None:
        for _ in range(repeats):
            part()

    return cost(repeated) / repeats


def cost(part: Part) -> float:
    """Processor time of one call; others that use the machine count less than they do on the
    wall.
    """
    started = time.process_time()
    part()
    return time.process_time() - started


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f" {statistics.median(values):4.2f} [{min(values):.2f} .. {max(values):.2f}]"


def plain(blocks: int, width: int = 16) -> nn.Module:
    """Convolutions with batch norms and ReLUs."""
    torch.manual_seed(0)
    rows: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(blocks):
        rows += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*rows).eval()


def traced_and_planned(model: nn.Module) -> None:
    """All that is known without data."""
    graph = trace(model, (torch.arange(32).view(2, 16),))
    plan(run_passes(graph, Settings()), graph)


def rounded(spec: QuantizationSpec, weight: Tensor) -> Tensor:
    """A weight on its grid, its scales included."""
    return nearest(weight, spec, nearest_qparams(spec, weight))


def gptq_task(width: int) -> Task:
    """One square linear layer."""
    torch.manual_seed(width)
    batches = [Batch.of(torch.randn(4, width, width))]
    graph = trace(nn.Sequential(nn.Linear(width, width, bias=False)).eval(), batches[0].args)
    specs = {(node.name, "weights"): INT4 for node in graph.nodes if node.op == "linear"}
    return Task(graph, specs, find_structure(graph), lambda: batches)


def networks() -> dict[str, Call]:
    """What is traced: the models of the examples and benchmarks, and two of the tests'
    architectures.
    """
    found: dict[str, Call] = {"ResNet-18": (resnet18(), (images(2)[0],))}
    sys.path += [str(ROOT / folder) for folder in ("examples", "tests", "tests/architectures")]
    try:
        network = importlib.import_module("efficientnet_lite").model().eval()
        found["EfficientNet-Lite0"] = (network, (images(2)[0],))
    except ImportError:
        pass
    found["LLaMA"] = (llama(), (torch.cat(tokens(2)),))
    for module, case, name in (
        ("attention", "bert", "like BERT"),
        ("dense", "yolo", "like YOLO"),
    ):
        importlib.import_module(module)
        made = importlib.import_module("harness").CASES[case]()
        found[name] = (made.module, made.batches[0])
    return found


@torch.no_grad()
def exported(model: nn.Module, args: tuple[Tensor, ...], lengths: bool = False) -> None:
    """One `torch.export` with the batch open, and with `lengths` the second axes of integers,
    too.
    """
    batch = Dim("batch", min=1)
    more: dict[int, Any] = {1: Dim.AUTO} if lengths else {}
    shapes = [{0: batch, **({} if x.is_floating_point() else more)} for x in args]
    inputs = tuple(x[:2].clone() for x in args)
    with quiet():
        torch.export.export(model, inputs, dynamic_shapes=_by_name(model, shapes))


def _by_name(model: nn.Module, shapes: list[dict[int, Any]]) -> dict[str, Any]:
    """By the parameters of `forward`, so that `*args` is one tuple."""
    return dict(inspect.signature(model.forward).bind(*shapes).arguments)


if __name__ == "__main__":
    main()
