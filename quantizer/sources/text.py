"""Text files as windows of tokens of one length, with targets for perplexity. Knows no model
but its input's name.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from quantizer.errors import DataError, UsageError
from quantizer.sources.batches import Batch
from quantizer.sources.tokenizer import Encode
from quantizer.storage.plain_files import require_plain

logger = logging.getLogger(__name__)

DEFAULT_SEQ_LEN = 512
# The target of a token that does not count, as torch's cross_entropy ignores it
UNSCORED = -100
INPUT = "input_ids"
BETWEEN_FILES = "\n\n"


@dataclass(frozen=True)
class Windows:
    """Windows of `seq_len` tokens whose starts lie `stride` apart, by default `seq_len`.

    `tokenizer` loads the function that makes the tokens; it is None if nothing names a
    tokenizer.
    """

    tokenizer: Callable[[], Encode] | None = None
    seq_len: int = DEFAULT_SEQ_LEN
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UsageError(
                f"--seq_len {self.seq_len}: a window needs two tokens, one to predict and one "
                "before it"
            )
        if self.stride is not None and not 1 <= self.stride <= self.seq_len:
            raise UsageError(
                f"--stride must be from 1 to --seq_len, {self.seq_len}, not {self.stride}"
            )


@dataclass(frozen=True)
class TextData:
    """The windows of some files, tokenized once."""

    paths: Sequence[Path]
    label: str
    windows: Windows
    module: nn.Module | None = None

    def batches(self, size: int) -> Iterator[Batch]:
        """Batches of `size` windows [b, seq_len]; the last may have fewer. All windows are
        full.

        The targets are the tokens themselves, -100 where an earlier window has scored them:
        each token of the text is scored once, with at least `seq_len - stride` tokens before
        it.

        Raises:
            DataError: the text cannot be used.

        Source: the strided sliding window of
        https://huggingface.co/docs/transformers/perplexity.
        """
        seq_len, stride = self.windows.seq_len, self.windows.stride or self.windows.seq_len
        scored = self.is_scored
        windows = self.tokens.unfold(0, seq_len, stride)
        for start in range(0, len(windows), size):
            ids = windows[start : start + size].clone()
            target = ids.clone()
            target[int(start == 0) :, : seq_len - stride] = UNSCORED
            yield _as_batch(ids, target if scored else None, self.module)

    @cached_property
    def is_scored(self) -> bool:
        """Whether there are targets; said once if not.

        Raises:
            DataError: a text is not enough for the model.
        """
        scored = foretells(self.module)
        if getattr(getattr(self.module, "config", None), "is_encoder_decoder", False):
            raise DataError(
                f"{type(self.module).__name__} reads two texts, to encode and to decode, and "
                f"{self.label} is one",
                help="give batches of your own: {'input_ids': …, 'decoder_input_ids': …}",
            )
        if not scored:
            logger.warning(
                "%s does not foretell the next token: no perplexity", type(self.module).__name__
            )
        return scored

    @cached_property
    def tokens(self) -> Tensor:
        """The text's token ids [n], without those behind the last full window."""
        seq_len, stride = self.windows.seq_len, self.windows.stride or self.windows.seq_len
        if self.windows.tokenizer is None:
            remedy = (
                "give --tokenizer, a tokenizer.json or a folder, or add tokenizer() to the "
                "model's file"
            )
            raise UsageError(f"{self.label} is text, and there is no tokenizer", help=remedy)
        ids = self.windows.tokenizer()(BETWEEN_FILES.join(_read(path) for path in self.paths))
        if len(ids) < seq_len:
            remedy = (
                f"give a longer text, or --seq_len {len(ids)}"
                if len(ids) > 1
                else "give a longer text"
            )
            raise DataError(
                f"{self.label} has {len(ids)} tokens, fewer than a window of {seq_len}",
                help=remedy,
            )
        rest = (len(ids) - seq_len) % stride
        if rest:
            logger.info(
                "%s: the last %d of %d tokens fill no window and are left out",
                self.label,
                rest,
                len(ids),
            )
        self._check_vocabulary(ids)
        return torch.tensor(ids[: len(ids) - rest])

    def _check_vocabulary(self, ids: list[int]) -> None:
        known = getattr(getattr(self.module, "config", None), "vocab_size", None)
        if isinstance(known, int) and max(ids) >= known:
            raise DataError(
                f"the tokenizer gives token {max(ids)}, and the model knows {known} tokens",
                help="give the model's own tokenizer with --tokenizer",
            )


def longest_window(module: nn.Module) -> int | None:
    """How many positions a Hugging Face model was made for, if its config says so."""
    found = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def foretells(module: nn.Module | None) -> bool:
    """Whether logits at a token say what the next one is. Models of transformers tell (those
    for masked words do not); what others make of a text is theirs to know.
    """
    can_generate = getattr(module, "can_generate", None)
    return can_generate is None or bool(can_generate())


def _as_batch(ids: Tensor, target: Tensor | None, module: nn.Module | None) -> Batch:
    """By name where `forward` takes `input_ids`, else as the first input."""
    if module is not None and INPUT in inspect.signature(module.forward).parameters:
        return Batch(
            (),
            {INPUT: ids},
            target,
            {INPUT: ids} | ({} if target is None else {"labels": target}),
        )
    return Batch.of(ids, target)


def _read(path: Path) -> str:
    try:
        require_plain(path)
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise DataError(
            f"{path} is not UTF-8 text: byte {cause.object[cause.start]:#04x} at offset "
            f"{cause.start}",
            help="save it as UTF-8",
        ) from cause
    except OSError as cause:
        raise DataError(f"{path} cannot be read: {cause.strerror}") from cause
    if not text.strip():
        raise DataError(f"{path} is empty")
    return text
