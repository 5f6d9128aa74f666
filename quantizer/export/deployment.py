"""What every exporter is given and what it answers. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.engine.attach import quantized_network
from quantizer.engine.solution import Solution
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network


@dataclass(frozen=True)
class Deployment:
    """A calibrated network and one call to verify files with; all on the CPU.

    `args` and `kwargs` are a call of the model, which no file keeps. `opset` is the ONNX operator set, -1 to let the
    exporter choose.
    """

    graph: Graph
    solution: Solution
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    opset: int = -1

    def network(self) -> Network:
        """The network as test mode runs it; a fresh one, which the exporter may change."""
        return quantized_network(self.graph, self.solution)

    @cached_property
    def expected(self) -> list[Tensor]:
        """The tensors of test mode's output for the call, in order."""
        with torch.no_grad():
            return tensor_leaves(self.network()(*self.args, **self.kwargs))

    @cached_property
    def blank(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with zeros for values and, where the batch may vary, two samples: torch takes a batch of one for a
        constant.
        """
        leaves, spec = pytree.tree_flatten((self.args, dict(self.kwargs)))
        inputs = [node for node in self.graph.nodes if node.op == "input"]
        blanks = [
            torch.zeros([2 if size is None else size for size in node.shape or ()], dtype=leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            for node, leaf in zip(inputs, leaves, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(blanks, spec)
        return args, kwargs


@dataclass(frozen=True)
class Verification:
    """A file against test mode: `compared` says what of it; differences are absolute, `equal` a share from 0 to 1."""

    compared: str
    max_difference: float
    mean_difference: float
    equal: float


def verify(compared: str, expected: Sequence[Tensor], found: Sequence[Tensor]) -> Verification:
    """Compare tensors pairwise; NaN and infinity equal themselves.

    Raises:
        ValueError: the number of tensors or a shape differs.
    """
    largest, total, equal, count = 0.0, 0.0, 0, 0
    for want, got in zip(expected, found, strict=True):
        if want.shape != got.shape:
            raise ValueError(f"The file gives shape {tuple(got.shape)} where test mode gives {tuple(want.shape)}.")
        want, got = want.double(), got.double()
        same = (want == got) | (want.isnan() & got.isnan())
        difference = torch.where(same, 0.0, (want - got).abs())
        largest = max(largest, float(difference.max())) if difference.numel() else largest
        total += float(difference.sum())
        equal += int(same.sum())
        count += want.numel()
    return Verification(compared, largest, total / max(count, 1), equal / count if count else 1.0)


def tensor_leaves(output: Any) -> list[Tensor]:
    """The tensors in a nested output; constants are no part of a file."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
