"""Which widths the weights of single layers may have, what each costs, and the best choice
under a budget of size.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from quantizer.algorithms.budget import Option, choose
from quantizer.algorithms.output_gradients import PROJECTIONS, predicted_noise
from quantizer.algorithms.sensitivity import (
    AfterLayer,
    Candidate,
    OutputsOf,
    layer_errors,
    noise_of,
    output_noise,
    rounded,
    with_width,
)
from quantizer.algorithms.sensitivity import Width as Width  # for whoever asks for widths
from quantizer.comparison.output_measure import AlikeOutputs
from quantizer.config.model import QuantizationSpec, Role
from quantizer.config.roles import base_role
from quantizer.errors import GateError
from quantizer.graph.output_parts import output_parts
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.numerics.codes import bits_of
from quantizer.numerics.metrics import decibel
from quantizer.plan.model import Plan
from quantizer.plan.size import parameter_bytes, weight_bytes
from quantizer.sources.batches import Batch

NOISE_BATCHES = 4
"""How many batches the network's output is compared on: each costs half a pass for every layer,
or eight gradients.
"""
POINTS = 24
"""Budgets between the smallest widths and the largest, of which a curve shows the best
choice.
"""
PASSES = ("network", "every", "fast")
"""How the noise at the output is found: measured at the smallest width, measured at every
width, or from gradients.
"""


@dataclass(frozen=True)
class Row:
    """One weight.

    Args:
        candidate: the layers that have it.
        values: how many values it holds.
        own: bits in the config.
        own_bytes: size in the config, with scales.
        sizes: bytes at each width, with scales.
        noise: at each width, the energy it adds to the network's output.
    """

    candidate: Candidate
    values: int
    own: int
    own_bytes: int
    sizes: tuple[int, ...]
    noise: tuple[float, ...]

    @property
    def name(self) -> str:
        """Of the first layer."""
        return self.candidate.layers[0]


@dataclass(frozen=True)
class Analysis:
    """What was measured: `rows` in execution order; `kept` says why other quantized weights
    stay as they are.

    `energy` is that of the network's output. `rest` are the bytes of all other weights.
    """

    widths: tuple[Width, ...]
    rows: tuple[Row, ...]
    kept: Mapping[str, str]
    energy: float
    rest: int
    passes: str

    @property
    def bits(self) -> list[int]:
        """Of one value at each width."""
        return [width_bits(width) for width in self.widths]

    def db(self, noise: float) -> float:
        """Signal to noise of the output."""
        return decibel(self.energy, noise)

    def total(self, chosen: Sequence[int]) -> float:
        """Predicted noise of a choice: as if the layers' noises had nothing to do with each
        other.
        """
        return math.fsum(row.noise[at] for row, at in zip(self.rows, chosen, strict=True))

    def bytes(self, chosen: Sequence[int]) -> int:
        """All weights' size."""
        return self.rest + sum(row.sizes[at] for row, at in zip(self.rows, chosen, strict=True))

    def mean_bits(self, chosen: Sequence[int]) -> float:
        """Bits per value of the weights that were analysed, without scales."""
        widths = self.bits
        bits = sum(row.values * widths[at] for row, at in zip(self.rows, chosen, strict=True))
        return bits / sum(row.values for row in self.rows)


@dataclass(frozen=True)
class Budget:
    """One of: `bits` per analysed weight, without scales; `share` of all weights' size in the
    config; `max_bytes`.
    """

    bits: float | None = None
    share: float | None = None
    max_bytes: int | None = None


def analyze(
    plan: Plan,
    widths: Sequence[Width],
    batches: Callable[[], Iterable[Batch]],
    passes: str,
    after_layer: AfterLayer = lambda: None,
) -> Analysis:
    """Measure what rounding each weight to nearest costs at each width, the smallest first.

    Raises:
        GateError: the plan has no weights that could get another width.
        DataError: an input of a layer or an output of the network is not finite.
    """
    found, kept = candidates(plan)
    if not found:
        first = next(
            (f"for example {name}: {why}" for name, why in kept.items()),
            "the config quantizes none",
        )
        raise GateError(
            "no weight can get another width", help=f"{first}; quantizer plan shows all"
        )
    network = Network(plan.graph)
    alike = _alike(network, batches)
    if passes == "fast":
        noise, energy = predicted_noise(
            network,
            found,
            widths,
            few(batches),
            after_projection=after_layer,
            outputs_of=alike,
        )
    elif passes == "network":
        errors = layer_errors(network, found, widths, batches(), after_layer=after_layer)
        smallest, energy = output_noise(
            network, found, widths[:1], few(batches), after_layer=after_layer, outputs_of=alike
        )
        # What was measured at the first width, times what the layer's error shrinks.
        noise = [
            tuple(known * error / each[0] if each[0] else 0.0 for error in each)
            for (known,), each in zip(smallest, errors, strict=True)
        ]
    else:
        noise, energy = output_noise(
            network, found, widths, few(batches), after_layer=after_layer, outputs_of=alike
        )
    rows = tuple(
        _row(plan, candidate, widths, each)
        for candidate, each in zip(found, noise, strict=True)
    )
    rest = weight_bytes(plan)[1] - sum(row.own_bytes for row in rows)
    return Analysis(tuple(widths), rows, kept, energy, rest, passes)


def units_of_work(passes: str, weights: int, batches: int | None) -> tuple[int, str]:
    """How many units `analyze` reports for so many weights, and what they are."""
    compared = min(batches or NOISE_BATCHES, NOISE_BATCHES)
    if passes == "fast":
        return PROJECTIONS * compared, "projections"
    return weights * (1 + compared if passes == "network" else compared), "layers"


def width_bits(width: Width) -> int:
    """Bits of one value."""
    return bits_of(with_width(QuantizationSpec(), width))


def few(batches: Callable[[], Iterable[Batch]]) -> Iterable[Batch]:
    """The batches that the network's output is compared on."""
    return islice(iter(batches()), NOISE_BATCHES)


def candidates(plan: Plan) -> tuple[list[Candidate], dict[str, str]]:
    """The weights of linear and convolution layers that become integers; and why other
    quantized ones do not count.
    """
    sharing: dict[str, list[str]] = {}
    for node in plan.graph.nodes:
        for path in node.params.values():
            sharing.setdefault(path, []).append(node.name)
    kept: dict[str, str] = {}
    found: dict[str, Candidate] = {}
    for name, role in plan.tensors:
        node = plan.graph.by_name[name]
        if base_role(role) != "weights":
            continue
        layers = (
            tuple(dict.fromkeys(sharing[node.params["weight"]]))
            if "weight" in node.params
            else (name,)
        )
        if why := _why_kept(plan, name):
            kept[name] = why
        elif other := next(filter(lambda other: _why_kept(plan, other), layers), None):
            kept[name] = f"it shares the weight of {other}: {_why_kept(plan, other)}"
        elif layers[0] == name:
            specs = tuple(plan.tensors[other, "weights"].spec for other in layers)
            origins = [plan.tensors[other, "weights"].origins for other in layers]
            implied = all(
                each["symmetric_scale"] == each["dtype"] != "default" for each in origins
            )
            found[name] = Candidate(layers, specs, implied)
    order = {node.name: at for at, node in enumerate(plan.graph.nodes)}
    return sorted(found.values(), key=lambda candidate: order[candidate.layers[0]]), kept


def _why_kept(plan: Plan, name: str) -> str | None:
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


def _row(
    plan: Plan, candidate: Candidate, widths: Sequence[Width], noise: tuple[float, ...]
) -> Row:
    name, spec = candidate.layers[0], candidate.specs[0]
    values = plan.graph.tensors[plan.graph.by_name[name].params["weight"]].numel()
    scales = plan.tensors[name, "weights"].scales
    specs = [candidate.with_width(spec, width) for width in widths]
    sizes = tuple(
        parameter_bytes(values, each, scales if each.is_scaled else 0) for each in specs
    )
    return Row(
        candidate, values, bits_of(spec), parameter_bytes(values, spec, scales), sizes, noise
    )


def chosen(found: Analysis, budget: Budget) -> tuple[int, ...]:
    """For each row the index of its width: the least predicted noise within the budget.

    Raises:
        GateError: the smallest widths are too large.
    """
    costs, limit = _costs(found, budget)
    pairs = zip(costs, found.rows, strict=True)
    picked = choose([list(map(Option, sizes, row.noise)) for sizes, row in pairs], limit)
    if picked is None:
        least = [found.bits.index(min(found.bits))] * len(found.rows)
        raise GateError(
            "the budget cannot be met: the smallest choice takes "
            f"{found.mean_bits(least):.4g} bits per weight, "
            f"{found.bytes(least) / 1e6:.4g} MB with all other weights "
            f"({found.rest / 1e6:.4g} MB) and scales",
            help="raise the budget, or give smaller widths in --choices",
        )
    return picked


def uniform(found: Analysis, budget: Budget) -> tuple[int, ...] | None:
    """The widest single width for all weights within the budget; None if there is none."""
    costs, limit = _costs(found, budget)
    fitting = [
        at for at in range(len(found.widths)) if sum(sizes[at] for sizes in costs) <= limit
    ]
    return (max(fitting, key=found.bits.__getitem__),) * len(found.rows) if fitting else None


def curve(found: Analysis) -> list[tuple[int, ...]]:
    """The best choices under ever larger budgets of bytes, from the smallest widths to the
    largest.
    """
    least, most = (
        found.rest + sum(pick(row.sizes) for row in found.rows) for pick in (min, max)
    )
    budgets = (
        Budget(max_bytes=least + (most - least) * at // (POINTS - 1)) for at in range(POINTS)
    )
    return list(dict.fromkeys(chosen(found, budget) for budget in budgets))


def _costs(found: Analysis, budget: Budget) -> tuple[list[list[int]], int]:
    """What each row costs at each width, and how much there is: in bits without scales, or in
    bytes with them.
    """
    if budget.bits is not None:
        values = sum(row.values for row in found.rows)
        return [[row.values * bits for bits in found.bits] for row in found.rows], math.floor(
            budget.bits * values
        )
    own = found.rest + sum(row.own_bytes for row in found.rows)
    most = math.floor(budget.share * own) if budget.share is not None else budget.max_bytes or 0
    return [list(row.sizes) for row in found.rows], most - found.rest


def measured(
    plan: Plan, found: Analysis, picked: Sequence[int], batches: Callable[[], Iterable[Batch]]
) -> float:
    """Energy of the noise of the network's output when all weights have the widths of a choice,
    on the few batches.
    """
    network = Network(plan.graph)
    weights: dict[str, Tensor] = {}
    for row, at in zip(found.rows, picked, strict=True):
        weights |= rounded(network, row.candidate, found.widths[at])
    return noise_of(network, weights, few(batches), _alike(network, batches))


def _alike(network: Network, batches: Callable[[], Iterable[Batch]]) -> OutputsOf:
    """Return the outputs of a run with all of their parts counting alike, as on the first
    batch.
    """
    outputs = output_parts(network.graph)
    leaves = [part for output in outputs for part in output.parts]
    first = next(iter(batches()), None) if len(leaves) > 1 else None
    if first is None:
        return Execution.float_outputs
    with torch.no_grad():
        return AlikeOutputs(outputs, network, first)


def specs_of(
    plan: Plan, found: Analysis, picked: Sequence[int]
) -> dict[str, dict[Role, QuantizationSpec]]:
    """For each layer whose width is not the config's, the specs of all its tensors, its
    weights' as chosen.
    """
    changed: dict[str, dict[Role, QuantizationSpec]] = {}
    for row, at in zip(found.rows, picked, strict=True):
        for name, own in zip(row.candidate.layers, row.candidate.specs, strict=True):
            spec = row.candidate.with_width(own, found.widths[at])
            if spec != own:
                others = {
                    base_role(t.role): t.spec
                    for t in plan.tensors.values()
                    if name in t.members
                }
                changed[name] = {**others, "weights": spec}
    return changed


def differing(
    before: Plan, after: Plan, changed: Mapping[str, Mapping[Role, QuantizationSpec]]
) -> list[str]:
    """The tensors that differ after a patch and should not: all but the weights of `changed`
    stay as they were.
    """
    wanted = {key: tensor.spec for key, tensor in before.tensors.items()}
    for name, specs in changed.items():
        wanted[name, "weights"] = specs["weights"]
    got = {key: tensor.spec for key, tensor in after.tensors.items()}
    for key, spec in wanted.items():
        if not spec.is_scaled and key in got and got[key].dtype == spec.dtype:
            wanted[key] = got[key]  # its other fields mean nothing
    return sorted(
        f"{role} of {name}"
        for name, role in wanted.keys() | got.keys()
        if wanted.get((name, role)) != got.get((name, role))
    )
