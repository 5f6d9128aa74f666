"""Perplexity: how well a language model's logits predict the tokens of a text. Runs no
model.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantizer.errors import DataError
from quantizer.sources.batches import Batch
from quantizer.sources.text import UNSCORED

CHUNK = 1 << 22  # logits turned into float32 at a time: a vocabulary is long


def next_tokens(batch: Batch) -> Tensor | None:
    """The token that follows each position [b, s], -100 where none counts; None if the targets
    are no such tokens.

    Targets may be the input's own tokens, as transformers takes its labels, or these moved by
    one, as a model that is trained on (x, y) pairs takes them; -100 stands for what is not
    scored.
    """
    target = batch.target
    if target is None or target.dim() != 2 or target.is_floating_point():
        return None
    ids = next((tensor for _, tensor in batch.tensors() if tensor.shape == target.shape), None)
    if ids is None or ids.is_floating_point():
        return None
    if _agree(target, ids):
        return torch.cat([target[:, 1:], torch.full_like(target[:, :1], UNSCORED)], 1)
    return target if target.shape[1] > 1 and _agree(target[:, :-1], ids[:, 1:]) else None


@dataclass
class TokenLoss:
    """The sum of -log p(token) in nats over `tokens` tokens."""

    nll: float = 0.0
    tokens: int = 0

    def add(self, logits: Tensor, following: Tensor) -> None:
        """Take in logits [b, s, vocabulary] of any float dtype and what `next_tokens` gives;
        computed in float32.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        rows, targets = logits.detach().flatten(0, 1), following.flatten().to(logits.device)
        if int(targets.max()) >= rows.shape[1]:
            raise DataError(
                f"token {int(targets.max())} is a target, and the model's output has "
                f"{rows.shape[1]} classes",
                help="give the model's own tokenizer",
            )
        step = max(1, CHUNK // rows.shape[1])
        for some in (slice(start, start + step) for start in range(0, len(rows), step)):
            loss = F.cross_entropy(
                rows[some].float(), targets[some], ignore_index=UNSCORED, reduction="sum"
            )
            self.nll += float(loss)
        self.tokens += int((targets != UNSCORED).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss per token.

        >>> round(TokenLoss(nll=4 * math.log(8), tokens=4).perplexity, 6)
        8.0
        """
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 700 else math.inf


def _agree(target: Tensor, ids: Tensor) -> bool:
    return bool(((target == ids) | (target == UNSCORED)).all())
