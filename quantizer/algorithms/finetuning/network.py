"""Fast finetuning of a whole network, which is kept only if the output becomes better."""

import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from quantizer.algorithms.finetuning.layers import fast_finetune
from quantizer.calibration import fingerprint
from quantizer.calibration.events import RunStage
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.calibration.run_algorithms import check_adjustment
from quantizer.calibration.snapshots import register_dataclasses, snapshot_of, value_of
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.comparison.output_measure import OutputNoises
from quantizer.config.algorithms import ConfigChange, ConfigStep
from quantizer.config.wording import counted
from quantizer.graph.channels.output_parts import Output, output_parts
from quantizer.graph.ir import Graph
from quantizer.graph.tracing.parameters import move_module
from quantizer.layerwise.adjustment import Adjustment, RoundedWeight
from quantizer.layerwise.sequential_runner import ActivationStore, SequentialRunner
from quantizer.nn.network import Network, float_leaves
from quantizer.numerics.qparams import QParams
from quantizer.sources.batches import Batch

register_dataclasses(RoundedWeight, QParams)
_CHECKPOINT = "the checkpoint of finetuning"
FEW_SAMPLES = 32
"""With fewer, finetuned weights fit the calibration data more than the model."""
STEP = ConfigStep(
    "finetuning",
    "two networks in step, and a solution per layer",
    (
        ConfigChange("--fast_finetune adaround", fast_finetune="adaround"),
        ConfigChange("--fast_finetune adaquant", fast_finetune="adaquant"),
    ),
    place=4,
)
"""What a search for gates tries with fast finetuning."""


def run_finetuning(request: CalibrationRequest, state: CalibrationState) -> CalibrationState:
    """Learn how to round weights on the first rank, on all batches, while the others wait."""
    solution = state.solution
    if request.ranks.is_first:
        solution = _finetune_weights(request, state)
    solution = request.ranks.broadcast(solution, "fast finetuning")
    return replace(state, solution=solution)


def _finetune_weights(request: CalibrationRequest, state: CalibrationState) -> Solution:
    """Learn how to round the weights. If the output would become worse, they stay.

    Raises:
        DataError: a layer's outputs are not finite, or the data are not the same when they are
            read again.
    """
    assert request.fast_finetune is not None
    mode = request.fast_finetune
    solution = state.solution
    graph = state.plan.graph
    data = request.batches.fingerprint or {}
    samples = data.get("samples", 0)
    if samples < FEW_SAMPLES:
        text = (
            f"finetuning on {counted(samples, 'sample')}: the weights may fit only these; use "
            f"at least {FEW_SAMPLES}"
        )
        request.events.message(logging.WARNING, text)
    restored = _restored(request, state, mode=mode, data=data, scales=_scales_digest(solution))
    if restored:
        text = f"finetuning resumes after {counted(len(restored), 'layer')}"
        request.events.message(logging.INFO, text)
    layers = restored

    def after_layer(so_far: Mapping[str, RoundedWeight]) -> None:
        """Count a layer. The snapshots of the stage are made of all so far."""
        nonlocal layers
        layers = so_far
        stage.advance()

    stage = RunStage(
        request.events,
        "fast finetune",
        len(graph.nodes),
        "layers",
        saved_as="finetune",
        snapshot=lambda: snapshot_of(dict(layers)),
    )
    with stage:
        # From now on, this run can be resumed in this mode alone
        stage.advance(0, at_boundary=True)
        result = finetune_network(
            graph,
            solution,
            partial(request.read_again, "fast finetuning", "leave <--fast_finetune> out"),
            mode,
            store=ActivationStore(request.memory),
            seed=request.seed,
            done=dict(restored),
            after_layer=after_layer,
        )
    is_finetuned = bool(result.layers) and not result.undone
    level = logging.INFO if is_finetuned else logging.WARNING
    request.events.message(level, result.summary)
    if not is_finetuned:
        return result.solution
    return replace(result.solution, kept={**solution.kept, "fast_finetune": mode})


def _scales_digest(solution: Solution) -> str:
    """Return a digest of all scales and zero points."""
    rows = []
    for key, tensor in solution.tensors.items():
        scale = fingerprint.tensor_digest(tensor.scale)
        zero_point = fingerprint.tensor_digest(tensor.zero_point)
        rows.append([*key, scale, zero_point])
    return fingerprint.value_digest(rows)


def _restored(
    request: CalibrationRequest, state: CalibrationState, **key: Any
) -> Mapping[str, RoundedWeight]:
    """Return the layers that a stopped run has finetuned; none if this run does not resume it.

    Raises:
        ResultError: they do not fit the network.
    """
    snapshot = request.stored("finetune", **key)
    if snapshot is None:
        return {}
    layers = value_of(snapshot, dict[str, RoundedWeight])
    found = Adjustment(rounded=layers)
    check_adjustment(found, state.plan.graph, state.solution.specs, _CHECKPOINT)
    return layers


@dataclass(frozen=True)
class FinetuningResult:
    """The result of finetuning, and the noise of the network's output on the calibration data.

    Args:
        solution: with finetuned weights, or as before if finetuning is undone.
        layers: the finetuned layers by name.
        before: the noise with the solution as before.
        after: the noise with finetuned weights.
        plain: how many layers have quantized weights that cannot be finetuned: in groups, in
            floating-point formats, or of more than 8 bits.
    """

    solution: Solution
    layers: Mapping[str, RoundedWeight]
    before: OutputNoises
    after: OutputNoises
    plain: int

    @property
    def undone(self) -> bool:
        """Return whether the output would have become worse."""
        return not self.after.error <= self.before.error

    @property
    def summary(self) -> str:
        """Return one line on the errors of layers and of the output."""
        if not self.layers:
            return (
                "there is nothing to finetune: no layer has integer weights of at most 8 "
                "bits with a scale per channel"
            )
        figures = (
            f"output SQNR on the calibration data {self.before.worst} -> {self.after.worst} dB"
        )
        if self.undone:
            return f"finetuning undone, because the output became worse: {figures}"
        shares = [
            layer.after / layer.before
            for layer in self.layers.values()
            if layer.after < layer.before
        ]
        parts = [f"{len(shares)} of {counted(len(self.layers), 'layer')} finetuned"]
        if self.plain:
            verb = "keeps" if self.plain == 1 else "keep"
            parts.append(
                f"{self.plain} with weights in groups or other formats {verb} round-to-nearest"
            )
        if shares:
            median = statistics.median(shares)
            parts.append(f"median output error {median:.0%} of round-to-nearest")
        return "; ".join([*parts, figures])


def finetune_network(
    graph: Graph,
    solution: Solution,
    batches: Callable[[], Iterable[Batch]],
    mode: str,
    *,
    store: ActivationStore | None = None,
    seed: int,
    done: Mapping[str, RoundedWeight],
    after_layer: Callable[[Mapping[str, RoundedWeight]], None],
) -> FinetuningResult:
    """Learn weights, and with "adaquant" their scales, that bring the quantized network nearer
    to the float one.

    Args:
        graph: the float network.
        solution: how it is quantized.
        batches: opens a pass over the calibration data, on the graph's device; there are two.
        mode: "adaround" or "adaquant".
        store: keeps the values of both networks.
        seed: of the order of samples.
        done: the layers that a stopped run had finetuned.
        after_layer: called with the finetuned layers after each layer.

    Raises:
        DataError: see `fast_finetune`.
    """
    store = store or ActivationStore()
    outputs = []
    unfinetuned = move_module(quantized_network(graph, solution), graph.device)

    def with_outputs() -> Iterator[Batch]:
        """Yield each batch, after storing the quantized network's output for it."""
        for batch in batches():
            # An output may be a part of an input, which a loader may refill.
            stable = batch.stable()
            output = unfinetuned(*stable.args, **stable.kwargs)
            outputs.append(store.keep(float_leaves(output)))
            yield stable

    with torch.no_grad():
        reference = SequentialRunner(Network(graph), with_outputs(), store)
        network = move_module(quantized_network(graph, solution), graph.device)
        quantized = SequentialRunner(network, batches(), store)
    layers = fast_finetune(
        reference, quantized, mode, seed=seed, done=done, after_layer=after_layer
    )
    targets = list(reference.outputs())
    parts = output_parts(graph)
    before = _noises(parts, targets, outputs)
    after = _noises(parts, targets, quantized.outputs())
    plain = 0
    for node in graph.nodes:
        is_quantized = (node.name, "weights") in solution.tensors
        if node.row.is_linear_or_convolution and is_quantized and node.name not in layers:
            plain += 1
    result = FinetuningResult(solution.with_rounded(layers), layers, before, after, plain)
    return replace(result, solution=solution) if result.undone else result


def _noises(
    parts: Sequence[Output], targets: Iterable[Any], outputs: Iterable[Any]
) -> OutputNoises:
    """Return the noise in all floating-point outputs of all batches."""
    noises = OutputNoises(parts)
    for target, output in zip(targets, outputs, strict=True):
        noises.add(float_leaves(target), float_leaves(output))
    return noises
