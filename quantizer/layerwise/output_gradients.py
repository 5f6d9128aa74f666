"""Predict what rounding single weights adds to the network's output, from gradients of random
projections of the output.

The prediction is linear, so it holds for small changes. Rounds nothing itself.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from quantizer.errors import DataError, first_line
from quantizer.layerwise.sensitivity import (
    AfterLayer,
    Candidate,
    OutputsOf,
    Width,
    weight_quantizers,
)
from quantizer.layerwise.sequential_runner import no_batches
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import energy
from quantizer.sources.batches import Batch, prefix_batch_errors
from quantizer.storage.deferred_tensor import loaded

PROJECTIONS = 8
"""Of each batch. With four batches, a noise is found to a quarter of itself, 1 dB."""
_REMEDY = "measure without gradients: <--passes network>"
NO_GRADIENT = "the model's output has no gradient by its weights"


def predicted_noise(
    network: Network,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    batches: Iterable[Batch],
    *,
    after_projection: AfterLayer = lambda: None,
    seed: int = 0,
    outputs_of: OutputsOf = Execution.float_outputs,
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
    generator = torch.Generator().manual_seed(seed)
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
                _backward(outputs, generator, retain_graph=left > 0)
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


def _backward(
    outputs: Sequence[Tensor], generator: torch.Generator, *, retain_graph: bool
) -> None:
    """Take the gradient of one random projection of the outputs."""
    with_gradient = [output for output in outputs if output.requires_grad]
    if not with_gradient:
        raise DataError(NO_GRADIENT, help=_REMEDY)
    signs = [random_signs(output, generator) for output in with_gradient]
    try:
        torch.autograd.backward(with_gradient, signs, retain_graph=retain_graph)
    except RuntimeError as error:
        reason = first_line(error)
        raise DataError(f"{NO_GRADIENT}: {reason}", help=_REMEDY) from error
