"""Takes a model the whole way: traced, calibrated, written as code, compared with the float
network.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support.dpu_networks import with_decided_joins
from support.generated import imported
from torch import nn
from torch.utils import _pytree as pytree

from quantizer.calibration import fingerprint, observing
from quantizer.calibration.solution import quantized_network
from quantizer.config.model import ResolvedConfig
from quantizer.evaluation.compare import compare
from quantizer.graph.ir import Graph
from quantizer.graph.passes import run_passes
from quantizer.graph.tracing.trace import trace
from quantizer.nn.network import Network
from quantizer.plan.resolve import NO_RULES, resolve_plan
from quantizer.results.folder import read_info
from quantizer.results.write import write_results
from quantizer.sources.batches import Batch


@dataclass(frozen=True)
class Case:
    """A model and its batches; `floors` are the least output SQNR in dB by config, `unknown`
    the operators without quantization rules.
    """

    module: nn.Module
    batches: tuple[tuple[Any, ...], ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    floors: tuple[float, float] = (20.0, 20.0)
    unknown: frozenset[str] = frozenset()


CASES: dict[str, Callable[[], Case]] = {}


def architecture(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register an architecture under its function's name."""
    assert make.__name__ not in CASES
    CASES[make.__name__] = make
    return make


def images(count: int, *shape: int) -> tuple[tuple[Any, ...], ...]:
    """Two batches of smooth random images (noise upsampled), so that convolutions see something
    like edges.
    """
    generator = torch.Generator().manual_seed(count)
    coarse = torch.randn(
        2, count, shape[0], *(max(1, size // 4) for size in shape[1:]), generator=generator
    )
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(shape) - 1]
    return tuple((nn.functional.interpolate(batch, shape[1:], mode=mode),) for batch in coarse)


def tokens(count: int, length: int, vocabulary: int) -> tuple[tuple[Any, ...], ...]:
    """Two batches of random token ids."""
    generator = torch.Generator().manual_seed(length)
    return tuple(
        (batch,)
        for batch in torch.randint(1, vocabulary, (2, count, length), generator=generator)
    )


def prepared(module: nn.Module) -> nn.Module:
    """Eval mode, batch norms with statistics unlike the identity, as training leaves them."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.running_var is not None:
            assert child.running_mean is not None
            child.running_mean.normal_(std=0.1)
            child.running_var.uniform_(0.5, 1.5)
    return module.eval()


@dataclass
class Found:
    """What a run through the whole tool gave."""

    sqnr: float
    unknown: Counter[str]
    tensors: int
    generated_equals: bool
    seconds: float = 0.0
    code: str = ""


def traced(case: Case) -> Graph:
    """The graph for the case's first batch."""
    return trace(case.module, case.batches[0], case.kwargs)


def run(case: Case, original: Graph, config: ResolvedConfig, folder: Path) -> Found:
    """Calibrate on all batches, compare on all batches, and run the generated code on the
    first.
    """
    begin = time.perf_counter()
    graph = run_passes(original, config.settings)
    plan = resolve_plan(config, graph, original)
    network = Network(graph)
    calibration = observing.create_observers(plan)
    batches = [Batch(batch, dict(case.kwargs), None, None) for batch in case.batches]
    observing.observe_batches(calibration, network, batches)
    calibration = with_decided_joins(calibration)
    write_results(
        folder,
        original,
        calibration,
        observing.observed_solution(calibration),
        config=config,
        run=fingerprint.model_digests(original),
    )
    quantized = quantized_network(graph, read_info(folder).solution)
    reference = Network(run_passes(original, config.settings, device=False))
    compared = compare(reference, quantized, batches)
    path = folder / f"{graph.model}.py"
    with torch.no_grad():
        ours = pytree.tree_leaves(quantized(*case.batches[0], **case.kwargs))
        theirs = pytree.tree_leaves(imported(path)(*case.batches[0], **case.kwargs))
    equal = len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ours, theirs, strict=True)
    )
    unknown = Counter(node.op for node in graph.nodes if plan.floats.get(node.name) == NO_RULES)
    seconds = time.perf_counter() - begin
    return Found(
        compared.output.sqnr_db,
        unknown,
        len(plan.tensors),
        equal,
        seconds,
        path.read_text("utf-8"),
    )
