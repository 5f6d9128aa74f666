"""Fast finetuning of a whole solution: both networks side by side, and a last look at what they return."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.algorithms.activation_store import ActivationStore
from quantizer.algorithms.fast_finetune import Settled, fast_finetune
from quantizer.algorithms.walk import Walk
from quantizer.engine.attach import quantized_network
from quantizer.engine.evaluate import Noise
from quantizer.engine.solution import Solution
from quantizer.errors import UsageError
from quantizer.graph.ir import Graph
from quantizer.nn.network import Network
from quantizer.sources.batches import Batch

AfterLayer = Callable[[Mapping[str, Settled]], None]


@dataclass(frozen=True)
class Finetuned:
    """What finetuning made of a solution, and the noise of the network's output over the calibration data.

    `plain` counts layers whose quantized weights it does not learn: groups, floating-point formats, finer grids.
    """

    solution: Solution
    layers: Mapping[str, Settled]
    before: Noise
    after: Noise
    plain: int = 0

    @property
    def undone(self) -> bool:
        """Whether the output would have become worse, so that `solution` is what it was."""
        return not self.after.error <= self.before.error

    @property
    def summary(self) -> str:
        """One line: how much of the layers' errors is left, and what the output gained."""
        if not self.layers:
            return (
                "there is nothing to finetune: no layer has integer weights of at most 8 bits with a scale per channel"
            )
        figures = f"output SQNR on the calibration data {self.before.sqnr_db:.2f} -> {self.after.sqnr_db:.2f} dB"
        if self.undone:
            return f"finetuning undone, as the output became worse: {figures}"
        changed = [layer.after / layer.before for layer in self.layers.values() if layer.after < layer.before]
        left = f"the median layer keeps {statistics.median(changed):.0%} of its error; " if changed else ""
        rest = f"{self.plain} with weights in groups or other formats keep plain rounding; " if self.plain else ""
        return f"{len(changed)} of {len(self.layers)} layers finetuned; {rest}{left}{figures}"


def check_mode(mode: str | None, target_device: str) -> None:
    """Refuse what a device has no room for.

    Raises:
        UsageError: adaquant on the DPU.
    """
    if mode == "adaquant" and target_device == "DPU":
        raise UsageError(
            "--fast_finetune adaquant changes the scales of weights, and the DPU's are aligned to its shifters",
            help="use --fast_finetune adaround",
        )


def finetune(
    graph: Graph,
    found: Solution,
    batches: Callable[[], Iterable[Batch]],
    mode: str,
    *,
    seed: int,
    settled: Mapping[str, Settled],
    after_layer: AfterLayer,
) -> Finetuned:
    """Weights, and with "adaquant" their scales, for which the quantized network is nearer to the float one.

    `batches` opens a pass over the calibration data, on the graph's device; there are two. `settled` holds what an
    interrupted run had found. The errors are those of `fast_finetune`.
    """
    store, device = ActivationStore(), next((tensor.device for tensor in graph.tensors.values()), torch.device("cpu"))
    plain, outputs = quantized_network(graph, found).to(device), list[Any]()
    with torch.no_grad():
        reference = Walk(Network(graph), _with_outputs(plain, batches(), outputs, store), store)
        quantized = Walk(quantized_network(graph, found).to(device), batches(), store)
    layers = fast_finetune(reference, quantized, mode, seed=seed, settled=settled, after_layer=after_layer)
    targets = list(reference.outputs())
    before, after = _noise(targets, outputs), _noise(targets, quantized.outputs())
    quantized_weights = {name for name, role in found.tensors if role == "weights"}
    left = quantized_weights - layers.keys()
    rest = [node for node in graph.nodes if node.row.is_linear_or_convolution and node.name in left]
    made = Finetuned(finetuned(found, layers), layers, before, after, len(rest))
    return dataclasses.replace(made, solution=found) if made.undone else made


def finetuned(found: Solution, layers: Mapping[str, Settled]) -> Solution:
    """The solution with the weights and scales of settled layers."""
    tensors = dict(found.tensors)
    for name, layer in layers.items():
        spec, _, zero_point = tensors[name, "weights"]
        tensors[name, "weights"] = spec, layer.scale, zero_point
    weights = {name: {"weight": layer.weight} for name, layer in layers.items()}
    return dataclasses.replace(found, tensors=tensors).with_weights(weights)


def _with_outputs(
    network: Network, batches: Iterable[Batch], outputs: list[Any], store: ActivationStore
) -> Iterator[Batch]:
    """Hand on each batch, after keeping what the network returns for it."""
    for batch in batches:
        outputs.append(store.keep(pytree.tree_leaves(network(*batch.args, **batch.kwargs))))
        yield batch


def _noise(targets: Iterable[Any], outputs: Iterable[Any]) -> Noise:
    """Over all floating-point outputs of all batches."""
    noise = Noise()
    for target, output in zip(targets, outputs, strict=True):
        for x, y in zip(pytree.tree_leaves(target), pytree.tree_leaves(output), strict=True):
            if isinstance(x, Tensor) and x.is_floating_point():
                noise.add(x, y)
    return noise
