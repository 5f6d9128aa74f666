"""Split text files into windows of tokens of equal length, with targets for the perplexity."""

import inspect
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.config.wording import counted
from quantizer.errors import DataError, UsageError
from quantizer.plugins import part
from quantizer.sources.arguments import DEFAULT_SEQ_LEN, arguments_of
from quantizer.sources.batches import UNSCORED, Batch
from quantizer.sources.data import Batches
from quantizer.sources.kinds import NamedData
from quantizer.sources.texts.documents import Document, read_documents
from quantizer.sources.texts.plugin import BATCH_SIZE
from quantizer.sources.texts.tokenizer import TextTokenizer, has_tokenizer, load_tokenizer

_logger = logging.getLogger(__name__)

_INPUT = "input_ids"
_BETWEEN_TEXTS = "\n\n"


def open_texts(data: NamedData) -> Batches:
    """Return the batches of texts.

    Raises:
        UsageError: the lengths of `--stride` and `--seq_len` do not fit each other.
    """
    options, defaults = data.options, data.defaults
    trust = defaults.get("trust", False)
    text = TextData(
        data.paths,
        data.spec,
        _tokenizer_of(data, trust),
        data.module,
        seq_len=options.get("seq_len") or defaults.get("seq_len", DEFAULT_SEQ_LEN),
        stride=options.get("stride"),
        shuffle_seed=data.seed if options.get("shuffle") else None,
        trust=trust,
    )
    return Batches(partial(text.batches, data.batch_size or BATCH_SIZE), data.spec)


def _tokenizer_of(data: NamedData, trust: bool) -> Callable[[], TextTokenizer] | None:
    """Return what loads the tokenizer of `--tokenizer`, or that of the model; None if there is
    none.
    """
    given = data.options.get("tokenizer")
    own = data.defaults.get("tokenizer")
    if given is None and isinstance(own, Path) and has_tokenizer(own):
        given = own
    if given is not None:
        return partial(load_tokenizer, given, trust=trust)
    if own is None:
        return None
    if isinstance(own, Path):
        return partial(_refuse_without_tokenizer, data.spec, own)
    return lambda: TextTokenizer(own.call(), own.label)


def _refuse_without_tokenizer(label: str, folder: Path) -> TextTokenizer:
    """Raise `UsageError`, as a model's folder has no tokenizer for a text."""
    raise UsageError(
        f"{label} is text, and {folder} has no tokenizer",
        help="put its tokenizer.json there, or give <--tokenizer>",
    )


@dataclass(frozen=True)
class TextData:
    """The windows of `seq_len` tokens of some files, tokenized once. They start every `stride`
    tokens, by default `seq_len`.

    Attributes:
        paths: the files.
        label: names the data in messages.
        tokenizer: loads what splits texts into tokens; None if there is none.
        module: the model that reads the windows; None if there is none.
        seq_len, stride: of the windows.
        shuffle_seed: of the random order of documents; None keeps the order of the files.
        trust: whether the processor of the model's images may be code of its folder.
    """

    paths: Sequence[Path]
    label: str
    tokenizer: Callable[[], TextTokenizer] | None
    module: nn.Module | None
    seq_len: int
    stride: int | None
    shuffle_seed: int | None
    trust: bool

    def __post_init__(self) -> None:
        if self.stride is not None and not 1 <= self.stride <= self.seq_len:
            raise UsageError(
                f"<--stride> must be from 1 to <--seq_len>, {self.seq_len}, not {self.stride}"
            )

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield batches of `size` full windows, int64 [b, seq_len]. The last may have fewer.

        Rows with images are a batch each, as the processor of the model makes it.

        The targets are the tokens, or -100 where an earlier window has scored them: each token
        is scored once, with at least `seq_len - stride` tokens before it.

        Raises:
            DataError: the text cannot be used.
            UsageError: rows with images are to be batches of more than one.

        Source: the strided sliding window of
        https://huggingface.co/docs/transformers/perplexity.
        """
        # Read first, as it refuses models that cannot take a text
        is_scored = self._is_scored
        if any(document.images for document in self._documents):
            if size > 1:
                raise UsageError(
                    f"<--batch_size {size}>: {self.label} has images, and each row is a batch",
                    help="leave it out",
                )
            yield from self._illustrated_rows.batches()
            return
        seq_len, step = self.seq_len, self._step
        windows = self._tokens.unfold(0, seq_len, step)
        for start in range(0, len(windows), size):
            ids = windows[start : start + size].clone()
            target = None
            if is_scored:
                target = ids.clone()
                first = 1 if start == 0 else 0
                target[first:, : seq_len - step] = UNSCORED
            yield _as_batch(ids, target, self.module)

    @property
    def _step(self) -> int:
        """Return the tokens from one window's start to the next."""
        return self.stride or self.seq_len

    @cached_property
    def _illustrated_rows(self) -> Any:
        """Return what makes batches of rows with images.

        Raises:
            UsageError: no plug-in does that.
        """
        make = part("make batches of texts with images")
        if make is None:
            raise UsageError(
                f"{self.label} has images, and no plug-in is there that reads them with texts",
                help="give rows without images",
            )
        unscored = UNSCORED if self._is_scored else None
        return make(self._documents, self.module, unscored, trust=self.trust)

    @cached_property
    def _is_scored(self) -> bool:
        """Return whether there are targets. Warn if not.

        Raises:
            DataError: the model needs more than one text.
        """
        model = type(self.module).__name__
        main_input = getattr(self.module, "main_input_name", _INPUT)
        if main_input != _INPUT and _INPUT not in arguments_of(self.module).known:
            raise DataError(
                f"{model} takes {main_input}, and {self.label} is text",
                help=f"give batches of your own, dicts with the key {main_input}",
            )
        config = getattr(self.module, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise DataError(
                f"{model} needs two texts, one for the encoder and one for the decoder, but "
                f"{self.label} is one text",
                help="give batches of your own: {'input_ids': …, 'decoder_input_ids': …}",
            )
        # Models of transformers have it. Other models are expected to predict the next token
        can_generate = getattr(self.module, "can_generate", None)
        if can_generate is None or can_generate():
            return True
        _logger.warning("%s does not predict the next token: there is no perplexity", model)
        return False

    @cached_property
    def _tokens(self) -> Tensor:
        """Return the text's token ids, int64 [n], without those of an incomplete window.

        Raises:
            DataError: the text is too short, or has tokens that the model does not know.
            UsageError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise UsageError(
                f"{self.label} is text, and there is no tokenizer",
                help="give <--tokenizer>, a tokenizer.json or a folder, or batches of tokens"
                "<shell:, or add tokenizer() to the model's file>",
            )
        ids = self._token_ids(self.tokenizer())
        count = len(ids)
        seq_len = self.seq_len
        if count < seq_len:
            remedy = "give a longer text"
            if count > 1:
                remedy += f", or <--seq_len {count}>"
            raise DataError(
                f"{self.label} has {counted(count, 'token')}, fewer than a window of {seq_len}",
                help=remedy,
            )
        dropped = (count - seq_len) % self._step
        if dropped:
            _logger.info(
                "%s: dropped the last %d of %d tokens (incomplete window)",
                self.label,
                dropped,
                count,
            )
        self._check_vocabulary(ids)
        return torch.tensor(ids[: count - dropped])

    @cached_property
    def _documents(self) -> Sequence[Document]:
        """Return the documents of all files, in a random order if that is asked for."""
        documents: list[Document] = []
        for path in self.paths:
            documents.extend(read_documents(path))
        if self.shuffle_seed is not None:
            if len(documents) == 1:
                raise UsageError(
                    f"<--shuffle> changes nothing: {self.label} is one document",
                    help="give several files, or rows of .jsonl or .parquet, or leave it out",
                )
            random.Random(self.shuffle_seed).shuffle(documents)
        return documents

    def _token_ids(self, tokenizer: TextTokenizer) -> list[int]:
        """Return the token ids of all documents, one after the other."""
        chats = [row for row in self._documents if not isinstance(row.content, str)]
        written: Iterator[str] = iter(())
        if chats:
            written = iter(tokenizer.chat_texts(chats))
        parts: list[str] = []
        for document in self._documents:
            if isinstance(document.content, str):
                parts.extend([document.content, _BETWEEN_TEXTS])
            else:
                # A template ends each chat with a token of its own
                parts.append(next(written))
        if parts[-1] == _BETWEEN_TEXTS:
            parts.pop()
        ids = tokenizer.encode("".join(parts))
        # Some templates write the token with which the tokenizer begins each text, so that it
        # would be there twice
        first = tokenizer.encode("")[:1]
        is_chat = isinstance(self._documents[0].content, list)
        if is_chat and first and ids[:2] == first * 2:
            return ids[1:]
        return ids

    def _check_vocabulary(self, ids: list[int]) -> None:
        """Raise `DataError` if the model's config has fewer tokens than the ids need."""
        config = getattr(self.module, "config", None)
        vocab_size = getattr(config, "vocab_size", None)
        if isinstance(vocab_size, int) and max(ids) >= vocab_size:
            raise DataError(
                f"the tokenizer gives token {max(ids)}, but the model has only {vocab_size} "
                "tokens",
                help="give the model's own tokenizer with <--tokenizer>",
            )


def _as_batch(ids: Tensor, target: Tensor | None, module: nn.Module | None) -> Batch:
    """Return a batch with the ids as `input_ids` if `forward` has it, else as first input."""
    if module is None or _INPUT not in inspect.signature(module.forward).parameters:
        return Batch.of(ids, target)
    raw = {_INPUT: ids}
    if target is not None:
        raw["labels"] = target
    return Batch((), {_INPUT: ids}, target, raw)
