"""Windows of tokens: how texts are split into them, and what a model needs to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from quantizer.errors import UsageError

if TYPE_CHECKING:
    from quantizer.sources.tokenizer import TextTokenizer

DEFAULT_SEQ_LEN = 512
UNSCORED = -100
"""The target of a token that is not scored. It is the `ignore_index` of torch's
cross_entropy.
"""


@dataclass(frozen=True)
class Windows:
    """Windows of `seq_len` tokens that start every `stride` tokens, by default `seq_len`.

    Args:
        tokenizer: loads what splits texts into tokens; None if there is none.
        seq_len, stride: of the windows.
        shuffle_seed: of the random order of documents; None keeps the order of the files.
        trust: whether the processor of a model's images may be code of its folder.
    """

    tokenizer: Callable[[], TextTokenizer] | None = None
    seq_len: int = DEFAULT_SEQ_LEN
    stride: int | None = None
    shuffle_seed: int | None = None
    trust: bool = False

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UsageError(
                f"<--seq_len {self.seq_len}>: a window needs two tokens, one to predict and "
                "one before it"
            )
        if self.stride is not None and not 1 <= self.stride <= self.seq_len:
            raise UsageError(
                f"<--stride> must be from 1 to <--seq_len>, {self.seq_len}, not {self.stride}"
            )

    @property
    def step(self) -> int:
        """Return the tokens from one window's start to the next."""
        return self.stride or self.seq_len


def longest_window(module: nn.Module) -> int | None:
    """Return the number of positions of a Hugging Face model, if its config has it."""
    config = getattr(module, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        return positions
    return None


def prepare_for_windows(module: nn.Module) -> nn.Module:
    """Return the module in eval mode and without a KV cache: each call runs a whole window, and
    a trace cannot contain a cache.
    """
    for config in _configs_with_cache(module):
        config.use_cache = False
    return module.eval()


@contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Disable the KV cache of a model while it is traced."""
    configs = _configs_with_cache(module)
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _configs_with_cache(module: nn.Module) -> list[Any]:
    """Return the configs that enable a KV cache. A decoder may have its own config."""
    configs: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            configs[id(config)] = config
    return list(configs.values())
