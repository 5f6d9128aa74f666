"""How far a model with other weights is from itself: outputs of its layers on held-out tokens,
and logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def layer_errors(
    model: nn.Module, weights: Mapping[str, Tensor], batches: list[Tensor]
) -> dict[str, float]:
    """Squared error of each linear layer's outputs with the weight given by its path, on the
    float model's inputs, as a share of their energy.
    """
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in weights}

    def watching(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            error = args[0] @ (weights[name] - layer.get_parameter("weight")).T
            sums[name] += torch.stack([error.square().sum(), output.square().sum()])

        return hook

    hooks = [
        model.get_submodule(name).register_forward_hook(watching(name)) for name in weights
    ]
    for batch in batches:
        model(batch)
    for handle in hooks:
        handle.remove()
    return {name: float(error / energy) for name, (error, energy) in sums.items()}


@torch.no_grad()
def logits_error(
    model: Callable[[Tensor], Tensor], other: Callable[[Tensor], Any], batches: list[Tensor]
) -> float:
    """Squared error of another model's logits, as a share of the variance of this one's."""
    error = energy = 0.0
    for batch in batches:
        expected = model(batch)
        error += float((other(batch) - expected).square().sum())
        energy += float((expected - expected.mean()).square().sum())
    return error / energy
