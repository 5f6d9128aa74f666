"""Weight tokens by how much the network's loss depends on the outputs of layers for them.

The squared error of GPTQ counts all tokens alike. But an error in the outputs of some tokens
changes the network's output much, and in those of others hardly. So a token counts as the
squared gradient of the loss by these outputs. A power between 0 and 1 makes that milder. A
token with weight w has products w x x^T.

Source: Kim et al. 2025, "GuidedQuant: Large Language Model Quantization via Exploiting End Loss
Guidance" (arXiv 2505.07004), with one group of output channels. The power is not the paper's.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from quantizer.distributed import Ranks
from quantizer.errors import DataError
from quantizer.graph.structure.transformer_parts import language_head
from quantizer.layerwise.adjustment import Remark, Task
from quantizer.layerwise.gram import quantized_layers
from quantizer.layerwise.sensitivity import backward, random_signs
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch, prefix_batch_errors

_DRAWS = 4
"""Backward passes of each batch. With one, results depend on the numbers that are drawn."""
_REMEDY = 'calibrate with "guidance": 0'


class TokenWeights:
    """Hands out the square roots of the weights of one value's tokens, batch after batch.

    Scaling x by the root of w gives products w x x^T.

    Args:
        weights: float32 [tokens], with a mean of 1.
    """

    def __init__(self, weights: Tensor) -> None:
        self._roots = weights.sqrt()
        self._position = 0

    def next(self, value: Tensor) -> Tensor:
        """Return the roots for a value [..., channels] of the next tokens: float32 [..., 1]."""
        tokens = value.shape[:-1]
        start = self._position
        self._position += tokens.numel()
        roots = self._roots[start : self._position]
        return roots.view(*tokens, 1)


def token_weights(network: Network, task: Task, power: float) -> dict[str, Tensor]:
    """Return the weights of all tokens of this rank's batches, float32 [tokens], by value.

    Only values that linear layers with quantized weights read have weights. The loss of a
    language model is the cross entropy with tokens drawn from its own distribution. That of
    other outputs is their squared error, estimated with random signs. Neither needs labels.
    Memory holds all weights, and what the backward pass of one batch needs.

    Args:
        network: the float network.
        task: names the layers, the batches and the ranks.
        power: of the squared gradient, above 0 up to 1.

    Raises:
        DataError: the output has no gradient, or a gradient is not finite.
    """
    value_of_layer = _values_of_layers(network, task)
    if not value_of_layer:
        return {}
    batch_weights: dict[str, list[Tensor]] = {}
    generator = torch.Generator()
    for number, batch in enumerate(task.batches()):
        if task.ranks.owns(number):
            # Seeded by the batch, so that the draws do not depend on the number of ranks
            generator.manual_seed(number)
            with prefix_batch_errors(number, batch):
                energies = _energies(network, batch, value_of_layer, generator)
            for value, energy in energies.items():
                weight = energy.pow(power)
                batch_weights.setdefault(value, []).append(weight)
    weights = {value: torch.cat(tensors) for value, tensors in batch_weights.items()}
    means = _means(weights, task.ranks)
    for mean in means.values():
        if not math.isfinite(mean):
            raise DataError(
                "a gradient of the float model's loss is not finite",
                help="check data and weights",
            )
    for value, weight in weights.items():
        mean = means[value]
        if mean > 0:
            weight /= mean
        else:
            # No token has any effect, so all weigh alike
            weight.fill_(1)
    return weights


def unguided_remarks(network: Network, task: Task) -> Iterator[Remark]:
    """Yield a note for each layer that guidance does not weigh because it is not linear."""
    guided = _values_of_layers(network, task)
    for group in task.structure.groups:
        for name in quantized_layers(task, group):
            if name not in guided:
                text = "guidance weighs linear layers only, so all its positions count alike"
                yield Remark(name, text, is_warning=False)


def _means(weights: Mapping[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """Return the mean weight of the tokens of all ranks, by value."""
    sums = {value: (float(weight.sum()), len(weight)) for value, weight in weights.items()}
    totals: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for rank_sums in ranks.gather(sums, "weights of tokens"):
        for value, (rank_total, rank_tokens) in rank_sums.items():
            totals[value] += rank_total
            counts[value] += rank_tokens
    return {value: total / counts[value] for value, total in totals.items()}


def _values_of_layers(network: Network, task: Task) -> dict[str, str]:
    """Return the value that each linear layer reads, by the layer's name."""
    values = {}
    for group in task.structure.groups:
        for name in quantized_layers(task, group):
            layer = network.layers[name]
            if isinstance(layer, nn.Linear):
                values[name] = group.source
    return values


def _energies(
    network: Network,
    batch: Batch,
    value_of_layer: Mapping[str, str],
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the squared gradients of each token of a batch, summed over the channels of all
    layers that read a value: float32 [tokens], by the value.
    """
    energies: dict[str, Tensor] = {}
    vocabulary = _vocabulary(network)
    with contextlib.ExitStack() as hooks, torch.enable_grad():
        for name, value in value_of_layer.items():
            layer = network.layers[name]
            start = layer.register_forward_pre_hook(_with_gradient, with_kwargs=True)
            end = layer.register_forward_hook(_energy_hook(energies, value))
            hooks.callback(start.remove)
            hooks.callback(end.remove)
        execution = network.start(batch.args, batch.kwargs)
        execution.advance()
        outputs = execution.float_outputs()
        drawn = partial(_drawn_gradient, vocabulary=vocabulary, generator=generator)
        for draw in range(1, _DRAWS + 1):
            backward(outputs, drawn, retain_graph=draw < _DRAWS, remedy=_REMEDY)
    return energies


def _drawn_gradient(output: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Return the gradient of a drawn loss by an output, in its shape and dtype.

    Outputs whose last axis is as long as the vocabulary are logits.
    """
    # A scalar has no last axis, and counts as one channel
    if output.shape[-1:].numel() != vocabulary:
        return random_signs(output, generator)
    # That of the cross entropy is softmax minus one-hot. Each class is drawn from its softmax
    probabilities = output.detach().float().softmax(-1)
    by_token = probabilities.flatten(0, -2)
    # The generator is the CPU's, so that all devices draw alike
    drawn = torch.multinomial(by_token.cpu(), 1, generator=generator)
    classes = drawn.to(output.device)
    # by_token is a view of the probabilities, which change with it
    by_token.scatter_add_(1, classes, by_token.new_full(classes.shape, -1.0))
    return probabilities.to(output.dtype)


def _vocabulary(network: Network) -> int:
    """Return how many tokens the head of a language model knows; 0 for other models."""
    graph = network.graph
    names = language_head(graph)
    if not names:
        return 0
    head = graph.by_name[names[-1]]
    return len(graph.weight(head))


def _with_gradient(
    _: nn.Module, args: tuple[()], operands: dict[str, Tensor]
) -> tuple[tuple[()], dict[str, Tensor]]:
    """Return a layer's operands, all with gradients, so that its output has one.

    The network's parameters and inputs have none: the first layers start the backward pass.
    """
    watched = {}
    for key, operand in operands.items():
        watched[key] = operand
        if not operand.requires_grad:
            # Detached, as a later operator may write into the operand, but not into a leaf
            leaf = operand.detach()
            watched[key] = leaf.requires_grad_()
    return args, watched


def _energy_hook(energies: dict[str, Tensor], value: str) -> Callable[..., None]:
    """Return a forward hook of a layer that reads `value`.

    It makes the backward pass add the squared gradients of the layer's output to `energies`.
    """

    def after_forward(_: nn.Module, args: object, output: Tensor) -> None:
        tokens = output.shape[:-1].numel()
        energies.setdefault(value, output.new_zeros(tokens, dtype=torch.float32))
        output.register_hook(add)  # type: ignore[no-untyped-call]

    def add(gradient: Tensor) -> None:
        energies[value] += gradient.float().square().sum(-1).flatten()

    return after_forward
