"""What tests of algorithms that rescale share: tasks on small models, quantized outputs, and
models of many kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.config.model import QuantizationSpec
from quantizer.graph.edits import with_weights
from quantizer.graph.ir import Graph
from quantizer.graph.structure.find import find_structure
from quantizer.layerwise.adjustment import Adjustment, Task, apply_adjustment
from quantizer.layerwise.round_to_nearest import nearest_qparams
from quantizer.nn.network import Network
from quantizer.nn.quantizer import TensorQuantizer
from quantizer.observers import Observer
from quantizer.sources.batches import Batch
from support.structures import Mixture, Mobile, prepared, pretrained

W8 = QuantizationSpec(qscheme="per_channel", ch_axis=0)
A8 = QuantizationSpec()
FAMILIES = ("Llama", "Qwen2", "Mistral", "Gemma", "OPT", "GPT2", "Bert", "ViT", "Mixtral")
W4 = QuantizationSpec(
    bit_width=4, signed=False, symmetric=False, qscheme="per_group", ch_axis=1, group_size=32
)


def task_of(
    model: nn.Module,
    inputs: Sequence[Any],
    weights: QuantizationSpec | None = W8,
    activations: QuantizationSpec | None = None,
    **changes: Any,
) -> Task:
    """All linear and convolution layers with these specs."""
    graph = prepared(model, inputs[0])
    specs = {}
    for node in graph.nodes:
        if node.row.is_linear_or_convolution and "weight" in node.params:
            specs |= {(node.name, "weights"): weights} if weights else {}
            specs |= {(node.name, "input"): activations} if activations else {}
    return Task(
        graph,
        specs,
        find_structure(graph),
        lambda: [Batch((x,), {}, None, x) for x in inputs],
        **changes,
    )


def with_rounded_weights(graph: Graph, found: Adjustment) -> Graph:
    """The graph with all that algorithms have changed, rounded weights too."""
    weights = {name: {"weight": layer.weight} for name, layer in found.rounded.items()}
    return with_weights(apply_adjustment(graph, found), weights)


def outputs(graph: Graph, inputs: Sequence[Any]) -> list[Tensor]:
    """Floating-point outputs of a float network."""
    network = Network(graph)
    with torch.no_grad():
        leaves = [leaf for x in inputs for leaf in pytree.tree_leaves(network(x))]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def difference(task: Task, found: Adjustment, inputs: Sequence[Any]) -> float:
    """How far the float network's outputs moved, as a share of the largest."""
    pairs = zip(
        outputs(task.graph, inputs),
        outputs(apply_adjustment(task.graph, found), inputs),
        strict=True,
    )
    return max(float((x - y).abs().max() / x.abs().max()) for x, y in pairs)


def quantized_error(
    task: Task, found: Adjustment, inputs: Sequence[Any], *, rounded: bool = False
) -> float:
    """Squared error of the quantized network's outputs as a share of their energy; static
    ranges are of `inputs`.
    """
    changed = with_rounded_weights if rounded else apply_adjustment
    network = Network(changed(task.graph, found))
    sources = {
        name: next(network.graph.by_name[name].refs())
        for name, role in task.specs
        if role == "input"
    }
    observers = {name: Observer(task.specs[name, "input"]) for name in sources}
    watch = {source: _observing(observers, sources, source) for source in sources.values()}
    with torch.no_grad():
        for x in inputs:
            network.observe((x,), {}, watch)
        for (name, role), spec in task.specs.items():
            layer = network.layers[name]
            qparams = (
                observers[name].qparams()
                if role == "input"
                else nearest_qparams(spec, layer.get_parameter("weight"))
            )
            if role == "input" or not (rounded and name in found.rounded):
                layer.attach(role, TensorQuantizer(spec, qparams.scale, qparams.zero_point))
        wrong = energy = 0.0
        for x in inputs:
            want, have = (
                pytree.tree_leaves(net(x))[0] for net in (Network(task.graph), network)
            )
            wrong, energy = (
                wrong + float((want - have).square().sum()),
                energy + float(want.square().sum()),
            )
    return wrong / energy


def _observing(
    observers: Mapping[str, Observer], sources: Mapping[str, str], source: str
) -> Callable[[Tensor], None]:
    def watch(x: Tensor) -> None:
        for name, observer in observers.items():
            if sources[name] == source:
                observer.observe(x)

    return watch


class Outliers(nn.Module):
    """A norm that makes some channels much larger than others, as trained language models do,
    and layers on it.
    """

    def __init__(
        self, channels: int = 256, gain: float = 60.0, outliers: int = 6, layers: int = 1
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.layers = nn.ModuleList(nn.Linear(channels, channels) for _ in range(layers))
        self.norm.weight.data[torch.randperm(channels)[:outliers]] *= gain

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.cat([layer(x) for layer in self.layers], -1)


class Gated(nn.Module):
    """A product of an activation and a linear layer, read by a linear layer; nothing before the
    first can be folded.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, 64),
            nn.Linear(width, 64),
            nn.Linear(64, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Grouped(nn.Module):
    """Convolutions: with groups, depthwise, transposed, and two of different kernels that read
    one value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.split = nn.Conv2d(8, 16, 3, groups=2)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16, padding=1)
        self.wide, self.narrow = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.split(torch.relu(self.first(x))))
        x = torch.relu(self.depthwise(x))
        x = torch.relu(self.wide(x) + self.narrow(x))
        return self.last(torch.relu(self.up(x)).mean((2, 3)))


CASES: dict[str, Callable[[], tuple[nn.Module, Sequence[Any]]]] = {
    **{family: (lambda family=family: _pretrained(family)) for family in FAMILIES},
    "experts": lambda: (Mixture(), torch.randn(2, 3, 5, 16)),
    "mobile": lambda: (Mobile(), torch.randn(2, 4, 3, 16, 16)),
    "grouped": lambda: (Grouped(), torch.randn(2, 4, 3, 10, 10)),
    "gated": lambda: (Gated(), torch.randn(2, 4, 6, 32)),
    "outliers": lambda: (Outliers(64, layers=2), torch.randn(2, 4, 6, 64)),
}


def built(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A model, and batches for it; models of transformers are skipped without it."""
    if name in FAMILIES:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    return model.eval(), list(inputs)


def _pretrained(family: str) -> tuple[nn.Module, list[Tensor]]:
    model, (inputs,) = pretrained(family)
    return model, [inputs, inputs.flip(-1)]
