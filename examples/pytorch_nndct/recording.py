"""Keeps what a script calls a network with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Recording(nn.Module):
    """Calls a network, and keeps the inputs of each call as `batches`.

    Args:
        network: the float model.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.eval()
        self.batches: list[Any] = []
        self._most: int | None = None

    def begin(self, network: nn.Module, most: int) -> None:
        """Call another network from now on, and keep the inputs of its first calls."""
        self.network = network.eval()
        self.batches = []
        self._most = most

    def train(self, mode: bool = True) -> Recording:
        """Leave the network in eval mode, in which it is calibrated."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the network."""
        if self._most is None or len(self.batches) < self._most:
            self.batches.append(batch_of(args, kwargs))
        with torch.no_grad():
            return self.network(*args, **kwargs)


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the inputs of a call as a batch: by name if the call names them.

    Raises:
        SystemExit: the call names only some of them.
    """
    if args and kwargs:
        raise SystemExit("error: call quant_model with all inputs in order, or all by name")
    kept = [_kept(value) for value in args]
    if kwargs:
        return {name: _kept(value) for name, value in kwargs.items()}
    return kept[0] if len(kept) == 1 else tuple(kept)


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
