"""Weight tokens by how much the network's loss depends on the outputs of layers for them.

The squared error of GPTQ counts all tokens alike. But an error in the outputs of some tokens
changes the network's output much, and in those of others hardly. So a token counts as the
squared gradient of the loss by these outputs. A power between 0 and 1 makes that milder. A
token with weight w has products w x x^T.

Source: Kim et al. 2025, "GuidedQuant: Large Language Model Quantization via Exploiting End Loss
Guidance" (arXiv 2505.07004), with one group of output channels. The power is not the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from quantizer.algorithms.adjustment import Task
from quantizer.algorithms.gram import quantized_layers
from quantizer.algorithms.output_gradients import NO_GRADIENT, random_signs
from quantizer.algorithms.sequential_runner import reads_ids
from quantizer.errors import DataError
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch, prefix_batch_errors


class TokenWeights:
    """Hands out the roots of the weights of one value's tokens, in the order of the batches.

    Args:
        weights: float32 [tokens], with a mean of 1.
    """

    def __init__(self, weights: Tensor) -> None:
        self._roots = weights.sqrt()
        self._position = 0

    def next(self, value: Tensor) -> Tensor:
        """Return the roots for the next tokens, as many as the value has: [..., 1]."""
        shape = (*value.shape[:-1], 1)
        start = self._position
        self._position += value.shape[:-1].numel()
        return self._roots[start : self._position].view(shape)


def token_weights(network: Network, task: Task, power: float) -> dict[str, Tensor]:
    """Return the weights of all tokens of this rank's batches, float32 [tokens], by the name of
    the value. Only values that linear layers with quantized weights read have them.

    The loss of a model of token ids is the cross entropy with tokens drawn from its own
    distribution. That of others is the squared error of the outputs, by random signs. Neither
    needs labels. Memory holds all weights, and what the backward pass of one batch needs.

    Raises:
        DataError: the output has no gradient, or a gradient is not finite.
    """
    readers: dict[str, list[str]] = {}
    for group in task.structure.groups:
        for name in quantized_layers(task, group):
            if network.graph.by_name[name].op == "linear":
                readers.setdefault(group.source, []).append(name)
    by_value: dict[str, list[Tensor]] = {value: [] for value in readers}
    generator = torch.Generator().manual_seed(0)
    for number, batch in enumerate(task.batches()):
        if task.ranks.owns(number):
            with prefix_batch_errors(number, batch):
                energies = _energies(network, batch, readers, generator)
            for value, energy in energies.items():
                by_value[value].append(energy)
    weights = {}
    for value, energies_of_batches in by_value.items():
        weights[value] = _normalized(energies_of_batches, power)
    return weights


def _energies(
    network: Network,
    batch: Batch,
    readers: Mapping[str, Sequence[str]],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the squared gradients of each token of a batch, summed over the channels of all
    layers that read a value: float32 [tokens], by the value.
    """
    energies: dict[str, Tensor] = {}
    watchers = {}
    for value, names in readers.items():
        for name in names:
            watchers[name] = _adding(energies, value)
    with torch.enable_grad():
        execution = network.start(batch.args, batch.kwargs).advance(watch=watchers)
        outputs = [output for output in execution.float_outputs() if output.requires_grad]
        if not outputs:
            raise DataError(NO_GRADIENT, help='calibrate with "guidance": 0')
        if reads_ids(network):
            gradients = [_drawn_gradient(output, generator) for output in outputs]
        else:
            gradients = [random_signs(output, generator) for output in outputs]
        torch.autograd.backward(outputs, gradients)
    return energies


def _adding(energies: dict[str, Tensor], value: str) -> Callable[[Tensor], None]:
    def watch(output: Tensor) -> None:
        """Make the backward pass add the squared gradient of a layer's output."""
        tokens = output.shape[:-1].numel()
        energies.setdefault(value, output.new_zeros(tokens, dtype=torch.float32))
        if not output.requires_grad:
            output.requires_grad_()
        output.register_hook(add)  # type: ignore[no-untyped-call]

    def add(gradient: Tensor) -> None:
        energies[value] += gradient.float().square().sum(-1).flatten()

    return watch


def _drawn_gradient(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return the gradient of the cross entropy with drawn classes by logits [..., classes]."""
    probabilities = logits.detach().float().softmax(-1)
    by_token = probabilities.flatten(0, -2)
    # The generator is the CPU's, so that all devices draw alike
    drawn = torch.multinomial(by_token.cpu(), 1, generator=generator).to(logits.device)
    by_token.scatter_add_(1, drawn, by_token.new_full(drawn.shape, -1.0))
    return probabilities.to(logits.dtype)


def _normalized(energies: Iterable[Tensor], power: float) -> Tensor:
    """Return the energies to a power, with a mean of 1. Tokens without energy weigh nothing,
    unless none has any: all weigh 1 then.
    """
    weights = torch.cat([*energies]).pow(power)
    mean = weights.mean()
    if not mean.isfinite():
        raise DataError(
            "a gradient of the float model's loss is not finite", help="check data and weights"
        )
    if mean == 0:
        return torch.ones_like(weights)
    return weights / mean
