"""Batches that come from the user's own code: what a factory gives, a loader, a list."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from quantizer.config.wording import a_kind
from quantizer.errors import DataError
from quantizer.seeding import seed_everything
from quantizer.sources.arguments import Arguments
from quantizer.sources.batches import Batch, as_batch, naming
from quantizer.sources.user_code import import_user_module, split_spec, user_errors


def from_python(spec: str) -> tuple[Any, str]:
    """What `FILE.py:factory` or `package.module:factory` names, and its label.

    Raises:
        DataError: there is none.
    """
    location, name = split_spec(spec)
    user = import_user_module(location, DataError)
    source = user.get("calibration_data" if name is None else name)
    return partial(user.call, source, DataError) if callable(source) else source, spec


def asked_once(function: Callable[[], Any]) -> Callable[[], Any]:
    """The function, but a list that it returns stays for the passes that follow: it is in
    memory in each of them.
    """
    kept: list[Any] = []

    def ask() -> Any:
        found = kept[0] if kept else function()
        if not kept and isinstance(found, (list, tuple)):
            kept.append(found)
        return found

    return ask


def user_batches(
    source: Any, label: str, given: Arguments, seed: int, tell: Callable[[object], None]
) -> Iterator[Batch]:
    """A pass over the user's batches; `tell` is called with what holds them, `given` is what
    `forward` takes.

    Raises:
        DataError: they are none, or the user's code fails; the batch is named.
    """
    # A loader that shuffles or crops gives the same batches in every pass
    seed_everything(seed)
    with user_errors(label, DataError):
        items = _iterator(source, label, tell)
    yield from batches_of(items, label, given)


_OF_LISTS: tuple[type[Any], ...] = (type(iter([])), type(iter(())))


def batches_of(items: Iterator[Any], label: str, given: Arguments) -> Iterator[Batch]:
    """Yield the items of the user's iterator as batches.

    Args:
        items: the user's.
        label: names them in errors.
        given: what `forward` takes.

    Raises:
        DataError: the user's code fails, or an item is no batch; the batch is named.
    """
    # Between two items of a list no code of the user's runs, which could write into the last
    # one.
    are_stable = isinstance(items, _OF_LISTS)
    for index in range(1 << 62):
        place = f"batch {index} of {label}"
        with user_errors(f"loading {place}", DataError):
            item = next(items, items)
        if item is items:
            return
        with naming(f"{place} "):
            batch = as_batch(item, given)
        yield replace(batch, is_stable=are_stable)


def _iterator(source: Any, label: str, tell: Callable[[object], None]) -> Iterator[Any]:
    if isinstance(source, Iterator):
        raise DataError(
            f"{label} can be gone through only once",
            help="give the function that returns the iterator",
        )
    if callable(source) and not isinstance(source, Iterable):
        source = source()
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        remedy = "wrap it: torch.utils.data.DataLoader(dataset, batch_size=32)"
        raise DataError(
            f"{label} is a Dataset, which gives single samples, not batches", help=remedy
        )
    if isinstance(source, Tensor | str | Mapping) or not isinstance(source, Iterable):
        remedy = "give a list of batches, a DataLoader, or a function that returns one"
        raise DataError(f"{label} is {a_kind(source)}, not an iterable of batches", help=remedy)
    tell(source)
    return iter(source)
