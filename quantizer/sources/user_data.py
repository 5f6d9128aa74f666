"""Read batches from the user's own code: a function, a loader or a list. Each pass has to give
the same ones.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from quantizer.config.wording import a_kind, counted
from quantizer.errors import DataError
from quantizer.sources.arguments import Arguments
from quantizer.sources.batches import Batch, Fingerprint, as_batch, prefix_errors
from quantizer.sources.user_code import import_user_module, split_spec, user_errors
from quantizer.torch_state import seed_everything

_REPEATED_HELP = "draw random crops and orders from a fixed seed in each pass"
_END: Any = object()
_LIST_ITERATORS: tuple[type[Any], ...] = (type(iter([])), type(iter(())))


def load_python_source(spec: str) -> Any:
    """Return what `FILE.py:factory` or `package.module:factory` names.

    Raises:
        DataError: it does not exist, or cannot be imported.
    """
    location, name = split_spec(spec)
    user = import_user_module(location, DataError)
    if name is None:
        name = "calibration_data"
    source = user.get(name)
    if callable(source):
        return partial(user.call, source, DataError)
    return source


def call_once_if_list(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls `function` only once if that returns a list. The list is in
    memory in any case, so it is kept for later passes.
    """
    lists: list[Any] = []

    def call() -> Any:
        """Return the batches, from memory after the first call."""
        if lists:
            return lists[0]
        items = function()
        if isinstance(items, (list, tuple)):
            lists.append(items)
        return items

    return call


def user_batches(
    source: Any,
    label: str,
    arguments: Arguments,
    *,
    seed: int,
    note_length: Callable[[object], None],
) -> Iterator[Batch]:
    """Yield the user's batches, for one pass.

    Args:
        source: a list, a loader, or a function that returns one.
        label: names the data in errors.
        arguments: of `forward`.
        seed: of the global generators, so that a loader that shuffles or crops gives the same
            batches in every pass.
        note_length: called with the list or loader.

    Raises:
        DataError: there are no batches, or the user's code fails; the batch is named.
    """
    seed_everything(seed)
    with user_errors(label, DataError):
        if isinstance(source, Iterator):
            raise DataError(
                f"{label} is an iterator, which can be read only once",
                help="give the function that returns the iterator",
            )
        items = iterable_of(source, label)
        note_length(items)
        iterator = iter(items)
    yield from batches_of(iterator, label, arguments)


def batches_of(items: Iterator[Any], label: str, arguments: Arguments) -> Iterator[Batch]:
    """Yield the items of the user's iterator as batches.

    Args:
        items: the iterator.
        label: names the data in errors.
        arguments: of `forward`.

    Raises:
        DataError: the user's code fails, or an item is not a batch; the batch is named.
    """
    # A list gives the same tensors in each pass. A loader may reuse the memory of a batch
    are_stable = isinstance(items, _LIST_ITERATORS)
    for index in count():
        place = f"batch {index} of {label}"
        with user_errors(f"loading {place}", DataError):
            item = next(items, _END)
        if item is _END:
            return
        with prefix_errors(f"{place} "):
            batch = as_batch(item, arguments)
        yield replace(batch, is_stable=are_stable)


def iterable_of(source: Any, label: str) -> Iterable[Any]:
    """Return the list, the loader or the iterator that `source` is, or gives when it is called.

    Raises:
        DataError: it gives no batches.
    """
    if callable(source) and not isinstance(source, Iterable):
        source = source()
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise DataError(
            f"{label} is a Dataset, which gives single samples, not batches",
            help="wrap it: torch.utils.data.DataLoader(dataset, batch_size=32)",
        )
    if isinstance(source, Tensor | str | Mapping) or not isinstance(source, Iterable):
        remedy = "give a list of batches, a DataLoader, or a function that returns one"
        if source is None:
            remedy = "end the function with `return` and its batches, or use `yield`"
        raise DataError(f"{label} is {a_kind(source)}, not an iterable of batches", help=remedy)
    return source


@dataclass
class RepeatedPasses:
    """The batches of the first pass, which all later ones have to give.

    Args:
        label: names the data in messages.
        calibrated: the fingerprint of the calibration data; None if none were needed.
        has_same_source: whether they are read from where the calibration data come from. They
            need not be cut into the same batches.
        digests: of the batches up to each one, in the longest pass so far.
        is_complete: whether a pass has come to its end.
        has_calibrated: whether the batches begin with those of the calibration.
    """

    label: str
    calibrated: Mapping[str, Any] | None = None
    has_same_source: bool = False
    digests: list[str] = field(default_factory=list)
    is_complete: bool = False
    has_calibrated: bool = False

    def see(self, seen: Fingerprint, batch: Batch) -> None:
        """Add a batch to those that were seen in this pass.

        Raises:
            DataError: it is not the batch of an earlier pass.
        """
        if self.calibrated is not None:
            missing = self.calibrated["samples"] - seen.samples
            if 0 < missing <= batch.size:
                # The calibration may end within a batch
                prefix = seen.with_batch(batch.first(missing))
                self.has_calibrated = prefix.to_json() == self.calibrated
        number = seen.batches
        seen.update(batch)
        if number >= len(self.digests) and not self.is_complete:
            # From here on, it grows with this pass
            self.digests = seen.digests
        elif self.digests[number : number + 1] != [seen.digest]:
            raise DataError(
                f"batch {number} of {self.label} is another one when the data are read again, "
                "and the networks are compared on the same batches",
                help=_REPEATED_HELP,
            )

    def end(self, seen: Fingerprint) -> None:
        """End a pass.

        Raises:
            DataError: an earlier pass had more batches.
        """
        if self.is_complete and seen.batches < len(self.digests):
            raise DataError(
                f"{self.label} gives {counted(seen.batches, 'batch')} when the data are read "
                f"again, and {len(self.digests)} before",
                help=_REPEATED_HELP,
            )
        self.is_complete = True

    def judged_on(self, samples: int, skipped: int) -> dict[str, Any]:
        """Return which samples have judged, as report.json has it.

        Args:
            samples: of a pass.
            skipped: how many samples were left out before them.
        """
        calibrated = 0 if self.calibrated is None else self.calibrated["samples"]
        common = 0
        if self.has_calibrated:
            common = calibrated
        elif self.has_same_source:
            common = min(max(calibrated - skipped, 0), samples)
        text = f"on {counted(samples, 'sample')}"
        if common:
            text = "on the calibration data"
            if common < samples:
                text = f"partly {text}: the first {common} of {samples} samples"
        elif 0 < calibrated <= skipped:
            last = skipped + samples
            text = f"on samples {skipped + 1} to {last}, which did not calibrate"
        return {"samples": samples, "skipped": skipped, "text": text}
