"""W1 to W3: what calibration, the quantized pass and the corrections of ResNet-18 cost, as
ratios.

`python benchmarks/bench_passes.py [rounds]`; 100 images of 224x224 in batches of 10, two
threads. Memory that glibc keeps for later moves the peaks by 100 MB from run to run. For
figures of memory that repeat, and no times, set MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=65536
MALLOC_TRIM_THRESHOLD_=65536.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from measure import peak_mb, ratios, report
from workloads import images, resnet18

from quantizer.algorithms.bias_correction.bias_correction import (
    correct_layer_biases,
    output_steps,
)
from quantizer.calibration import observing
from quantizer.calibration.solution import quantized_network
from quantizer.config.diagnostics import Sourced
from quantizer.config.model import ROLES, ConfigRule, ResolvedConfig, Selector, Settings
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.layerwise.sequential_runner import SequentialRunner
from quantizer.nn.layer import weights_last
from quantizer.nn.network import Network
from quantizer.plan.model import Plan
from quantizer.plan.resolve import resolve_plan
from quantizer.sources.batches import Batch

SETTINGS = Settings()
METHODS = {"maxmin": 0.92, "percentile": 1.0, "entropy": 1.0, "mse": 1.0, "diffs": 1.0}
ROUND_MODES = {"half_even": 0.92, "half_up": 0.92}
CORRECTIONS = {
    "equalization": (Settings(include_cle=True), 1.1),
    "bias corr": (Settings(include_bias_corr=True), 1.6),
    "both": (Settings(include_cle=True, include_bias_corr=True), 1.7),
}


def main() -> None:
    """Measure both and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(2)
    model, batches = resnet18(), [Batch((x,), {}, None, x) for x in images()]
    original = trace(model, batches[0].args)
    graph = run_passes(original, Settings())
    float_pass = functools.partial(run, model, batches)

    parts: dict[str, Callable[[], object]] = {
        name: functools.partial(calibration, plan(graph, original, method=name), batches)
        for name in METHODS
    }
    base = peak_mb(float_pass)
    memory = {name: f"memory {peak_mb(part) - base:+.0f} MB" for name, part in parts.items()}
    report(
        "W1 calibration, all search included, ratio to the float pass",
        ratios(float_pass, parts, rounds),
        METHODS,
        memory,
    )

    parts = {
        name: functools.partial(
            run, quantized(plan(graph, original, round_mode=name), batches[:2]), batches
        )
        for name in ROUND_MODES
    }
    memory = {name: f"memory {peak_mb(part) - base:+.0f} MB" for name, part in parts.items()}
    report(
        "W2 quantized pass of test mode, ratio to the float pass",
        ratios(float_pass, parts, rounds),
        ROUND_MODES,
        memory,
    )
    corrections(original, batches, rounds)


def corrections(original: Graph, batches: list[Batch], rounds: int) -> None:
    """Measure and print what equalization and bias correction add to a calibration."""
    plain = functools.partial(corrected, original, Settings(), batches)
    parts: dict[str, Callable[[], object]] = {
        name: functools.partial(corrected, original, row[0], batches)
        for name, row in CORRECTIONS.items()
    }
    base = peak_mb(plain)
    memory = {name: f"memory {peak_mb(part) - base:+.0f} MB" for name, part in parts.items()}
    report(
        "W3 calibration with corrections, ratio to calibration without them",
        ratios(plain, parts, rounds),
        {name: target for name, (_, target) in CORRECTIONS.items()},
        memory,
    )


def plan(graph: Graph, original: Graph, settings: Settings = SETTINGS, **fields: str) -> Plan:
    """All tensors in int8 with these fields; diffs needs powers of two, and they go with
    modal.
    """
    if fields.get("method") == "diffs":
        fields |= {"scale_type": "poweroftwo", "statistic": "modal"}
    values = {name: Sourced(value) for name, value in fields.items()}
    rule = ConfigRule(
        Selector("all"), "overall", frozenset(ROLES), fields=dict.fromkeys(ROLES, values)
    )
    return resolve_plan(ResolvedConfig(settings, (rule,)), graph, original)


def calibration(planned: Plan, batches: list[Batch]) -> object:
    """Everything from the float graph to scales."""
    network = weights_last(Network(planned.graph))
    found = observing.create_observers(planned)
    observing.observe_batches(found, network, batches)
    return observing.observed_solution(found)


def corrected(original: Graph, settings: Settings, batches: list[Batch]) -> None:
    """Everything from the traced graph to scales and bias corrections."""
    planned = plan(run_passes(original, settings), original, settings)
    network = weights_last(Network(planned.graph))
    found = observing.create_observers(planned)
    observing.observe_batches(found, network, batches)
    solution = observing.observed_solution(found)
    if found.means:
        runner = SequentialRunner(quantized_network(planned.graph, solution), batches)
        correct_layer_biases(runner, found.means, output_steps(planned, solution))


def quantized(planned: Plan, batches: list[Batch]) -> Network:
    """The network of test mode."""
    network = weights_last(Network(planned.graph))
    found = observing.create_observers(planned)
    observing.observe_batches(found, network, batches)
    return quantized_network(planned.graph, observing.observed_solution(found))


@torch.no_grad()
def run(model: Callable[[torch.Tensor], object], batches: list[Batch]) -> None:
    """One pass over the data."""
    for batch in batches:
        model(*batch.args)


if __name__ == "__main__":
    main()
