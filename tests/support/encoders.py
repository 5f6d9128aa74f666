"""A sentence encoder of one block without training, with a table of positions that limits its
length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, POSITIONS, WIDTH = 64, 24, 16


class Encoder(nn.Module):
    """Class logits of the mean over the tokens that a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(POSITIONS, WIDTH),
        )
        self.register_buffer("numbers", torch.arange(POSITIONS)[None], persistent=False)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(self.numbers[:, : input_ids.shape[1]])
        x = self.block(x, src_key_padding_mask=attention_mask == 0)
        kept = attention_mask[..., None].float()
        logits: Tensor = self.head((x * kept).sum(1) / kept.sum(1))
        return logits


def sentences(count: int, length: int) -> dict[str, Tensor]:
    """A batch in which the first sentence is shorter than the others."""
    generator = torch.Generator().manual_seed(count + length)
    mask = torch.ones(count, length, dtype=torch.int64)
    mask[0, (length + 1) // 2 :] = 0
    return {
        "input_ids": torch.randint(0, VOCABULARY, (count, length), generator=generator),
        "attention_mask": mask,
    }
