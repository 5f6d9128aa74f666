"""What round-to-nearest of single weights costs: errors of layers' outputs, noise of the
network's. Decides nothing.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.algorithms.gram import Gram
from quantizer.algorithms.output_error import output_error
from quantizer.algorithms.patches import weight_matrix
from quantizer.algorithms.round_to_nearest import nearest_qparams
from quantizer.algorithms.sequential_runner import SequentialRunner, no_batches, watching
from quantizer.config.forms.hierarchical_spec import usual_symmetric_scale
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError
from quantizer.graph.parameters import set_parameter
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import energy
from quantizer.observers import ObservationError
from quantizer.sources.batches import Batch, naming_batch

Width = int | str
"""The bits of an integer, or the name of a format without a scale."""
AfterLayer = Callable[[], None]
OutputsOf = Callable[[Execution], list[Tensor]]
"""Gives what counts of the outputs of a run that has ended."""


@dataclass(frozen=True)
class Candidate:
    """A weight that may get another width: the linear and convolution layers that share it, and
    their specs.

    `implied` says that the rule for symmetric scales is the one that the config's form has for
    so many bits.
    """

    layers: tuple[str, ...]
    specs: tuple[QuantizationSpec, ...]
    implied: bool = False

    def with_width(self, spec: QuantizationSpec, width: Width) -> QuantizationSpec:
        """One of the specs with other bits, or a format without a scale.

        >>> spec = QuantizationSpec(qscheme="per_channel")
        >>> Candidate(("fc",), (spec,), implied=True).with_width(spec, 3).symmetric_scale
        'half_range'
        """
        found = with_width(spec, width)
        return (
            replace(found, symmetric_scale=usual_symmetric_scale(found))
            if self.implied
            else found
        )


def with_width(spec: QuantizationSpec, width: Width) -> QuantizationSpec:
    """The same with other bits, or a format without a scale.

    >>> with_width(QuantizationSpec(qscheme="per_channel"), 3).quant_max
    3
    """
    return (
        replace(spec, bit_width=width)
        if isinstance(width, int)
        else QuantizationSpec(dtype=width)
    )


def quantizers(
    network: Network, candidate: Candidate, width: Width
) -> dict[str, TensorQuantizer]:
    """What rounds the weight of each of the candidate's layers to nearest."""
    found = {}
    for name, own in zip(candidate.layers, candidate.specs, strict=True):
        tensor, weight = (
            QuantizedTensor(candidate.with_width(own, width)),
            network.layers[name].get_parameter("weight"),
        )
        scaled = (
            tensor.at(nearest_qparams(tensor.spec, weight)) if tensor.spec.is_scaled else tensor
        )
        found[name] = TensorQuantizer.of(scaled)
    return found


def rounded(network: Network, candidate: Candidate, width: Width) -> dict[str, Tensor]:
    """The weight of each of the candidate's layers as round-to-nearest leaves it."""
    found = quantizers(network, candidate, width)
    return {
        name: quantizer(network.layers[name].get_parameter("weight").detach())
        for name, quantizer in found.items()
    }


def layer_errors(
    network: Network,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    batches: Iterable[Batch],
    after_layer: AfterLayer = lambda: None,
) -> list[tuple[float, ...]]:
    """For each candidate tr(d H d^T) of every width, d being what rounding changes and H the
    Gram matrix of its inputs.

    One pass over the data. One value's Gram matrices exist at a time: one for linear layers,
    one for each convolution.

    Raises:
        DataError: an input of a layer is not finite (layer and batch are named).
    """
    owners = {name: candidate for candidate in candidates for name in candidate.layers}
    readers: dict[tuple[str, ...], list[str]] = {}
    for node in network.graph.nodes:
        if node.name in owners:
            readers.setdefault(tuple(node.operands.values()), []).append(node.name)
    found: dict[str, list[float]] = {}
    runner = SequentialRunner(network, batches)
    for read in sorted(readers, key=lambda names: network.graph.index[names[0]]):
        linear = [
            name for name in readers[read] if network.graph.by_name[name].row.spatial == 0
        ]
        grams = {
            name: Gram(network.layers[name]) for name in readers[read] if name not in linear[1:]
        }
        runner.advance(*watching(network, readers[read][0], functools.partial(_add, grams)))
        for name in readers[read]:
            layer, gram = (
                network.layers[name],
                grams[linear[0] if name in linear else name].matrix,
            )
            weight = layer.get_parameter("weight").detach().float()
            changes = (
                rounded(network, owners[name], width)[name].float() - weight for width in widths
            )
            found[name] = [
                output_error(gram, weight_matrix(layer, change)) for change in changes
            ]
            after_layer()
    # A weight that several layers multiply with has the errors of all.
    return [
        tuple(map(math.fsum, zip(*(found[name] for name in c.layers), strict=True)))
        for c in candidates
    ]


def _add(grams: Mapping[str, Gram], input: Tensor, **routing: Tensor) -> None:  # noqa: A002 - as layers name it
    for name, gram in grams.items():
        try:
            gram.add(input, **routing)
        except ObservationError as error:
            raise DataError(
                f"input of {name}: {error}", help="check the data and the weights"
            ) from error


def output_noise(
    network: Network,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    batches: Iterable[Batch],
    after_layer: AfterLayer = lambda: None,
    *,
    outputs_of: OutputsOf = Execution.float_outputs,
) -> tuple[list[tuple[float, ...]], float]:
    """Energy of the change of the network's outputs when one candidate alone is rounded, for
    each candidate and width; and the energy of the outputs.

    For each batch, candidate and width the rest of the network runs once, from the candidate
    on.

    Raises:
        DataError: an output of the float network is not finite, or no batch.
    """
    first = {
        min(candidate.layers, key=network.graph.index.__getitem__): at
        for at, candidate in enumerate(candidates)
    }
    noise = [[0.0] * len(widths) for _ in candidates]
    signal, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            with naming_batch(count):
                execution = network.start(batch.args, batch.kwargs)
                reference = outputs_of(execution.branch().advance())
            signal += math.fsum(map(energy, reference))
            count += 1
            for node in network.graph.nodes:
                if node.name in first:
                    row = noise[first[node.name]]
                    for column, width in enumerate(widths):
                        with _replaced(
                            network, rounded(network, candidates[first[node.name]], width)
                        ):
                            row[column] += distance(
                                reference, outputs_of(execution.branch().advance())
                            )
                    after_layer()
                execution.step()
    if not count:
        raise no_batches()
    if not math.isfinite(signal):
        raise DataError(
            "the float model's output is not finite", help="check the data and the weights"
        )
    return [tuple(row) for row in noise], signal


def noise_of(
    network: Network,
    weights: Mapping[str, Tensor],
    batches: Iterable[Batch],
    outputs_of: OutputsOf = Execution.float_outputs,
) -> float:
    """Energy of the change of the network's outputs when all these weights are replaced at
    once.
    """
    total = 0.0
    with torch.no_grad():
        for batch in batches:
            start = network.start(batch.args, batch.kwargs)
            reference = outputs_of(start.branch().advance())
            with _replaced(network, weights):
                total += distance(reference, outputs_of(start.advance()))
    return total


def distance(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Squared; infinite where rounding makes an output that is no number."""
    found = math.fsum(energy(x - y) for x, y in zip(reference, other, strict=True))
    return found if math.isfinite(found) else math.inf


@contextlib.contextmanager
def _replaced(network: Network, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The network with other weights, for a while."""
    kept = {name: network.layers[name].get_parameter("weight") for name in weights}
    try:
        for name, parameter in kept.items():
            set_parameter(network.layers[name], "weight", weights[name].to(parameter.dtype))
        yield
    finally:
        for name, parameter in kept.items():
            set_parameter(network.layers[name], "weight", parameter)
