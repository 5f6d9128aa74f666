"""Load calibration and evaluation data, from `--data` or from the model's file, as batches."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quantizer.declarations import DataKind
from quantizer.distributed import Ranks
from quantizer.errors import BatchError, DataError, UsageError
from quantizer.graph.ir import Graph
from quantizer.option_words import Sentence
from quantizer.plugins import loaded
from quantizer.sources.arguments import (
    MASK,
    UNKNOWN_ARGUMENTS,
    Arguments,
    FilledArguments,
    arguments_of,
)
from quantizer.sources.batches import Batch, Fingerprint
from quantizer.sources.tensor_kinds import count_not_finite
from quantizer.sources.user_code import require_callable
from quantizer.sources.user_data import (
    RepeatedPasses,
    call_once_if_list,
    load_python_source,
    user_batches,
)
from quantizer.storage.process_memory import TRIM_AFTER_GROWTH, trim_heap

if TYPE_CHECKING:
    from quantizer.sources.kinds import NamedData

EXAMPLE_STAMP = "an example input, not of real data"
"""What reports say if an example input takes the place of data."""
DEFAULT_BATCH_SIZE = 32
_logger = logging.getLogger(__name__)


@dataclass
class Batches:
    """Batches that can be read in several passes, the same ones in each.

    Args:
        open_pass: starts a pass.
        label: names the data in messages.
        subset_len: the number of samples to use, or None for all. The last batch is cut.
        skip_len: the number of samples to leave out, or None for none; `subset_len` counts from
            there.
        stamp: what reports must say about the data ("random data").
        fingerprint: of the batches, once a pass is complete.
        length: batches in a pass, if known.
        first_size: samples in the first batch, once it was read.
        stands_in: whether they are an example input, which has the shapes of the data but not
            its values.
        way: how synthetic data are made from the model; empty for other data.
        open_shapes: starts a pass over batches of the same shapes, before synthetic data are
            made. None for other data.
        arguments: of the model's `forward`.
        filled: the arguments that batches fill, once the first batch was read.
        passes: watches that all passes are alike; None if they need not be.
        warnings: what users were warned of, so that no other pass warns again.

    Raises (when it is iterated): DataError: the data cannot be read or used; the batch is named
    by its number.
    """

    open_pass: Callable[[], Iterator[Batch]]
    label: str
    subset_len: int | None = None
    skip_len: int | None = None
    stamp: str | None = None
    fingerprint: Mapping[str, Any] | None = None
    length: int | None = None
    first_size: int | None = None
    stands_in: bool = False
    way: str = ""
    open_shapes: Callable[[], Iterator[Batch]] | None = None
    arguments: Arguments = UNKNOWN_ARGUMENTS
    filled: FilledArguments | None = None
    passes: RepeatedPasses | None = None
    warnings: set[str] = field(default_factory=set, repr=False)
    _seen: Fingerprint = field(default_factory=Fingerprint, repr=False)
    _first: Batch | None = field(default=None, repr=False)
    _digests: list[str] = field(default_factory=list, repr=False)

    @property
    def repeats(self) -> bool:
        """Return whether this pass has given the batches of the last complete one so far."""
        number = self._seen.batches
        return self._digests[number - 1 : number] in ([], [self._seen.digest])

    @property
    def seen(self) -> Mapping[str, Any]:
        """Return the fingerprint of the batches that were read so far in this pass."""
        return self._seen.to_json()

    @property
    def total(self) -> int | None:
        """Return the number of batches in a pass, or None if it is not known yet. It is an
        estimate, for progress only, until a pass is complete.
        """
        if self.fingerprint is not None:
            return int(self.fingerprint["batches"])
        counts: list[int] = []
        if self.length is not None:
            skipped = (self.skip_len or 0) // (self.first_size or 1)
            counts.append(max(self.length - skipped, 1))
        if self.subset_len and self.first_size:
            counts.append(math.ceil(self.subset_len / self.first_size))
        return min(counts, default=None)

    def first(self) -> Batch:
        """Return the first batch. It is kept: reading it again may be slow.

        Raises:
            DataError: there is none, or it cannot be used.
        """
        if self._first is None:
            self._first = next(iter(self)).stable()
        return self._first

    def for_shapes(self) -> Batches:
        """Return batches of the same shapes whose values need not be made first."""
        if self.open_shapes is None:
            return self
        return replace(self, open_pass=self.open_shapes)

    def without_padding(self, graph: Graph | None) -> Iterator[Batch]:
        """Yield the batches of a pass without padding. The parts of a batch have its number.

        The attention mask is the argument `attention_mask`, [batch, positions], of integers 0
        and 1 or booleans. `decoder_attention_mask` and `encoder_attention_mask` are those of
        other texts of the same call. A batch without padding keeps its tensors. If it is not
        sure where the positions are, the batch keeps its padding, with a warning.

        Args:
            graph: the trace that the batches will run through. It says where the positions of
                a mask are. None for a model without a trace: then sizes say it.

        Raises:
            BatchError: a mask excludes all positions of a batch.
        """
        names = self.arguments.names
        for number, batch in enumerate(self):
            numbered = replace(batch, number=number)
            if not any(name.endswith(MASK) for name in (*names, *batch.kwargs)):
                yield numbered
                continue
            # Only batches with masks need it
            from quantizer.sources.padding import parts_without_padding

            yield from parts_without_padding(numbered, names, graph, self._warn_of_padding)

    def _warn_of_padding(self, batch: Batch, reason: str) -> None:
        """Warn that padding stays, once for each reason in all passes."""
        if reason not in self.warnings:
            self.warnings.add(reason)
            _logger.warning(
                "batch %s of %s: its padding counts in the statistics, as %s (give sequences "
                "of one length)",
                batch.number,
                self.label,
                reason,
            )

    def require_same(self, ranks: Ranks) -> None:
        """Check, after a complete pass, that all ranks have read the batches of rank 0.

        Raises:
            DataError: a rank has not; it is named.
        """
        fingerprints = ranks.gather(self.fingerprint, f"the end of {self.label}")
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                raise DataError(
                    f"{self.label} gives rank {rank} other batches than rank 0",
                    help="every rank must read all batches in the same order: use no "
                    "DistributedSampler, and a fixed seed",
                )

    def note_length(self, items: object) -> None:
        """Store the length of the user's data, if it has one."""
        with contextlib.suppress(Exception):
            self.length = len(items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches.

        Raises:
            DataError: there is no batch, or one holds NaN or infinity.
        """
        seen = Fingerprint()
        self._seen = seen
        for batch in self._subset():
            self._check_finite(batch, seen.batches)
            if self.filled is None:
                self.filled = batch.filled(self.arguments)
                level = logging.WARNING if self.filled.doubtful else logging.INFO
                if str(self.filled):
                    _logger.log(level, "%s: %s", self.label, self.filled)
            if self.first_size is None:
                self.first_size = batch.size
            if self.passes is None:
                seen.update(batch)
            else:
                self.passes.see(seen, batch)
            yield batch
            # Without this, the freed memory of batches stays resident, several times of what is
            # used
            trim_heap(TRIM_AFTER_GROWTH)
        if seen.batches == 0:
            remedy = "give at least one batch, a tensor whose dimension 0 counts the samples"
            if self.skip_len:
                remedy = f"give more data: <--skip_len {self.skip_len}> leaves out all of it"
            if self._first is not None:
                remedy = "return a new iterator in each call: the first one is used up"
            raise DataError(f"{self.label} gives no batch", help=remedy)
        if self.subset_len and seen.samples < self.subset_len:
            _logger.warning(
                "%s has %d samples of the %d asked for",
                self.label,
                seen.samples,
                self.subset_len,
            )
        if self.passes is not None:
            self.passes.end(seen)
        self.fingerprint = seen.to_json()
        self._digests = seen.digests

    def _check_finite(self, batch: Batch, number: int) -> None:
        for name, tensor in batch.tensors():
            count = count_not_finite(tensor)
            if count:
                raise BatchError(
                    f"batch {number} of {self.label} holds NaN or Inf: {count} of "
                    f"{tensor.numel()} values of {name}",
                    help="leave these samples out, or replace the values: no scale fits them",
                )

    def _subset(self) -> Iterator[Batch]:
        """Yield the batches of a pass, up to the number of samples to use."""
        if self.subset_len is None:
            yield from self._not_skipped()
            return
        remaining = self.subset_len
        for batch in self._not_skipped():
            if batch.size > remaining:
                batch = batch.first(remaining)
            yield batch
            remaining -= batch.size
            if remaining <= 0:
                return

    def _not_skipped(self) -> Iterator[Batch]:
        """Yield the batches of a pass after the samples to leave out."""
        to_skip = self.skip_len or 0
        for batch in self.open_pass():
            size = batch.size
            if to_skip >= size:
                to_skip -= size
                continue
            if to_skip:
                batch = batch.last(size - to_skip)
                to_skip = 0
            yield batch


def load_batches(
    source: str | Callable[[], Any] | Iterable[Any],
    *,
    module: nn.Module | None = None,
    batch_size: int | None = None,
    subset_len: int | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    example: Callable[[], Batch | None] | None = None,
    label: str = "the data of the model's file",
) -> Batches:
    """Return the batches of `--data`, or of the user's callable or iterable.

    Args:
        source: a value of `--data`, batches, or a function that returns batches. The user's own
            batches are not split or joined.
        module: whose `forward` decides which inputs a tuple holds.
        batch_size: samples per batch, 32 by default, or 1 for texts.
        subset_len: the number of samples to use. The last batch is cut.
        seed: of random data, of the order of images, and of each pass of the user's loader.
        options: those that were given and that only some kinds of data read, by name.
        defaults: what takes the place of such options, as in `NamedData`.
        example: as in `NamedData`; None if data must not be made from the model.
        label: names the data in messages, unless `source` is a value of `--data`.

    Raises:
        DataError: the data cannot be loaded; errors in them are raised while iterating.
        UsageError: the options do not fit the data.
    """
    _require_positive("batch size", batch_size)
    _require_positive("subset length", subset_len)
    arguments = arguments_of(module)
    if isinstance(source, str):
        label = source
    kind, paths = _kind_of(source, options or {})
    if kind is not None:
        from quantizer.sources.kinds import NamedData

        named = NamedData(
            label,
            paths,
            module,
            batch_size=batch_size,
            samples=subset_len,
            seed=seed,
            options=options or {},
            defaults=defaults or {},
            example=example,
        )
        batches = _opened(kind, named)
        if kind.is_synthetic:
            # As many are made as are wanted
            subset_len = None
    elif isinstance(source, str) and source.startswith("random:"):
        batches = _random_data(source, batch_size or DEFAULT_BATCH_SIZE, seed)
        # A drawn tensor is the first input, whatever its name
        arguments = UNKNOWN_ARGUMENTS
    else:
        batches = _user_data(source, label, arguments, seed)
        if batch_size:
            _logger.warning(
                Sentence(
                    f"<--batch_size> has no effect: the batches of {label} keep their sizes"
                )
            )
    batches.subset_len = subset_len
    batches.arguments = arguments
    return batches


def _kind_of(source: Any, options: Iterable[str]) -> tuple[DataKind | None, list[Path]]:
    """Return the kind of data and its files, as `find_files` does, and check that this kind
    reads the options that were given.
    """
    if not isinstance(source, str) and not options:
        # The model's own data are of no kind
        return None, []
    from quantizer.sources.kinds import check_options, find_files

    kind, paths = find_files(source) if isinstance(source, str) else (None, [])
    check_options(kind, options)
    return kind, paths


def is_synthetic(source: str | None) -> bool:
    """Return whether a value of `--data` asks for data that are made from the model."""
    if source is None:
        return False
    from quantizer.sources.kinds import kind_of_word

    kind = kind_of_word(source)
    return kind is not None and kind.is_synthetic


def _opened(kind: DataKind, data: NamedData) -> Batches:
    if kind.is_synthetic and data.example is None:
        raise UsageError(
            f"{data.spec!r} asks for data to calibrate with, and there is nothing to calibrate",
            help="give real data, or leave them out to test with the data of the calibration",
        )
    # Each kind of data is imported where it is read
    batches: Batches = loaded(kind.opener)(data)
    return batches


def _user_data(source: Any, label: str, arguments: Arguments, seed: int) -> Batches:
    if isinstance(source, str):
        source = load_python_source(source)
    if callable(source) and not isinstance(source, Iterable):
        require_callable(source, 0, label, DataError)
        source = call_once_if_list(source)

    def open_pass() -> Iterator[Batch]:
        return user_batches(
            source, label, arguments, seed=seed, note_length=batches.note_length
        )

    batches = Batches(open_pass, label)
    return batches


def _random_data(spec: str, size: int, seed: int) -> Batches:
    from quantizer.sources.kinds import shape_of_spec

    samples, shape = shape_of_spec(spec)

    def open_pass() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for start in range(0, samples, size):
            count = min(size, samples - start)
            yield Batch.of(torch.randn(count, *shape, generator=generator))

    length = math.ceil(samples / size)
    return Batches(open_pass, spec, stamp="random data", length=length)


def _require_positive(name: str, value: int | None) -> None:
    """Raise `UsageError` if a size is given and is not at least 1."""
    if value is not None and value < 1:
        raise UsageError(f"the {name} must be at least 1, not {value}")
