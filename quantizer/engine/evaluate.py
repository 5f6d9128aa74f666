"""Float and quantized network on the same batches, node by node: what each tensor and the output lose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.engine.perplexity import TokenLoss, next_tokens
from quantizer.errors import DataError
from quantizer.graph.ir import Node
from quantizer.nn.network import Network
from quantizer.numerics.metrics import decibel, energy
from quantizer.sources.batches import Batch, naming_batch


@dataclass
class Noise:
    """Running energies over batches of a tensor x and its approximation y: |x|^2, |y|^2 and |x - y|^2."""

    signal: float = 0.0
    other: float = 0.0
    error: float = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in one batch."""
        self.signal += energy(x)
        self.other += energy(y)
        self.error += energy(x - y)

    @property
    def sqnr_db(self) -> float:
        """10 log10(|x|^2 / |x - y|^2): infinite when they are equal."""
        return decibel(self.signal, self.error)

    @property
    def cosine(self) -> float:
        """x.y / (|x| |y|), with x.y = (|x|^2 + |y|^2 - |x - y|^2) / 2; 1 when both are zero."""
        norm = math.sqrt(self.signal) * math.sqrt(self.other)
        return (self.signal + self.other - self.error) / 2 / norm if norm else float(self.signal == self.other)


@dataclass
class LayerNoise:
    """`local`: only this tensor is quantized; `accumulated`: the whole network is."""

    layer: str
    role: str
    local: Noise = field(default_factory=Noise)
    accumulated: Noise | None = None


@dataclass
class Comparison:
    """What a paired run found; figures about classes are absent when the output or the data has none."""

    layers: list[LayerNoise]
    output: Noise = field(default_factory=Noise)
    samples: int = 0
    agreeing: int = 0
    rankable: bool = True
    labelled: int = 0
    correct_float: int = 0
    correct_quantized: int = 0
    loss_float: TokenLoss = field(default_factory=TokenLoss)
    loss_quantized: TokenLoss = field(default_factory=TokenLoss)

    def metrics(self) -> dict[str, float]:
        """The figures that gates and reports use."""
        found = {"sqnr_db": self.output.sqnr_db, "cosine": self.output.cosine}
        if self.rankable and self.samples:
            found["top1_agreement"] = self.agreeing / self.samples
        return found

    def pairs(self) -> dict[str, dict[str, float]]:
        """Top-1 accuracy or perplexity of both networks, where the data has labels or is text."""
        found = {}
        if self.labelled:
            hits = {"float": self.correct_float, "quantized": self.correct_quantized}
            found["top1"] = {which: correct / self.labelled for which, correct in hits.items()}
        if self.loss_float.tokens:
            both = {"float": self.loss_float, "quantized": self.loss_quantized}
            found["perplexity"] = {which: loss.perplexity for which, loss in both.items()}
        return found


def measure(model: Callable[..., Any], batches: Iterable[Batch]) -> dict[str, float]:
    """Top-1 accuracy of one model on labelled batches, perplexity on text; nothing when the data has no targets."""
    labelled = correct = 0
    loss = TokenLoss()
    for batch in batches:
        output = pytree.tree_leaves(model(*batch.args, **batch.kwargs))[0]
        target = batch.target
        if not isinstance(target, Tensor) or not isinstance(output, Tensor):
            continue
        if output.dim() == 2 and target.shape == output.shape[:1]:
            labelled += len(target)
            correct += int((output.argmax(1) == target.to(output.device)).sum())
        elif (following := _following(output, batch)) is not None:
            loss.add(output, following)
    found = {"top1": correct / labelled} if labelled else {}
    return found | ({"perplexity": loss.perplexity} if loss.tokens else {})


def _following(output: Tensor, batch: Batch) -> Tensor | None:
    """What the logits of a language model should say; None if the output is none for these targets."""
    following = next_tokens(batch) if output.dim() == 3 else None
    return following if following is not None and following.shape == output.shape[:2] else None


Tap = tuple[nn.Module, LayerNoise]


def compare(
    reference: Network,
    quantized: Network,
    batches: Iterable[Batch],
    after_batch: Callable[[int], None] | None = None,
) -> Comparison:
    """Run both networks on each batch, once.

    Raises:
        DataError: no batch at all, or an output that is not finite.
    """
    result = Comparison(_parameters(reference, quantized))
    taps: dict[str, list[Tap]] = {}
    for name, role, quantizer in quantized.quantizers():
        if not is_parameter(role):
            noise = LayerNoise(name, role, accumulated=Noise())
            result.layers.append(noise)
            taps.setdefault(_source(quantized.graph.by_name[name], role), []).append((quantizer, noise))
    count = 0
    with torch.no_grad():
        for batch in batches:
            with naming_batch(count):
                _one_batch(reference, quantized, batch, taps, result)
            count += 1
            if after_batch is not None:
                after_batch(count)
    if not count:
        raise DataError("the evaluation data has no batches", help="check --data and --subset_len")
    return result


def _one_batch(
    reference: Network,
    quantized: Network,
    batch: Batch,
    taps: Mapping[str, list[Tap]],
    result: Comparison,
) -> None:
    """Run both networks in step, so that each pair of values is compared while it exists."""
    left, right = reference.start(batch.args, batch.kwargs), quantized.start(batch.args, batch.kwargs)
    for (name, x), (_, y) in zip(left.steps(), right.steps(), strict=True):
        for quantizer, noise in taps.get(name, ()):
            noise.local.add(x, _apart(quantizer, x))
            assert noise.accumulated is not None  # only parameters have none
            # What the quantizer hands on: a layer quantizes its own input after both networks have made the value.
            noise.accumulated.add(x, y if noise.layer == name else _apart(quantizer, y))
    _outputs(left.float_outputs(), right.float_outputs(), batch, result)


def _source(node: Node, role: str) -> str:
    """The node whose value a quantizer sees: its own layer's, or for a layer's input the one it reads."""
    return node.name if role == "activation" or node.op == "input" else node.input_roles()[role]


def _apart(quantizer: nn.Module, x: Tensor) -> Tensor:
    """The quantized value, in memory of its own."""
    quantized: Tensor = quantizer(x.clone())
    return quantized


def _parameters(reference: Network, quantized: Network) -> list[LayerNoise]:
    """The noise of weights and biases, which needs no data. A correction of a bias is no noise, so it is left out."""
    rows = []
    for name, role, quantizer in quantized.quantizers():
        if is_parameter(role):
            key = parameter_name(role)
            row, exact = LayerNoise(name, role), reference.layers[name].get_parameter(key)
            is_bias = base_role(role) == "bias"
            row.local.add(exact, _apart(quantizer, exact) if is_bias else quantized.layers[name].get_parameter(key))
            rows.append(row)
    return rows


def _outputs(reference: list[Tensor], quantized: list[Tensor], batch: Batch, result: Comparison) -> None:
    """Noise of all floating-point outputs, and what classes the first one says."""
    pairs = list(zip(reference, quantized, strict=True))
    for x, y in pairs:
        if not bool(torch.isfinite(x).all()):
            raise DataError("the float model's output is not finite", help="check the data and the weights")
        result.output.add(x, y)
    first = pairs[0] if pairs else None
    if first is not None and (following := _following(first[0], batch)) is not None:
        result.loss_float.add(first[0], following)
        result.loss_quantized.add(first[1], following)
    if first is None or first[0].dim() != 2 or first[0].shape[1] < 2:
        result.rankable = False
        return
    classes, quantized_classes = first[0].argmax(1), first[1].argmax(1)
    result.samples += len(classes)
    result.agreeing += int((classes == quantized_classes).sum())
    target = batch.target
    if isinstance(target, Tensor) and target.shape == classes.shape and not target.is_floating_point():
        result.labelled += len(target)
        result.correct_float += int((classes == target.to(classes.device)).sum())
        result.correct_quantized += int((quantized_classes == target.to(classes.device)).sum())
