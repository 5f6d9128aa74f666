"""A dataloader of the user's as batches on the model's device: also one that gives its batches only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from torch import nn

from quantizer.config.wording import a_kind
from quantizer.errors import DataError
from quantizer.sources.batches import Batch, as_batch, positional_inputs
from quantizer.sources.data import Batches


def batches_of(dataloader: Iterable[Any], model: nn.Module, *, several_passes: bool) -> Batches:
    """The user's items as batches.

    Args:
        dataloader: any iterable of tensors, tuples, lists or dicts.
        model: tells how many inputs a tuple holds, and the device.
        several_passes: keep the batches for more passes; each is read when a pass first comes to it.
    """
    items = _items(dataloader, model)
    kept = _Kept(items)
    return Batches(lambda: iter(kept) if several_passes else items, "the dataloader")


class _Kept:
    """Batches for several passes."""

    def __init__(self, rest: Iterator[Batch]) -> None:
        self._rest, self._read = rest, list[Batch]()

    def __iter__(self) -> Iterator[Batch]:
        for number in count():
            if number == len(self._read):
                self._read.extend(islice(self._rest, 1))
            if number == len(self._read):
                return
            yield self._read[number]


def _items(dataloader: Iterable[Any], model: nn.Module) -> Iterator[Batch]:
    try:
        items = iter(dataloader)
    except TypeError:
        raise DataError(f"dataloader is {a_kind(dataloader)}, which gives no batches") from None
    inputs = positional_inputs(model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    index = -1
    for index, item in enumerate(items):
        try:
            yield as_batch(item, inputs).to(device)
        except DataError as error:
            raise DataError(f"batch {index} {error.message}", help=error.help) from error
    if index < 0:
        raise DataError(
            "the dataloader gave no batches",
            help="give quantize_model a dataloader that gives batches; a generator gives its batches only once",
        )
