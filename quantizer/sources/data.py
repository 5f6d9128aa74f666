"""How calibration and evaluation data come in: `--data`, or what the model's file offers, as
batches. No guessing.
"""

import contextlib
import glob
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantizer.distributed import Ranks
from quantizer.errors import DataError, UsageError
from quantizer.sources.arguments import UNKNOWN, Arguments, Filled, arguments_of
from quantizer.sources.batches import Batch, Fingerprint, not_finite
from quantizer.sources.images import (
    EXAMPLE,
    IMAGE_SUFFIXES,
    find_images,
    image_batches,
    parse_preprocess,
)
from quantizer.sources.tensor_files import READERS, tensor_batches
from quantizer.sources.text import TextData, Windows
from quantizer.sources.user_code import split_spec
from quantizer.sources.user_data import asked_once, from_python, user_batches
from quantizer.storage.allocator import GROWTH, give_back

_END: Any = object()
logger = logging.getLogger(__name__)

TENSORS, IMAGES, TEXTS = "tensor files", "images", "texts"
KINDS: Mapping[str, Sequence[str]] = {
    TENSORS: tuple(READERS),
    TEXTS: (".txt",),
    IMAGES: IMAGE_SUFFIXES,
}
FORMS = (
    "give FILE.py:factory, package.module:factory, a file, folder or glob of .npy, .npz, "
    ".safetensors or .pt tensors or of .txt texts, a folder of images, or random:NxCxHxW"
)
DEFAULT_BATCH_SIZE = 32
DEFAULT_TEXT_BATCH = 1  # a window has hundreds of tokens, and each a row of logits


@dataclass
class Batches:
    """Batches that can be gone through several times, the same ones each time.

    `stamp` says what reports must say about the data ("random data"); a batch that `stands_in`
    for data shows no more than their shape. `given` is what the model takes, `filled` what
    batches fill of it, once one was read. `fingerprint` is None until one pass is complete.

    Raises (when it is iterated): DataError: the data cannot be had or used; the batch is named
    by its number.
    """

    open_pass: Callable[[], Iterator[Batch]]
    label: str
    subset_len: int | None = None
    stamp: str | None = None
    fingerprint: Mapping[str, Any] | None = None
    length: int | None = None
    first_size: int | None = None
    stands_in: bool = False
    given: Arguments = UNKNOWN
    filled: Filled | None = None
    _seen: Fingerprint = field(default_factory=Fingerprint, repr=False)
    _first: Batch | None = field(default=None, repr=False)

    @property
    def seen(self) -> Mapping[str, Any]:
        """The fingerprint of the batches that the current pass has given so far."""
        return self._seen.to_json()

    @property
    def total(self) -> int | None:
        """How many batches a pass has, as far as that is known once one has begun: for progress
        only.
        """
        if self.fingerprint is not None:
            return int(self.fingerprint["batches"])
        asked = (
            math.ceil(self.subset_len / self.first_size)
            if self.subset_len and self.first_size
            else None
        )
        known = [count for count in (self.length, asked) if count is not None]
        return min(known, default=None)

    def first(self) -> Batch:
        """The first batch, which stays: asking for it again may make users read a tokenizer or
        a data set again.

        Raises:
            DataError: there is none, or it cannot be used.
        """
        if self._first is None:
            self._first = next(iter(self)).stable()
        return self._first

    def require_same(self, ranks: Ranks) -> None:
        """Refuse ranks that have read other batches than rank 0, once a pass is complete.

        Raises:
            DataError: one has; it is named.
        """
        prints = ranks.gather(self.fingerprint, f"the end of {self.label}")
        other = next((rank for rank, found in enumerate(prints) if found != prints[0]), None)
        if other is not None:
            remedy = (
                "every rank reads all batches, in the same order: give no "
                "DistributedSampler, and a fixed seed"
            )
            raise DataError(
                f"{self.label} gives rank {other} other batches than rank 0", help=remedy
            )

    def note_length(self, items: object) -> None:
        """Take the length of the user's data, if they tell one; a wrong one makes only the
        progress wrong.
        """
        with contextlib.suppress(Exception):
            self.length = len(items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """A pass.

        Raises:
            DataError: there is no batch, or one holds NaN or infinity.
        """
        seen = self._seen = Fingerprint()
        for batch in self._subset():
            for name, tensor in batch.tensors():
                if bad := not_finite(tensor):
                    place = f"batch {seen.batches} of {self.label}"
                    raise DataError(
                        f"{place} holds NaN or Inf: {bad} of {tensor.numel()} values of {name}"
                    )
            self.filled = self.filled or self._say(batch.filled(self.given))
            self.first_size = self.first_size or batch.size
            seen.update(batch)
            yield batch
            # Holes in the heap grow from batch to batch, to several times what is alive
            give_back(GROWTH)
        if not seen.batches:
            raise DataError(f"{self.label} gives no batch", help=FORMS)
        if self.subset_len and seen.samples < self.subset_len:
            logger.warning(
                "%s has %d samples of the %d asked for",
                self.label,
                seen.samples,
                self.subset_len,
            )
        self.fingerprint = seen.to_json()

    def _say(self, filled: Filled) -> Filled:
        """Tell once what the batches are taken for."""
        if text := str(filled):
            logger.log(
                logging.WARNING if filled.doubtful else logging.INFO, "%s: %s", self.label, text
            )
        return filled

    def _subset(self) -> Iterator[Batch]:
        if self.subset_len is None:
            yield from self.open_pass()
            return
        left = self.subset_len
        for batch in self.open_pass():
            yield batch if batch.size <= left else batch.first(left)
            left -= batch.size
            if left <= 0:
                return


def load_batches(
    source: str | Callable[[], Any] | Iterable[Any],
    *,
    module: nn.Module | None = None,
    batch_size: int | None = None,
    subset_len: int | None = None,
    seed: int = 0,
    preprocess: str | None = None,
    windows: Windows | None = None,
    max_unpacked: int | None = None,
    label: str = "the data of the model's file",
) -> Batches:
    """The batches of `--data`, or of a callable or iterable of the user's.

    Args:
        source: what `--data` takes, a function that returns batches, or these; the user's own
            stay as they are.
        module: tells which inputs a tuple holds.
        batch_size: samples in a batch of files, images and random data; by default 32, of texts
            1.
        subset_len: use so many samples; cuts the last batch.
        seed: draws random data and the order of images, and seeds the global generators before
            each pass of the user's loader.
        preprocess: how images are resized.
        windows: how texts are cut.
        max_unpacked: bytes that a smaller file of tensors may unpack to.
        label: names data that come as values.

    Raises:
        DataError: the data cannot be had; what only shows in the data itself is raised while
            iterating.
        UsageError: the options do not go with the data.
    """
    _require_positive("batch size", batch_size)
    _require_positive("subset length", subset_len)
    size, given = batch_size or DEFAULT_BATCH_SIZE, arguments_of(module)
    kind, paths = find_files(source) if isinstance(source, str) else ("", [])
    if preprocess is not None and kind != IMAGES:
        raise UsageError("--preprocess is for folders of images, and the data are not images")
    if kind == IMAGES:
        images = find_images(paths)
        if preprocess is None:
            said = f"{source}: images need preprocessing, and none is given"
            raise UsageError(said, help=f"--preprocess '{EXAMPLE}'")
        opened = partial(image_batches, images, parse_preprocess(preprocess), size, seed)
        length = math.ceil(len(images) / size)
        reader = partial(_prefetched, opened)
        return Batches(reader, str(source), subset_len, length=length, given=given)
    if kind == TENSORS:
        opened = partial(tensor_batches, paths, size, given, max_unpacked)
        return Batches(partial(_prefetched, opened), str(source), subset_len, given=given)
    if kind == TEXTS:
        text = TextData(paths, str(source), windows or Windows(), module)
        return Batches(
            partial(text.batches, batch_size or DEFAULT_TEXT_BATCH),
            text.label,
            subset_len,
            given=given,
        )
    if isinstance(source, str) and source.startswith("random:"):
        shape = _random_shape(source)
        draw = partial(_random_batches, shape, size, seed)
        return Batches(
            draw, source, subset_len, stamp="random data", length=math.ceil(shape[0] / size)
        )
    items, label = from_python(source) if isinstance(source, str) else (source, label)
    batches = Batches(lambda: iter(()), label, subset_len, given=given)
    items = asked_once(items) if callable(items) and not isinstance(items, Iterable) else items
    batches.open_pass = partial(user_batches, items, label, given, seed, batches.note_length)
    return batches


def _require_positive(name: str, value: int | None) -> None:
    """Raise `UsageError` if a size is given and is not at least 1."""
    if value is not None and value < 1:
        raise UsageError(f"the {name} must be at least 1, not {value}")


def find_files(spec: str) -> tuple[str, list[Path]]:
    """The kind and the files in the order of their names; a folder of images stays a folder;
    ("", []) for no path.

    Raises:
        DataError: there is nothing of this name, or files of no kind or of several.
    """
    path = Path(spec)
    if path.suffix == ".py" or spec.startswith("random:"):
        return "", []
    if path.is_dir():
        found = sorted(path.iterdir())
    elif path.is_file():
        found = [path]
    elif glob.has_magic(spec):
        found = sorted(Path(name) for name in glob.glob(spec, recursive=True))
    elif split_spec(spec)[1]:
        return "", []
    else:
        raise DataError(f"there is no file or folder {spec}", help=FORMS)
    sorts = {
        kind: [file for file in found if file.suffix.lower() in suffixes]
        for kind, suffixes in KINDS.items()
    }
    present = [kind for kind, files in sorts.items() if files]
    if path.is_dir() and not {TENSORS, TEXTS}.intersection(present):
        return IMAGES, [path]
    if not present:
        raise DataError(f"{spec} gives no tensor file, no text and no image", help=FORMS)
    if len(present) > 1:
        pattern = path / f"*{sorts[present[0]][0].suffix}"
        raise DataError(
            f"{spec} holds {' and '.join(present)}",
            help=f"name one kind, for example {pattern}",
        )
    return present[0], sorts[present[0]]


def _prefetched(items: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    """The batches in order, made in a thread up to two of them ahead; an exception comes where
    its batch would.

    The thread ends when the iterator is exhausted or closed.
    """
    source, thread = items(), ThreadPoolExecutor(1, "prefetch")
    try:
        coming = deque(thread.submit(next, source, _END) for _ in range(2))
        while (batch := coming.popleft().result()) is not _END:
            coming.append(thread.submit(next, source, _END))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)


def _random_shape(spec: str) -> tuple[int, ...]:
    if not re.fullmatch(r"random:[1-9]\d{0,8}(x[1-9]\d{0,8})+", spec):
        raise UsageError(
            f"{spec!r} is not random:NxCxHxW", help="for example random:32x3x224x224"
        )
    shape = tuple(int(number) for number in spec.removeprefix("random:").split("x"))
    if math.prod(shape[1:]) > 2**31:
        raise UsageError(
            f"one sample of {spec} has {math.prod(shape[1:])} values, more than 2^31"
        )
    return shape


def _random_batches(shape: tuple[int, ...], size: int, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, shape[0], size):
        yield Batch.of(
            torch.randn(min(size, shape[0] - start), *shape[1:], generator=generator)
        )
