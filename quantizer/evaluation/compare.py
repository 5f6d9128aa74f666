"""Float and quantized network on the same batches, node by node: what each tensor and the
output lose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.comparison.noise import Noise, beside_far_values
from quantizer.comparison.output_comparison import ComparedNetworks
from quantizer.comparison.output_figures import (
    POOLED_FIGURE,
    ROWS_KEPT,
    OutputFigures,
    leaves,
    lowest_cosine,
    named_metrics,
    pooled,
    worst,
)
from quantizer.comparison.perplexity import TokenLoss, next_tokens
from quantizer.config.roles import base_role, is_parameter, parameter_name
from quantizer.distributed import ALONE, Ranks, in_turn
from quantizer.errors import DataError, ModelError
from quantizer.graph.output_parts import Output
from quantizer.nn.network import Network
from quantizer.plan.model import Key
from quantizer.sources.batches import Batch, naming_batch
from quantizer.storage.deferred_tensor import loaded

APART = 16
"""Batches of a rank between two exchanges."""


@dataclass
class LayerNoise:
    """`local`: only this tensor is quantized; `accumulated`: the whole network is.

    Where far values set the range of a batch, both are about the others; but not where they are
    the ends of a function that saturates (`is_bounded`).
    """

    layer: str
    role: str
    local: Noise = field(default_factory=Noise)
    accumulated: Noise | None = None
    is_bounded: bool = False

    def add(self, x: Tensor, local: Tensor, accumulated: Tensor | None = None) -> None:
        """Take in one batch of the exact values, with those that either quantization makes of
        them.
        """
        others = None if self.is_bounded else beside_far_values(x)
        if others is not None:
            x, local = x[others], local[others]
            accumulated = None if accumulated is None else accumulated[others]
        self.local.add(x, local)
        if self.accumulated is not None and accumulated is not None:
            self.accumulated.add(x, accumulated)

    def merge(self, other: LayerNoise) -> None:
        """Take in other batches."""
        self.local.merge(other.local)
        if self.accumulated is not None and other.accumulated is not None:
            self.accumulated.merge(other.accumulated)


@dataclass
class Score:
    """What targets say of one network: how many samples it ranks right, or how well it predicts
    tokens.
    """

    labelled: int = 0
    correct: int = 0
    loss: TokenLoss = field(default_factory=TokenLoss)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Take in one batch; an output that does not fit its targets says nothing."""
        target = batch.target
        if target is not None and output.dim() == 2 and target.shape == output.shape[:1]:
            self.labelled += len(target)
            self.correct += int((output.argmax(1) == target.to(output.device)).sum())
        following = next_tokens(batch) if output.dim() == 3 else None
        if following is not None and following.shape == output.shape[:2]:
            self.loss.add(output, following)

    def merge(self, other: Score) -> None:
        """Take in other batches."""
        self.labelled += other.labelled
        self.correct += other.correct
        self.loss.nll += other.loss.nll
        self.loss.tokens += other.loss.tokens

    def metrics(self) -> dict[str, float]:
        """Top-1 accuracy on labelled samples, perplexity on text."""
        found = {"top1": self.correct / self.labelled} if self.labelled else {}
        return found | ({"perplexity": self.loss.perplexity} if self.loss.tokens else {})


@dataclass
class Comparison:
    """What a paired run found; figures about classes are absent when the output or the data has
    none.

    `outputs` has the figures of each output and of its parts. `quantization` has those against
    the float network that was quantized, where outputs are compared with another one, the
    user's model. `spoiled` is the first batch where the quantized network alone gives NaN or
    infinity.
    """

    layers: list[LayerNoise]
    outputs: list[OutputFigures] = field(default_factory=list)
    quantization: list[OutputFigures] = field(default_factory=list)
    spoiled: int | None = None
    batches: int = 0
    samples: int = 0
    agreeing: int = 0
    rankable: bool = True
    scores: tuple[Score, Score] = field(default_factory=lambda: (Score(), Score()))

    def merge(self, other: Comparison) -> None:
        """Take in other batches, in which the same tensors were compared."""
        for mine, its in zip(self.layers, other.layers, strict=True):
            mine.merge(its)
        for output, its_output in zip(self.outputs, other.outputs, strict=True):
            output.merge(its_output)
        for output, its_output in zip(self.quantization, other.quantization, strict=True):
            output.merge(its_output)
        if self.spoiled is None and other.spoiled is not None:
            self.spoiled = self.batches + other.spoiled
        self.batches += other.batches
        self.samples += other.samples
        self.agreeing += other.agreeing
        self.rankable &= other.rankable
        for score, its_score in zip(self.scores, other.scores, strict=True):
            score.merge(its_score)

    def metrics(self) -> dict[str, float]:
        """The figures that gates and reports use; of outputs that are no numbers there are
        none.

        SQNR and cosine are the lowest of all outputs and parts; those together have a "pooled"
        one. Of integers there is the lowest share of equal values, and of constants, where no
        output has an SQNR.
        """
        found: dict[str, float] = {}
        lowest, cosine = worst(self.outputs), lowest_cosine(self.outputs)
        if lowest is not None and lowest.sqnr_db is not None and cosine is not None:
            found = {
                "sqnr_db": lowest.sqnr_db,
                "cosine": cosine,
                POOLED_FIGURE: self.output.sqnr_db,
            }
        kinds = ("integer",) if lowest is not None else ("integer", "constant")
        shares: list[float] = []
        for output in self.outputs:
            share = output.whole.equal_share
            if output.whole.kind in kinds and share is not None:
                shares.append(share)
        if shares:
            found["equal_outputs"] = min(shares)
        orders = [
            output.order.share
            for output in self.outputs
            if output.order is not None and output.order.rows
        ]
        if orders:
            found[ROWS_KEPT] = min(orders)
        if self.rankable and self.samples:
            found["top1_agreement"] = self.agreeing / self.samples
        return found

    def named_metrics(self) -> dict[str, float]:
        """The figures of each output and part, as `sqnr_db[0.boxes]`."""
        return named_metrics(self.outputs)

    @property
    def losses(self) -> list[OutputFigures]:
        """What quantization costs each output, without what passes have changed."""
        return self.quantization or self.outputs

    @property
    def output(self) -> Noise:
        """The noise of all floating-point outputs together."""
        return pooled(self.outputs)

    @property
    def floats(self) -> int:
        """How many floating-point values were compared."""
        return sum(output.whole.count for output in self.outputs if output.whole.is_float)

    @property
    def first_spoiled(self) -> str | None:
        """The first layer whose values quantization makes NaN or infinity, if they are
        compared.
        """
        for row in self.layers:
            if row.accumulated is not None and not math.isfinite(row.accumulated.error):
                return row.layer
        return None

    def pairs(self) -> dict[str, dict[str, float]]:
        """Top-1 accuracy or perplexity of both networks, where the data has labels or is
        text.
        """
        before, after = (score.metrics() for score in self.scores)
        return {
            name: {"float": value, "quantized": after[name]} for name, value in before.items()
        }


def target_metrics(model: Callable[..., Any], batches: Iterable[Batch]) -> dict[str, float]:
    """Top-1 accuracy of one model on labelled batches, perplexity on text; nothing when the
    data has no targets.
    """
    score = Score()
    for batch in batches:
        output = pytree.tree_leaves(model(*batch.args, **batch.kwargs))[0]
        if isinstance(output, Tensor):
            score.add(output, batch)
    return score.metrics()


def over_batches(
    batches: Iterable[Batch],
    run: Callable[[Batch], None],
    ranks: Ranks = ALONE,
    exchange: Callable[[int], None] = lambda count: None,
) -> None:
    """Run something on each batch of this rank's share, without gradients.

    `exchange` is called on all ranks alike, now and then and at the end, with the number of
    batches that are done.

    Raises:
        DataError: there is no batch; or `run` says so, and the batch is named.
    """
    count = 0
    with torch.no_grad():
        for count, batch in enumerate(batches, 1):
            if ranks.owns(count - 1):
                with naming_batch(count - 1):
                    run(batch)
            if count % (APART * ranks.world_size) == 0:
                exchange(count)
    if not count:
        raise DataError(
            "the evaluation data has no batches", help="check --data and --subset_len"
        )
    exchange(count)


def compare(
    reference: Network,
    quantized: Network,
    batches: Iterable[Batch],
    ranks: Ranks = ALONE,
    user: Network | None = None,
    *,
    outputs: Sequence[Output] | None = None,
) -> Comparison:
    """Run both networks on each batch, once, on the rank that it belongs to.

    What is found is added up batch by batch in their order, so the number of ranks cannot be
    seen.

    Args:
        reference: the float network, with the nodes of the quantized one.
        quantized: what is compared with it.
        batches: of data, on the networks' device.
        ranks: who share the batches.
        user: the model itself, where `reference` computes another function. Outputs are
            compared with those of this network then.
        outputs: of the network that outputs are compared with, by name; as its graph names
            them, if None.

    Raises:
        DataError: no batch at all, or an output that is not finite.
        ModelError: the networks make tensors of other sizes.
        RankError: the ranks do not have the same batches.
    """
    activations, taps = _taps(quantized)
    found = list[Comparison]()
    compared = ComparedNetworks(reference, user, outputs)

    def nothing() -> Comparison:
        return Comparison(_silent_rows(quantized, activations), *compared.empty())

    def one_batch(batch: Batch) -> None:
        """Both networks in step, so that each pair of values is compared while it exists."""
        found.append(nothing())
        left, right = (
            reference.start(batch.args, batch.kwargs),
            quantized.start(batch.args, batch.kwargs),
        )
        recorders = compared.recorders()
        for (name, x), (_, y) in zip(left.steps(), right.steps(), strict=True):
            recorders[0].see(name, x)
            recorders[1].see(name, y)
            for quantizer, at in taps.get(name, ()):
                _require_same_shape(name, x, y)
                noise = found[-1].layers[at]
                # What the quantizer hands on: a layer quantizes its own input after the value
                # that both networks made.
                handed_on = y if noise.layer == name else quantizer(y.clone())
                noise.add(x, quantizer(x.clone()), handed_on)  # a copy, which it may overwrite
        expected, outputs, passed = compared.figures((left, right), recorders, batch)
        found[-1].outputs, found[-1].quantization = outputs, passed
        _classes(found[-1], batch, expected, right.outputs())

    result = nothing()

    def exchange(count: int) -> None:
        for batch in in_turn(ranks.gather(found, f"the comparison of {count} batches")):
            result.merge(batch)
        found.clear()

    over_batches(batches, one_batch, ranks, exchange)
    return replace(result, layers=[*_parameters(reference, quantized), *result.layers])


def _silent_rows(quantized: Network, activations: Sequence[Key]) -> list[LayerNoise]:
    """Return the rows of quantized activations before any batch was compared."""
    rows: list[LayerNoise] = []
    for layer, role in activations:
        is_bounded = quantized.graph.by_name[layer].row.kind == "nonlinear"
        rows.append(LayerNoise(layer, role, accumulated=Noise(), is_bounded=is_bounded))
    return rows


def _taps(quantized: Network) -> tuple[list[Key], dict[str, list[tuple[nn.Module, int]]]]:
    """Return the activations that a network quantizes, and for each node whose value is one of
    them what quantizes it, with its number."""
    activations: list[Key] = []
    taps: dict[str, list[tuple[nn.Module, int]]] = {}
    for name, role, quantizer in quantized.quantizers():
        if not is_parameter(role):
            node = quantized.graph.by_name[name]
            # A layer's input is quantized where the value is that it reads.
            is_own = role == "activation" or node.op == "input"
            source = name if is_own else node.input_roles()[role]
            taps.setdefault(source, []).append((quantizer, len(activations)))
            activations.append((name, role))
    return activations, taps


def _require_same_shape(what: str, x: Tensor, y: Tensor) -> None:
    """Refuse values of which quantization changes how many there are, as it does behind
    `nonzero`.
    """
    if x.shape != y.shape:
        raise ModelError(
            f"{what}: the float network makes {list(x.shape)}, the quantized one "
            f"{list(y.shape)}: sizes that depend on values leave nothing to compare",
            help="quantize the model up to the layer that selects, and select outside of it",
        )


def _parameters(reference: Network, quantized: Network) -> list[LayerNoise]:
    """The noise of weights and biases, which needs no data. A correction of a bias is no noise,
    so it is left out.
    """
    rows = []
    for name, role, quantizer in quantized.quantizers():
        if is_parameter(role):
            key = parameter_name(role)
            row, exact = (
                LayerNoise(name, role),
                loaded(reference.layers[name].get_parameter(key)),
            )
            is_bias = base_role(role) == "bias"
            other = (
                quantizer(exact.clone())
                if is_bias
                else loaded(quantized.layers[name].get_parameter(key))
            )
            row.add(exact, other)
            rows.append(row)
    return rows


def _classes(
    result: Comparison,
    batch: Batch,
    reference: Sequence[Tensor],
    quantized: Sequence[Tensor],
) -> None:
    """Find which classes the first floating-point output ranks highest, and whether the
    quantized one is finite.
    """
    result.batches = 1
    pairs = [(x, y) for x, y in zip(reference, quantized, strict=True) if x.is_floating_point()]
    for part in leaves(result.outputs):
        if part.is_float and not math.isfinite(part.noise.error):
            result.spoiled = 0
    shape = pairs[0][0].shape if pairs else ()
    is_ranking = len(shape) == 2 and shape[1] > 1
    result.rankable &= is_ranking
    if is_ranking:
        classes, quantized_classes = (output.argmax(1) for output in pairs[0])
        result.samples += len(classes)
        result.agreeing += int((classes == quantized_classes).sum())
    is_index = batch.target is not None and not batch.target.is_floating_point()
    if is_index and (is_ranking or len(shape) == 3):
        for score, output in zip(result.scores, pairs[0], strict=True):
            score.add(output, batch)
