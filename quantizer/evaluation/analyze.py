"""Measures what each bit width costs each weight, and chooses widths under a size budget."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from quantizer.calibration.events import Events, RunStage
from quantizer.comparison.output_measure import AlikeOutputs
from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import base_role
from quantizer.errors import GateError
from quantizer.evaluation.noise_methods import MAX_MEASURED
from quantizer.graph.channels.output_parts import output_parts
from quantizer.layerwise.sensitivity import (
    PROJECTIONS,
    AfterLayer,
    Candidate,
    OutputsOf,
    layer_errors,
    noise_of,
    output_noise,
    predicted_noise,
    rounded_weights,
    with_width,
)
from quantizer.layerwise.sensitivity import Width as Width  # re-exported
from quantizer.nn.network import Execution, Network
from quantizer.numerics.codes import bits_of
from quantizer.numerics.metrics import decibel
from quantizer.plan.joining.tied_scales import fused_layers
from quantizer.plan.model import Plan
from quantizer.plan.size import parameter_bytes, weight_bytes
from quantizer.plugins import if_command
from quantizer.sources.batches import Batch

NOISE_BATCHES = 4
"""Batches on which outputs are compared. Each takes half a forward pass for each layer, or 8
backward passes.
"""


WidthChoice = Sequence[int]
"""For each analysed weight, the index of its width."""
GetBatches = Callable[[], Iterable[Batch]]
"""Starts a pass over the data."""


@dataclass(frozen=True)
class WeightRow:
    """One weight.

    Attributes:
        candidate: the layers that have it.
        values: how many values it holds.
        config_bits: bits of a value in the config.
        config_bytes: size in the config, with scales.
        sizes: bytes at each width, with scales.
        noise: at each width, the energy it adds to the network's output.
    """

    candidate: Candidate
    values: int
    config_bits: int
    config_bytes: int
    sizes: Sequence[int]
    noise: Sequence[float]

    @property
    def name(self) -> str:
        """Return the name of the first layer."""
        return self.candidate.layers[0]


@dataclass(frozen=True)
class Analysis:
    """The measured costs of all weights.

    Attributes:
        widths: the widths that were tried.
        rows: the weights, in execution order.
        fixed_widths: the other quantized weights, with the reason why their width stays.
        energy: of the network's output.
        other_bytes: bytes of all other weights.
        passes: how the noise was found, one of `NOISE_METHODS`.
        tied: the numbers of rows that get one width, because engines fuse their layers.
    """

    widths: Sequence[Width]
    rows: Sequence[WeightRow]
    fixed_widths: Mapping[str, str]
    energy: float
    other_bytes: int
    passes: str
    tied: Sequence[Sequence[int]] = ()

    @property
    def bits(self) -> list[int]:
        """Return the bits per value of each width."""
        return [width_bits(width) for width in self.widths]

    def db(self, noise: float) -> float:
        """Return the signal-to-noise ratio of the output in dB."""
        return decibel(self.energy, noise)

    def total(self, choice: WidthChoice) -> float:
        """Return the predicted noise of a choice, as if the layers' noises were independent."""
        pairs = zip(self.rows, choice, strict=True)
        return math.fsum(row.noise[index] for row, index in pairs)

    def bytes(self, choice: WidthChoice) -> int:
        """Return the size of all weights under a choice."""
        pairs = zip(self.rows, choice, strict=True)
        return self.other_bytes + sum(row.sizes[index] for row, index in pairs)

    def mean_bits(self, choice: WidthChoice) -> float:
        """Return the bits per value of the analysed weights, without scales."""
        widths = self.bits
        pairs = zip(self.rows, choice, strict=True)
        bits = sum(row.values * widths[index] for row, index in pairs)
        return bits / sum(row.values for row in self.rows)


@dataclass(frozen=True)
class WatchedData:
    """The data of an analysis, and who follows it.

    Attributes:
        batches: starts a pass over the data.
        total: the number of batches, if it is known.
        events: the follower.
    """

    batches: GetBatches
    total: int | None
    events: Events


def analyze_weights(
    plan: Plan, widths: Sequence[Width], data: WatchedData, passes: str | None = None
) -> Analysis:
    """Measure what rounding each weight to nearest costs at each width, as a stage of a run.

    Args:
        plan: quantizes the weights.
        widths: the widths to try, the smallest first.
        data: what they are measured on.
        passes: one of `NOISE_METHODS`; None for what the number of weights suggests.

    Raises:
        GateError: the plan has no weights that could get another width.
        DataError: an input of a layer or an output of the network is not finite.
    """
    candidates, fixed_widths = width_candidates(plan)
    if passes is None:
        passes = "network" if len(candidates) <= MAX_MEASURED else "fast"
    if not candidates:
        reason = "the config quantizes no weights"
        for name, why in list(fixed_widths.items())[:1]:
            reason = f"for example {name}: {why}"
        reason += if_command("plan", ". `quantizer plan` shows all weights")
        raise GateError("no weight can get another width", help=reason)
    compared = min(data.total or NOISE_BATCHES, NOISE_BATCHES)
    total = len(candidates) * compared
    unit = "layers"
    if passes == "fast":
        total = PROJECTIONS * compared
        unit = "projections"
    elif passes == "network":
        # One more pass over the data measures the errors of layers
        total += len(candidates)
    with RunStage(data.events, "analyze", total, unit) as stage:
        noises, energy = _noises(plan, candidates, widths, data, passes, stage.advance)
    pairs = zip(candidates, noises, strict=True)
    rows = [_row(plan, candidate, widths, noise) for candidate, noise in pairs]
    other_bytes = weight_bytes(plan)[1] - sum(row.config_bytes for row in rows)
    tied = _tied_rows(plan, candidates)
    return Analysis(widths, rows, fixed_widths, energy, other_bytes, passes, tied)


def _noises(
    plan: Plan,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    data: WatchedData,
    passes: str,
    advance: AfterLayer,
) -> tuple[Sequence[Sequence[float]], float]:
    """Return the noise of each candidate at each width, and the energy of the output.

    Args:
        plan: quantizes the weights.
        candidates: the weights.
        widths: the smallest first.
        data: what they are measured on.
        passes: one of `NOISE_METHODS`.
        advance: is called after each unit of work.
    """
    network = Network(plan.graph)
    outputs_of = _alike(network, data.batches)
    if passes == "fast":
        return predicted_noise(
            network,
            candidates,
            widths,
            few(data.batches),
            outputs_of=outputs_of,
            after_projection=advance,
        )
    errors: Sequence[Sequence[float]] = ()
    measured_widths = widths
    if passes == "network":
        measured_widths = widths[:1]
        errors = layer_errors(network, candidates, widths, data.batches(), after_layer=advance)
    noises, energy = output_noise(
        network,
        candidates,
        measured_widths,
        few(data.batches),
        outputs_of=outputs_of,
        after_layer=advance,
    )
    if passes == "every":
        return noises, energy
    return list(map(_scaled_noise, noises, errors)), energy


def _tied_rows(plan: Plan, candidates: Sequence[Candidate]) -> list[list[int]]:
    """Return groups of candidates, by number, that must have one width.

    Engines fuse the layers of a group, or they give all experts one scheme.
    """
    numbers: dict[str, int] = {}
    for number, candidate in enumerate(candidates):
        numbers.update(dict.fromkeys(candidate.layers, number))
    tied: list[list[int]] = []
    experts = tuple(node.name for node in plan.graph.nodes if node.row.experts)
    for group in (*fused_layers(plan.graph), experts):
        rows = {numbers[layer] for layer in group if layer in numbers}
        if len(rows) > 1:
            tied.append(sorted(rows))
    return tied


def _scaled_noise(measured: Sequence[float], errors: Sequence[float]) -> Sequence[float]:
    """Return the noise at each width, if it is proportional to the error of the layer.

    Args:
        measured: the noise at the first width.
        errors: of the layer at each width.
    """
    if not errors[0]:
        return [0.0] * len(errors)
    return [measured[0] * error / errors[0] for error in errors]


def width_bits(width: Width) -> int:
    """Return the bits of one value of a weight with this width."""
    return bits_of(with_width(QuantizationSpec(), width))


def few(batches: GetBatches) -> Iterable[Batch]:
    """Return the batches on which outputs are compared."""
    return islice(iter(batches()), NOISE_BATCHES)


def width_candidates(plan: Plan) -> tuple[list[Candidate], dict[str, str]]:
    """Return the weights that may get another width, in execution order, and the others.

    Candidates are the integer weights of linear and convolution layers.

    Returns:
        The candidates, and for each other quantized weight the reason.
    """
    layers_by_path: dict[str, list[str]] = {}
    for node in plan.graph.nodes:
        for path in dict.fromkeys(node.params.values()):
            layers_by_path.setdefault(path, []).append(node.name)
    fixed_widths: dict[str, str] = {}
    candidates: dict[str, Candidate] = {}
    for name, role in plan.tensors:
        if base_role(role) != "weights":
            continue
        path = plan.graph.by_name[name].params.get("weight", "")
        layers = layers_by_path.get(path, [name])
        why = _reason_of_any(plan, name, layers)
        if why is not None:
            fixed_widths[name] = why
        elif layers[0] == name:
            candidates[name] = _candidate(plan, layers)
    in_order = sorted(candidates, key=plan.graph.index.__getitem__)
    return [candidates[name] for name in in_order], fixed_widths


def _reason_of_any(plan: Plan, name: str, layers: Sequence[str]) -> str | None:
    """Return why the width of a layer's weight, shared by `layers`, cannot change."""
    for other in (name, *layers):
        why = _reason_to_keep(plan, other)
        if why is not None:
            return why if other == name else f"it shares the weight of {other}: {why}"
    return None


def _reason_to_keep(plan: Plan, name: str) -> str | None:
    """Return why the width of a layer's weight cannot change; None if it can."""
    tensor = plan.tensors.get((name, "weights"))
    if not plan.graph.by_name[name].row.is_linear_or_convolution:
        return "not a linear or convolution layer"
    if tensor is None:
        return "not quantized"
    if tensor.spec.dtype != "int":
        return (
            f"its format is {tensor.spec.dtype}, and only integers with a scale have other "
            "widths"
        )
    return None


def _candidate(plan: Plan, layers: Sequence[str]) -> Candidate:
    """Return the candidate for a weight that these layers share."""
    tensors = [plan.tensors[name, "weights"] for name in layers]
    implied = True
    for tensor in tensors:
        # The rule for scales follows the dtype if one entry of the file states both
        origin = tensor.origins["dtype"]
        implied &= origin != "default" and tensor.origins["symmetric_scale"] == origin
    specs = tuple(tensor.spec for tensor in tensors)
    return Candidate(tuple(layers), specs, implied)


def _row(
    plan: Plan, candidate: Candidate, widths: Sequence[Width], noise: Sequence[float]
) -> WeightRow:
    """Return the row of a candidate, whose noise at each width is known."""
    name = candidate.layers[0]
    spec = candidate.specs[0]
    path = plan.graph.by_name[name].params["weight"]
    values = plan.graph.tensors[path].numel()
    scales = plan.tensors[name, "weights"].scales
    sizes = []
    for width in widths:
        resized = candidate.with_width(spec, width)
        scale_count = scales if resized.is_scaled else 0
        sizes.append(parameter_bytes(values, resized, scale_count))
    return WeightRow(
        candidate,
        values,
        config_bits=bits_of(spec),
        config_bytes=parameter_bytes(values, spec, scales),
        sizes=sizes,
        noise=noise,
    )


def measured_noise(
    plan: Plan, analysis: Analysis, choice: WidthChoice, batches: GetBatches
) -> float:
    """Return the energy of the output noise on a few batches when all weights have their chosen
    widths.
    """
    network = Network(plan.graph)
    weights: dict[str, Tensor] = {}
    for row, index in zip(analysis.rows, choice, strict=True):
        weights |= rounded_weights(network, row.candidate, analysis.widths[index])
    return noise_of(network, weights, few(batches), _alike(network, batches))


def _alike(network: Network, batches: GetBatches) -> OutputsOf:
    """Return a function that returns a run's outputs, scaled so that all parts count alike."""
    outputs = output_parts(network.graph)
    part_count = sum(len(output.parts) for output in outputs)
    first = next(iter(batches()), None) if part_count > 1 else None
    if first is None:
        return Execution.float_outputs
    with torch.no_grad():
        return AlikeOutputs(outputs, network, first)
