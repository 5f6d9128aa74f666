"""What rounding single weights adds to the network's output, predicted from gradients of random
projections of it.

Linear: what it says is true of small changes. Rounds nothing itself.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from quantizer.algorithms.sensitivity import AfterLayer, Candidate, OutputsOf, Width, quantizers
from quantizer.algorithms.sequential_runner import no_batches
from quantizer.errors import DataError
from quantizer.nn.execution import Execution
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.numerics.metrics import energy
from quantizer.sources.batches import Batch, naming_batch

PROJECTIONS = 8
"""Of each batch: with four batches, a noise is found to a quarter of itself, 1 dB."""
WITHOUT = "measure without gradients: --passes network"


def predicted_noise(
    network: Network,
    candidates: Sequence[Candidate],
    widths: Sequence[Width],
    batches: Iterable[Batch],
    after_projection: AfterLayer = lambda: None,
    seed: int = 0,
    *,
    outputs_of: OutputsOf = Execution.float_outputs,
) -> tuple[list[tuple[float, ...]], float]:
    """Energy that each candidate alone, rounded to each width, adds to the network's output;
    and that of the output.

    With v of random signs, the expectation of (v.Jd)^2 is the squared norm of Jd (Hutchinson
    1990), where J is the Jacobian of the output y by a weight and d what rounding changes in
    it; and v.Jd is the product of d with the gradient of v.y. One backward pass gives it for
    all weights and widths. Memory holds what the backward pass needs of one batch, and one
    weight's gradient at a time.

    Raises:
        DataError: no batch, no gradient reaches the weights, or an output or a gradient is not
            finite.
    """
    generator = torch.Generator().manual_seed(seed)
    products = torch.zeros(len(candidates), len(widths), dtype=torch.float64)
    noise, signal, count = torch.zeros_like(products), 0.0, 0
    with _shown(network, candidates, widths, products):
        for batch in batches:
            # A record of how the outputs come about
            with naming_batch(count), torch.enable_grad():
                outputs = outputs_of(network.start(batch.args, batch.kwargs).advance())
            signal, count = signal + sum(energy(y.detach()) for y in outputs), count + 1
            for left in reversed(range(PROJECTIONS)):
                _project(outputs, generator, keep=left > 0)
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
    return [tuple(row) for row in noise.tolist()], signal


@contextlib.contextmanager
def _shown(
    network: Network, candidates: Sequence[Candidate], widths: Sequence[Width], into: Tensor
) -> Iterator[None]:
    """While it lasts, a backward pass adds the products of gradients with what rounding changes
    to `into`.
    """
    parameters: list[nn.Parameter] = []
    hooks = []
    try:
        for row, candidate in zip(into, candidates, strict=True):
            found = [quantizers(network, candidate, width) for width in widths]
            for name in candidate.layers:
                parameter = network.layers[name].get_parameter("weight")
                add = _adding(row, [each[name] for each in found])
                parameter.requires_grad_()
                hooks.append(parameter.register_post_accumulate_grad_hook(add))  # type: ignore[no-untyped-call]
                parameters.append(parameter)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            parameter.requires_grad_(False)


def _adding(row: Tensor, quantizers: Sequence[TensorQuantizer]) -> Callable[[Tensor], None]:
    @torch.no_grad()
    def add(weight: Tensor) -> None:
        assert weight.grad is not None  # it has just come
        for at, quantizer in enumerate(quantizers):
            change = quantizer(weight) - weight
            row[at] += float(change.mul_(weight.grad).sum(dtype=torch.float64))
        weight.grad = None

    return add


def _project(outputs: Sequence[Tensor], generator: torch.Generator, *, keep: bool) -> None:
    """Take the gradient of one random projection; the record stays if it is to `keep`."""
    moved = [y for y in outputs if y.requires_grad]
    signs = [
        torch.randint(0, 2, y.shape, generator=generator, dtype=torch.int8)
        .to(y)
        .mul_(2)
        .sub_(1)
        for y in moved
    ]
    refused = "the model's output has no gradient by its weights"
    if not moved:
        raise DataError(refused, help=WITHOUT)
    try:
        torch.autograd.backward(moved, signs, retain_graph=keep)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{refused}: {reason}", help=WITHOUT) from error
