"""Measure what round-to-nearest of single weights costs: errors of layers' outputs, and noise
of the network's outputs. Decides nothing.

The noise is measured, or predicted from gradients of random projections of the outputs. The
prediction is linear, so it holds for small changes.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from quantizer.config.forms.hierarchical_spec import usual_symmetric_scale
from quantizer.config.model import QuantizationSpec
from quantizer.errors import DataError, first_line
from quantizer.graph.tracing.parameters import set_parameter
from quantizer.layerwise.gram import GroupSums, watching
from quantizer.layerwise.patches import weight_matrix
from quantizer.layerwise.round_to_nearest import nearest_qparams, output_error
from quantizer.layerwise.sequential_runner import SequentialRunner, no_batches
from quantizer.nn.network import Execution, Network
from quantizer.nn.quantizer import QuantizedTensor, TensorQuantizer
from quantizer.numerics.metrics import energy
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import loaded

Width = int | str
"""The bits of an integer, or the name of a format without a scale."""
AfterLayer = Callable[[], None]
OutputsOf = Callable[[Execution], list[Tensor]]
"""Returns the outputs that count of a run that has ended."""


@dataclass(frozen=True)
class Candidate:
    """Describes a weight that may get another width.

    Attributes:
        layers: the linear and convolution layers that share it.
        specs: theirs.
        implied: whether the rule for symmetric scales is the one that the config's form has for
            so many bits.
    """

    layers: tuple[str, ...]
    specs: tuple[QuantizationSpec, ...]
    implied: bool

    def with_width(self, spec: QuantizationSpec, width: Width) -> QuantizationSpec:
        """Return one of the specs with other bits, or as a format without a scale.

        >>> spec = QuantizationSpec(qscheme="per_channel")
        >>> Candidate(("fc",), (spec,), implied=True).with_width(spec, 3).symmetric_scale
        'half_range'
        """
        changed = with_width(spec, width)
        if not self.implied:
            return changed
        return replace(changed, symmetric_scale=usual_symmetric_scale(changed))


def with_width(spec: QuantizationSpec, width: Width) -> QuantizationSpec:
    """Return the spec with other bits, or as a format without a scale.

    >>> with_width(QuantizationSpec(qscheme="per_channel"), 3).quant_max
    3
    """
    if isinstance(width, int):
        return replace(spec, bit_width=width)
    return QuantizationSpec(dtype=width)


def weight_quantizers(
    network: Network, candidate: Candidate, width: Width
) -> dict[str, TensorQuantizer]:
    """Return what rounds the weight of each of the candidate's layers to nearest."""
    quantizers = {}
    for name, spec in zip(candidate.layers, candidate.specs, strict=True):
        tensor = QuantizedTensor(candidate.with_width(spec, width))
        if tensor.spec.is_scaled:
            weight = network.layers[name].get_parameter("weight")
            tensor = tensor.with_qparams(nearest_qparams(tensor.spec, weight))
        quantizers[name] = TensorQuantizer.of(tensor)
    return quantizers


def rounded_weights(network: Network, candidate: Candidate, width: Width) -> dict[str, Tensor]:
    """Return the weight of each of the candidate's layers, rounded to nearest."""
    weights = {}
    for name, quantizer in weight_quantizers(network, candidate, width).items():
        weights[name] = quantizer(network.layers[name].get_parameter("weight").detach())
    return weights


def layer_errors(
    network: Network,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    batches: Iterable[Batch],
    *,
    after_layer: AfterLayer,
) -> list[tuple[float, ...]]:
    """Return tr(d H d^T) of each candidate and width, where d is what rounding changes and H
    the Gram matrix of its inputs.

    Takes one pass over the data. The Gram matrices of one value exist at a time.

    Raises:
        DataError: an input of a layer is not finite (layer and batch are named).
    """
    candidate_of: dict[str, Candidate] = {}
    for candidate in candidates:
        candidate_of.update(dict.fromkeys(candidate.layers, candidate))
    readers: dict[tuple[str, ...], list[str]] = {}
    for node in network.graph.nodes:
        if node.name in candidate_of:
            readers.setdefault(tuple(node.operands.values()), []).append(node.name)
    errors: dict[str, list[float]] = {}
    runner = SequentialRunner(network, batches)
    for sources in sorted(readers, key=lambda names: network.graph.index[names[0]]):
        names = readers[sources]
        sums = GroupSums(network, names)
        runner.advance(*watching(network, names[0], sums.add))
        for name in names:
            layer = network.layers[name]
            weight = layer.get_parameter("weight").detach().float()
            errors[name] = []
            for width in widths:
                change = (
                    rounded_weights(network, candidate_of[name], width)[name].float() - weight
                )
                error = output_error(sums.matrix(name), weight_matrix(layer, change))
                errors[name].append(error)
            after_layer()
    totals = []
    for candidate in candidates:
        # A weight that several layers share has the errors of all
        by_width = zip(*[errors[name] for name in candidate.layers], strict=True)
        totals.append(tuple(math.fsum(of_layers) for of_layers in by_width))
    return totals


def output_noise(
    network: Network,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    batches: Iterable[Batch],
    *,
    after_layer: AfterLayer,
    outputs_of: OutputsOf,
) -> tuple[list[tuple[float, ...]], float]:
    """Return the energy of the change of the network's outputs when one candidate alone is
    rounded, for each candidate and width, and the energy of the outputs.

    For each batch, candidate and width, the network runs once from the candidate on.

    Raises:
        DataError: an output of the float network is not finite, or there is no batch.
    """
    starts: dict[str, int] = {}
    for number, candidate in enumerate(candidates):
        starts[min(candidate.layers, key=network.graph.index.__getitem__)] = number
    noise = [[0.0] * len(widths) for _ in candidates]
    signal = 0.0
    count = 0
    with torch.no_grad():
        for batch in batches:
            with prefix_batch_errors(count, batch):
                execution = network.start(batch.args, batch.kwargs)
                reference = outputs_of(execution.branch().advance())
            signal += math.fsum(map(energy, reference))
            count += 1
            for node in network.graph.nodes:
                if node.name in starts:
                    number = starts[node.name]
                    for column, width in enumerate(widths):
                        weights = rounded_weights(network, candidates[number], width)
                        with _replaced(network, weights):
                            outputs = outputs_of(execution.branch().advance())
                        noise[number][column] += _squared_distance(reference, outputs)
                    after_layer()
                execution.step()
    if not count:
        raise no_batches()
    if not math.isfinite(signal):
        raise DataError(
            "the float model's output is not finite", help="check the data and the weights"
        )
    return [tuple(by_width) for by_width in noise], signal


def noise_of(
    network: Network,
    weights: Mapping[str, Tensor],
    batches: Iterable[Batch],
    outputs_of: OutputsOf,
) -> float:
    """Return the energy of the change of the network's outputs when all these weights are
    replaced at once.
    """
    total = 0.0
    with torch.no_grad():
        for batch in batches:
            execution = network.start(batch.args, batch.kwargs)
            reference = outputs_of(execution.branch().advance())
            with _replaced(network, weights):
                outputs = outputs_of(execution.advance())
            total += _squared_distance(reference, outputs)
    return total


def _squared_distance(reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Return the squared distance; infinity where rounding makes an output NaN."""
    pairs = zip(reference, outputs, strict=True)
    total = math.fsum(energy(x - y) for x, y in pairs)
    return total if math.isfinite(total) else math.inf


@contextlib.contextmanager
def _replaced(network: Network, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the network other weights for a while."""
    before = {name: network.layers[name].get_parameter("weight") for name in weights}
    try:
        for name, parameter in before.items():
            set_parameter(network.layers[name], "weight", weights[name].to(parameter.dtype))
        yield
    finally:
        for name, parameter in before.items():
            set_parameter(network.layers[name], "weight", parameter)


PROJECTIONS = 8
"""Of each batch. With four batches, a noise is found to a quarter of itself, 1 dB."""
_REMEDY = "measure without gradients: <--passes network>"
_NO_GRADIENT = "the model's output has no gradient by its weights"


def predicted_noise(
    network: Network,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    batches: Iterable[Batch],
    *,
    after_projection: AfterLayer,
    outputs_of: OutputsOf,
) -> tuple[list[tuple[float, ...]], float]:
    """Return the energy that each candidate alone, rounded to each width, adds to the network's
    output, and the energy of the output.

    J is the Jacobian of the output y by a weight, d what rounding changes in it, and v a vector
    of random signs. The expectation of (v.Jd)^2 is |Jd|^2 (Hutchinson 1990), and v.Jd is the
    product of d with the gradient of v.y. One backward pass gives it for all weights and
    widths. Memory holds what the backward pass needs of one batch, and the gradient of one
    weight at a time.

    Raises:
        DataError: there is no batch, no gradient reaches the weights, or an output or a
            gradient is not finite.
    """
    generator = torch.Generator().manual_seed(0)
    products = torch.zeros(len(candidates), len(widths), dtype=torch.float64)
    noise = torch.zeros_like(products)
    signal = 0.0
    count = 0
    with _adding_products(network, candidates, widths, products):
        for batch in batches:
            with prefix_batch_errors(count, batch), torch.enable_grad():
                execution = network.start(batch.args, batch.kwargs)
                outputs = outputs_of(execution.advance())
            signal += sum(energy(output.detach()) for output in outputs)
            count += 1
            for left in reversed(range(PROJECTIONS)):
                signs = partial(random_signs, generator=generator)
                backward(outputs, signs, retain_graph=left > 0, remedy=_REMEDY)
                noise += products.square() / PROJECTIONS
                products.zero_()
                after_projection()
    if not count:
        raise no_batches()
    if not math.isfinite(signal + float(noise.sum())):
        raise DataError(
            "the float model's output or a gradient of it is not finite",
            help="check data and weights",
        )
    return [tuple(by_width) for by_width in noise.tolist()], signal


@contextlib.contextmanager
def _adding_products(
    network: Network, candidates: Sequence[Candidate], widths: Sequence[Width], products: Tensor
) -> Iterator[None]:
    """Make backward passes add the products of gradients with what rounding changes to
    `products`, for a while.

    Weights in files are in memory meanwhile, as a backward pass needs all of them.
    """
    before: dict[str, nn.Parameter] = {}
    try:
        for row, candidate in zip(products, candidates, strict=True):
            by_width = [weight_quantizers(network, candidate, width) for width in widths]
            for name in candidate.layers:
                layer = network.layers[name]
                before[name] = layer.get_parameter("weight")
                values = loaded(before[name].detach())
                parameter = nn.Parameter(values)
                add = _adding(row, [quantizers[name] for quantizers in by_width])
                parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]
                layer.register_parameter("weight", parameter)
        yield
    finally:
        for name, parameter in before.items():
            network.layers[name].register_parameter("weight", parameter)


def _adding(row: Tensor, quantizers: Sequence[TensorQuantizer]) -> Callable[[Tensor], None]:
    @torch.no_grad()
    def add(weight: Tensor) -> None:
        """Add the products of the gradient and each change of the weight to the row."""
        # The gradient has just come
        assert weight.grad is not None
        for index, quantizer in enumerate(quantizers):
            change = quantizer(weight) - weight
            row[index] += float(change.mul_(weight.grad).sum(dtype=torch.float64))
        weight.grad = None

    return add


def random_signs(output: Tensor, generator: torch.Generator) -> Tensor:
    """Return values of 1 and -1, drawn on the CPU, in the shape and dtype of an output."""
    bits = torch.randint(0, 2, output.shape, generator=generator, dtype=torch.int8)
    return bits.to(output).mul_(2).sub_(1)


def backward(
    outputs: Sequence[Tensor],
    gradient_by: Callable[[Tensor], Tensor],
    *,
    retain_graph: bool,
    remedy: str,
) -> None:
    """Run one backward pass, which starts at each output with the gradient that is given by it.

    Raises:
        DataError: no output has a gradient.
    """
    with_gradient = [output for output in outputs if output.requires_grad]
    if not with_gradient:
        raise DataError(_NO_GRADIENT, help=remedy)
    gradients = [gradient_by(output) for output in with_gradient]
    try:
        torch.autograd.backward(with_gradient, gradients, retain_graph=retain_graph)
    except RuntimeError as error:
        reason = first_line(error)
        raise DataError(f"{_NO_GRADIENT}: {reason}", help=remedy) from error
