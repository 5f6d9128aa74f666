"""Read batches from the user's own code: a function, a loader or a list."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from quantizer.config.wording import a_kind
from quantizer.errors import DataError
from quantizer.seeding import seed_everything
from quantizer.sources.arguments import Arguments
from quantizer.sources.batches import Batch, as_batch, prefix_errors
from quantizer.sources.user_code import import_user_module, split_spec, user_errors

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
