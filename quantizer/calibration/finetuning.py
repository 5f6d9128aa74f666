"""Fast finetuning of a whole solution: both networks side by side, and a last look at what they
return.
"""

import dataclasses
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.algorithms.adjustment import Rounded
from quantizer.algorithms.fast_finetune import FinetunedLayer, fast_finetune
from quantizer.algorithms.sequential_runner import SequentialRunner
from quantizer.calibration import fingerprint
from quantizer.calibration.fits_model import check_weight
from quantizer.calibration.job import Job
from quantizer.calibration.snapshots import other_run, register, snapshot_of, value_of
from quantizer.calibration.solution import Solution, quantized_network
from quantizer.comparison.output_measure import OutputNoises
from quantizer.config.dpu_accuracy import finetuning, raised
from quantizer.config.model import Config
from quantizer.errors import ResultError, UsageError
from quantizer.graph.ir import Graph
from quantizer.graph.output_parts import Output, output_parts
from quantizer.graph.parameters import placed
from quantizer.nn.execution import float_leaves
from quantizer.nn.network import Network
from quantizer.numerics.qparams import QParams
from quantizer.sources.batches import Batch

register(FinetunedLayer)
FEW_SAMPLES = 32
"""Below, finetuned weights fit the calibration data more than the model."""


def finetune_weights(job: Job) -> None:
    """The step of the pipeline that learns how to round the weights, unless the output becomes
    worse.

    Raises:
        DataError: a layer's outputs are not finite, or the data are not the same when they are
            read again.
    """
    mode, found, graph = job.fast_finetune or "", job.solution, job.plan.graph
    data = job.batches.fingerprint or {}
    if (samples := data.get("samples", 0)) < FEW_SAMPLES:
        text = (
            f"finetuning on {samples} samples: weights fit these and not others; give it at "
            f"least {FEW_SAMPLES}"
        )
        job.events.message(logging.WARNING, text)
    digest = fingerprint.tensor_digest
    scales = fingerprint.digest(
        [[*key, digest(t.scale), digest(t.zero_point)] for key, t in found.tensors.items()]
    )
    restored = job.restored("finetune", mode=mode, data=data, scales=scales)
    layers: Mapping[str, FinetunedLayer] = (
        value_of(restored, dict[str, FinetunedLayer]) if restored else {}
    )
    for name, layer in layers.items():
        check_weight(graph, name, layer.weight, "the checkpoint of finetuning")
        tensor = found.tensors.get((name, "weights"))
        if not (math.isfinite(layer.before) and math.isfinite(layer.after)):
            raise other_run(f"{name} has errors that are not finite")
        if (
            tensor is None
            or layer.scale.shape != tensor.scale.shape
            or not bool(((layer.scale > 0) & layer.scale.isfinite()).all())
        ):
            raise other_run(f"{name} has other scales")
    if layers:
        job.events.message(logging.INFO, f"finetuning goes on after {len(layers)} layers")
    begun = dict(layers)

    def after_layer(so_far: Mapping[str, FinetunedLayer]) -> None:
        nonlocal layers
        layers = so_far
        stage.advance()

    saved = {"saved_as": "finetune", "snapshot": lambda: snapshot_of(dict(layers))}
    with job.stage("fast finetune", len(graph.nodes), "layers", **saved) as stage:
        # From now on, this run can be resumed in this mode alone
        stage.advance(0, at_boundary=True)
        read = partial(job.read_again, "fast finetuning", "leave --fast_finetune out")
        store = ActivationStore(job.memory)
        made = finetune(
            graph, found, read, mode, store, seed=job.seed, done=begun, after_layer=after_layer
        )
    job.events.message(
        logging.WARNING if made.undone or not made.layers else logging.INFO, made.summary
    )
    job.solution, job.is_finetuned = made.solution, bool(made.layers) and not made.undone


@dataclass(frozen=True)
class Finetuned:
    """What finetuning made of a solution, and the noise of the network's output over the
    calibration data.

    `plain` counts layers whose quantized weights it does not learn: groups, floating-point
    formats, more bits.
    """

    solution: Solution
    layers: Mapping[str, FinetunedLayer]
    before: OutputNoises
    after: OutputNoises
    plain: int = 0

    @property
    def undone(self) -> bool:
        """Whether the output would have become worse, so that `solution` is what it was."""
        return not self.after.error <= self.before.error

    @property
    def summary(self) -> str:
        """One line: how much of the layers' errors is left, and what the output gained."""
        if not self.layers:
            return (
                "there is nothing to finetune: no layer has integer weights of at most 8 "
                "bits with a scale per channel"
            )
        figures = (
            f"output SQNR on the calibration data {self.before.worst} -> {self.after.worst} dB"
        )
        if self.undone:
            return f"finetuning undone, as the output became worse: {figures}"
        changed = [
            layer.after / layer.before
            for layer in self.layers.values()
            if layer.after < layer.before
        ]
        left = (
            f"median output error {statistics.median(changed):.0%} of round-to-nearest; "
            if changed
            else ""
        )
        rest = (
            f"{self.plain} with weights in groups or other formats keep round-to-nearest; "
            if self.plain
            else ""
        )
        return f"{len(changed)} of {len(self.layers)} layers finetuned; {rest}{left}{figures}"


def as_asked(config: Config, level: str | None, mode: str | None) -> tuple[Config, str | None]:
    """The config and the mode of finetuning of a run with `--dpu_accuracy level` and
    `--fast_finetune mode`.

    Raises:
        UsageError: the level goes with the DPU alone, or the mode does not go with the config.
    """
    config, mode = raised(config, level), finetuning(level, mode)
    _check_mode(mode, config)
    return config, mode


def _check_mode(mode: str | None, config: Config) -> None:
    """Refuse adaquant on the DPU, and an algorithm that rounds the same weights."""
    rounding = [settings.name for settings in config.algorithms if settings.stage == "round"]
    if mode and rounding:
        raise UsageError(
            f"--fast_finetune {mode} and the config's {rounding[0]} both round the weights",
            help="leave out --fast_finetune, or the algorithm",
        )
    if mode == "adaquant" and config.settings.target_device == "DPU":
        raise UsageError(
            "--fast_finetune adaquant changes the scales of weights, and the DPU's are "
            "aligned to its shifters",
            help="use --fast_finetune adaround",
        )


def require_asked(option: str, asked: str | None, done: str | None) -> None:
    """Refuse results that were not calibrated with the `option` that test mode is given.

    Raises:
        ResultError: they were not.
    """
    if asked and asked != done:
        how = f"with {done}" if done else "without it"
        raise ResultError(
            f"{option} {asked}: these results were calibrated {how}",
            help=f"calibrate with {option} {asked}, or leave it out here",
        )


def finetune(
    graph: Graph,
    found: Solution,
    batches: Callable[[], Iterable[Batch]],
    mode: str,
    store: ActivationStore | None = None,
    *,
    seed: int,
    done: Mapping[str, FinetunedLayer],
    after_layer: Callable[[Mapping[str, FinetunedLayer]], None],
) -> Finetuned:
    """Weights, and with "adaquant" their scales, for which the quantized network is nearer to
    the float one.

    `batches` opens a pass over the calibration data, on the graph's device; there are two.
    `store` keeps the values of both networks. `done` holds what an interrupted run had found.
    The errors are those of `fast_finetune`.
    """
    outputs, store = list[Any](), store or ActivationStore()
    plain = placed(quantized_network(graph, found), graph.device)

    def with_outputs() -> Iterator[Batch]:
        """Each batch, after keeping what the network returns for it."""
        for batch in batches():
            # An output may be a part of an input, which a loader may refill.
            stable = batch.stable()
            outputs.append(store.keep(float_leaves(plain(*stable.args, **stable.kwargs))))
            yield stable

    with torch.no_grad():
        reference = SequentialRunner(Network(graph), with_outputs(), store)
        quantized = SequentialRunner(
            placed(quantized_network(graph, found), graph.device), batches(), store
        )
    layers = fast_finetune(
        reference, quantized, mode, seed=seed, done=done, after_layer=after_layer
    )
    targets = list(reference.outputs())
    named = output_parts(graph)
    before, after = (
        _noises(named, targets, outputs),
        _noises(named, targets, quantized.outputs()),
    )
    quantized_weights = {name for name, role in found.tensors if role == "weights"}
    left = quantized_weights - layers.keys()
    rest = [
        node for node in graph.nodes if node.row.is_linear_or_convolution and node.name in left
    ]
    made = Finetuned(finetuned(found, layers), layers, before, after, len(rest))
    return dataclasses.replace(made, solution=found) if made.undone else made


def finetuned(found: Solution, layers: Mapping[str, FinetunedLayer]) -> Solution:
    """The solution with the weights and scales of finetuned layers."""
    rounded = {}
    for name, row in layers.items():
        qparams = QParams(row.scale, found.tensors[name, "weights"].zero_point)
        rounded[name] = Rounded(row.weight, qparams, row.before, row.after)
    return found.with_rounded(rounded)


def _noises(
    named: Sequence[Output], targets: Iterable[Any], outputs: Iterable[Any]
) -> OutputNoises:
    """Over all floating-point outputs of all batches."""
    noises = OutputNoises(named)
    for target, output in zip(targets, outputs, strict=True):
        noises.add(float_leaves(target), float_leaves(output))
    return noises
