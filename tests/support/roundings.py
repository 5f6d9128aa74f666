"""What tests of GPTQ and its kin share: inputs of known statistics, and a layer rounded on
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantizer.algorithms.gptq.algorithms import gptq
from quantizer.algorithms.gptq.settings import GPTQConfig
from quantizer.config.model import QuantizationSpec
from quantizer.graph.ir import Graph
from quantizer.graph.structure.find import find_structure
from quantizer.graph.tracing.trace import trace
from quantizer.layerwise.adjustment import Adjustment, RoundedWeight, Run, Task
from quantizer.layerwise.round_to_nearest import nearest, nearest_qparams
from quantizer.sources.batches import Batch

CHANNELS = QuantizationSpec(bit_width=3, qscheme="per_channel", ch_axis=0)
GROUPS = QuantizationSpec(
    bit_width=4, symmetric=False, qscheme="per_group", ch_axis=1, group_size=16
)


def autoregressive(tokens: int, depth: int, seed: int, correlation: float = 0.9) -> Tensor:
    """Channels that each follow the one before."""
    x = torch.randn(tokens, depth, generator=torch.Generator().manual_seed(seed))
    for channel in range(1, depth):
        x[:, channel] = (
            correlation * x[:, channel - 1] + math.sqrt(1 - correlation**2) * x[:, channel]
        )
    return x


def low_rank(tokens: int, depth: int, seed: int, rank: int = 32) -> Tensor:
    """Mixtures of a few sources, the same for every seed, and some noise."""
    mixing = torch.randn(rank, depth, generator=torch.Generator().manual_seed(5)) / math.sqrt(
        rank
    )
    draw = torch.Generator().manual_seed(seed)
    noise: Tensor = 0.1 * torch.randn(tokens, depth, generator=draw)
    return noise + torch.randn(tokens, rank, generator=draw) @ mixing


def decaying(tokens: int, depth: int, seed: int) -> Tensor:
    """A covariance with eigenvalues 1, 1/2, 1/3, …, in directions that are the same for every
    seed.
    """
    basis, _ = torch.linalg.qr(
        torch.randn(depth, depth, generator=torch.Generator().manual_seed(6))
    )
    x = torch.randn(tokens, depth, generator=torch.Generator().manual_seed(seed))
    spectrum: Tensor = torch.arange(1, depth + 1).float().rsqrt()
    spread: Tensor = x * spectrum @ basis.T
    return spread


def independent(tokens: int, depth: int, seed: int) -> Tensor:
    """White noise."""
    return torch.randn(tokens, depth, generator=torch.Generator().manual_seed(seed))


def task_of(model: nn.Module, batches: Sequence[Tensor], spec: QuantizationSpec) -> Task:
    """The weights of all its linear and convolution layers in one specification."""
    graph = trace(model.eval(), (batches[0],))
    specs = {(name, "weights"): spec for name in layer_names(graph)}
    return Task(
        graph, specs, find_structure(graph), lambda: [Batch((x,), {}, None, x) for x in batches]
    )


def layer_names(graph: Graph) -> list[str]:
    """Of the layers that have a weight matrix, in execution order."""
    return [node.name for node in graph.nodes if node.row.is_linear_or_convolution]


def weight_of(graph: Graph, name: str) -> Tensor:
    """The layer's float weight."""
    return graph.tensors[graph.by_name[name].params["weight"]]


def linear(weight: Tensor) -> nn.Linear:
    """A layer with this weight and no bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    return layer


def solved(
    weight: Tensor,
    x: Tensor,
    spec: QuantizationSpec = CHANNELS,
    settings: GPTQConfig | None = None,
    run: Run = gptq,
) -> tuple[RoundedWeight, Adjustment]:
    """One linear layer rounded on these inputs, and all that was found."""
    task = task_of(linear(weight), torch.split(x, 512), spec)
    found = run(task, settings or GPTQConfig(), Adjustment())
    return found.rounded[layer_names(task.graph)[0]], found


def to_nearest(weight: Tensor, spec: QuantizationSpec) -> Tensor:
    """The weight, each value rounded on its own."""
    return nearest(weight, spec, nearest_qparams(spec, weight))


def gain(weight: Tensor, rounded: Tensor, x: Tensor, spec: QuantizationSpec) -> float:
    """How many times smaller the squared error of the outputs is than with round-to-nearest."""
    plain, left = (
        ((weight - other) @ x.T).square().sum() for other in (to_nearest(weight, spec), rounded)
    )
    return float(plain / left)


def resumed(task: Task, done: int) -> Task:
    """The task of a run that had been interrupted after so many groups."""
    return replace(task, done=done)


def remarks(found: Adjustment) -> Mapping[str, list[str]]:
    """What is said of each layer."""
    said: dict[str, list[str]] = {}
    for remark in found.remarks:
        said.setdefault(remark.layer, []).append(remark.text)
    return said
