"""The language model of `quantizer demo --llm`, and passages of tales that it was not trained
on.
"""

from __future__ import annotations

import functools
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.runs import ROOT

FOLDER = ROOT / "examples" / "tales"
LENGTH = 128
_TOKENS_OF_A_TALE = 100
"""Fewer than most have."""


class Tales(nn.Module):
    """Tokens [n, LENGTH] to logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
        transformers.utils.logging.disable_progress_bar()
        made = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        self.llama = made.eval()

    def forward(self, tokens: Tensor) -> Tensor:
        """Causal."""
        logits: Tensor = self.llama(input_ids=tokens, use_cache=False).logits
        return logits


@functools.cache
def grammar() -> dict[str, Any]:
    """What `examples/train_tales.py` defines."""
    pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
    return runpy.run_path(str(ROOT / "examples" / "train_tales.py"))


def encoded(text: str) -> Tensor:
    """The tokens of a text."""
    from tokenizers import Tokenizer

    return torch.tensor(Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids)


def sequences(count: int, seed: int) -> Tensor:
    """Passages of the tales of a seed, one after the other: [count, LENGTH]."""
    text, _ = grammar()["tales"](count * LENGTH // _TOKENS_OF_A_TALE, seed)
    return encoded(text)[: count * LENGTH].view(count, LENGTH)
