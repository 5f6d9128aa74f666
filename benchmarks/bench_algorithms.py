"""W4: what algorithms cost on a small LLaMA at 4 bits, as ratios to a float pass, and the error
that they leave.

`python benchmarks/bench_algorithms.py [rounds [GPTQ …]]`; 32 sequences of 256 tokens,
asymmetric groups of 128 weights, all linear layers of the decoder, two threads. Errors are on 8
other sequences: of the layers' outputs (mean over layers), as a share of round-to-nearest's,
and of the logits.
"""

from __future__ import annotations

import functools
import statistics
import sys

import torch
from layer_errors import layer_errors, logits_error
from measure import Part, peak_mb, ratios, report
from torch import nn
from workloads import llama, tokens

from quantizer.algorithms.awq.settings import AWQConfig
from quantizer.algorithms.gptq.settings import GPTAQConfig, GPTQConfig, QronosConfig
from quantizer.algorithms.smoothquant.settings import SmoothQuantConfig
from quantizer.calibration.run_algorithms import load_run
from quantizer.config.algorithms import AlgoConfig
from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.graph.structure.find import find_structure
from quantizer.graph.tracing.trace import trace
from quantizer.layerwise.adjustment import Adjustment, Task, apply_adjustment
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch

SPEC = QuantizationSpec(
    bit_width=4, symmetric=False, qscheme="per_group", ch_axis=1, group_size=128
)
ROWS: dict[str, tuple[AlgoConfig, float]] = {
    "GPTQ": (GPTQConfig(), 1.5),
    "GPTAQ": (GPTAQConfig(), 6.4),
    "Qronos": (QronosConfig(), 6.4),
    "AWQ": (AWQConfig(), 2.2),
    "SmoothQuant": (SmoothQuantConfig(alpha=0.5), 2.0),
}
"""Settings, and the ratio that is not to be exceeded."""


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(2)
    model, batches = llama(), [Batch((x,), {}, None, x) for x in tokens()]
    graph = trace(model, batches[0].args)
    layers = [
        node.name for node in graph.nodes if node.op == "linear" and "lm_head" not in node.name
    ]
    specs = {(name, "weights"): SPEC for name in layers}
    task = Task(graph, specs, find_structure(graph), lambda: batches)
    chosen = {name: ROWS[name] for name in sys.argv[2:] or ROWS}
    parts: dict[str, Part] = {
        name: functools.partial(run, task, settings) for name, (settings, _) in chosen.items()
    }
    float_pass = functools.partial(run_model, model, batches)
    base = peak_mb(float_pass)
    print(f"round-to-nearest: {errors(model, task, Adjustment())}")
    extra = {name: f"memory {peak_mb(part) - base:+.0f} MB" for name, part in parts.items()}
    for name, (settings, _) in chosen.items():
        extra[name] += f", {errors(model, task, run(task, settings))}"
    targets = {name: target for name, (_, target) in chosen.items()}
    report(
        "W4 algorithms, ratio to the float pass",
        ratios(float_pass, parts, rounds),
        targets,
        extra,
    )


def run(task: Task, settings: AlgoConfig) -> Adjustment:
    """The whole algorithm, from the traced graph on."""
    return load_run(settings.name)(task, settings, Adjustment())


@torch.no_grad()
def run_model(model: nn.Module, batches: list[Batch]) -> None:
    """One pass over the data."""
    for batch in batches:
        model(*batch.args)


def errors(model: nn.Module, task: Task, found: Adjustment) -> str:
    """The error that is left, with round-to-nearest where nothing was rounded, and the share of
    round-to-nearest's.
    """
    graph = rounded(task, found)
    text = f"logits {logits_error(model, Network(graph), tokens(8, seed=77)):.4f}"
    if found.parameters:
        return text  # inputs are others too, so that the layers' outputs do not compare
    left, plain = (
        mean_error(model, task, graph),
        mean_error(model, task, rounded(task, Adjustment())),
    )
    return f"layers {left:.5f}, {left / plain:.3f} of round-to-nearest, {text}"


def mean_error(model: nn.Module, task: Task, graph: Graph) -> float:
    """Error of the layers' outputs, mean over layers."""
    paths = {
        name: task.graph.by_name[name].params["weight"].removesuffix(".weight")
        for name, _ in task.specs
    }
    weights = {path: weight(graph, name) for name, path in paths.items()}
    return statistics.mean(layer_errors(model, weights, tokens(8, seed=77)).values())


def rounded(task: Task, found: Adjustment) -> Graph:
    """The graph with all planned weights on their grids."""
    graph = apply_adjustment(task.graph, found)
    found_weights = {name: {"weight": layer.weight} for name, layer in found.rounded.items()}
    left = {name: weight(graph, name) for name, _ in task.specs if name not in found.rounded}
    plain = {
        name: {"weight": nearest(w, SPEC, nearest_qparams(SPEC, w))} for name, w in left.items()
    }
    return with_weights(graph, found_weights | plain)


def weight(graph: Graph, name: str) -> torch.Tensor:
    """A layer's weight."""
    return graph.tensors[graph.by_name[name].params["weight"]]


if __name__ == "__main__":
    main()
