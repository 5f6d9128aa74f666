"""Computes how well a network predicts its targets: the top-1 accuracy of classes, and for the
tokens of a text the perplexity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from quantizer.errors import DataError
from quantizer.sources.batches import UNSCORED, Batch

_CHUNK_LOGITS = 1 << 22
"""How many logits are converted to float32 at a time, which limits the memory."""
_MAX_MEAN_LOSS = 700
"""The exponential function of more than about 709 overflows in float64."""


def next_tokens(batch: Batch) -> Tensor | None:
    """Return the token that follows each position, if the targets of a batch are tokens.

    Two kinds of targets are read: the input's tokens, like labels for transformers, and the
    input's tokens shifted left by one, as in (x, y) pairs. Positions with -100 are not scored.

    Returns:
        [b, s] tokens, -100 for positions that are not scored; None for other targets.
    """
    target = batch.target
    if target is None or target.dim() != 2 or target.is_floating_point():
        return None
    alike = [tensor for _, tensor in batch.tensors() if tensor.shape == target.shape]
    # The first input of the target's shape holds the tokens; others are masks or positions
    if not alike or alike[0].is_floating_point():
        return None
    ids = alike[0]
    if _agree(target, ids):
        # No token is known that follows the last position
        unscored = torch.full_like(target[:, :1], UNSCORED)
        return torch.cat([target[:, 1:], unscored], 1)
    is_shifted = target.shape[1] > 1 and _agree(target[:, :-1], ids[:, 1:])
    return target if is_shifted else None


@dataclass
class TokenLoss:
    """The sum of -log p(token) in nats over `tokens` tokens."""

    nll: float = 0.0
    tokens: int = 0

    def add(self, logits: Tensor, following: Tensor) -> None:
        """Add one batch.

        Args:
            logits: [b, s, vocabulary] of any float dtype.
            following: [b, s] tokens, as `next_tokens` returns them.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        rows = logits.detach().flatten(0, 1)
        targets = following.flatten().to(logits.device)
        classes = rows.shape[1]
        largest = int(targets.max())
        if largest >= classes:
            raise DataError(
                f"token {largest} is a target, and the model's output has {classes} classes",
                help="use the model's own tokenizer",
            )
        step = max(1, _CHUNK_LOGITS // classes)
        for start in range(0, len(rows), step):
            stop = start + step
            loss = F.cross_entropy(
                rows[start:stop].float(),
                targets[start:stop],
                ignore_index=UNSCORED,
                reduction="sum",
            )
            self.nll += float(loss)
        is_scored = targets != UNSCORED
        self.tokens += int(is_scored.sum())

    @property
    def perplexity(self) -> float:
        """Return exp of the mean loss per token.

        >>> round(TokenLoss(nll=4 * math.log(8), tokens=4).perplexity, 6)
        8.0
        """
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < _MAX_MEAN_LOSS else math.inf


@dataclass
class Score:
    """How well one network predicts its targets: classes, or the next tokens of a text."""

    labelled: int = 0
    correct: int = 0
    loss: TokenLoss = field(default_factory=TokenLoss)

    def add(self, output: Tensor, batch: Batch) -> None:
        """Add one batch. An output that does not fit its targets is ignored."""
        target = batch.target
        if target is not None and output.dim() == 2 and target.shape == output.shape[:1]:
            hits = output.argmax(1) == target.to(output.device)
            self.labelled += len(target)
            self.correct += int(hits.sum())
        following = next_tokens(batch) if output.dim() == 3 else None
        if following is not None and following.shape == output.shape[:2]:
            self.loss.add(output, following)

    def merge(self, other: Score) -> None:
        """Add other batches."""
        self.labelled += other.labelled
        self.correct += other.correct
        self.loss.nll += other.loss.nll
        self.loss.tokens += other.loss.tokens

    def metrics(self) -> dict[str, float]:
        """Return top-1 accuracy on labelled samples, perplexity on text."""
        metrics: dict[str, float] = {}
        if self.labelled:
            metrics["top1"] = self.correct / self.labelled
        if self.loss.tokens:
            metrics["perplexity"] = self.loss.perplexity
        return metrics


def _agree(target: Tensor, ids: Tensor) -> bool:
    """Return whether all scored targets are equal to the ids."""
    is_equal = (target == ids) | (target == UNSCORED)
    return bool(is_equal.all())
