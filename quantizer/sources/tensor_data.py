"""Tensor files as batches: their samples in the order of the file names, cut anew to the batch size asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.config.wording import a_kind
from quantizer.errors import DataError
from quantizer.sources.batches import TARGET_NAMES, Batch
from quantizer.sources.tensor_files import read_file

INPUT_NAMES = ("x", "input", "images", "data")
Named = dict[str, Tensor]


def tensor_batches(paths: Sequence[Path], size: int) -> Iterator[Batch]:
    """Batches of `size` samples. In every tensor, dimension 0 counts the samples; the last batch may be smaller.

    A tensor named x, input, images or data is the input, and so is an only one; several others are keyword arguments.
    One named y, target, label or labels is the target.
    """
    pending: Named = {}
    for path in paths:
        named = _named_tensors(path)
        pending = _joined(pending, named, path) if pending else named
        while _count(pending) >= size:
            yield _as_batch({name: tensor[:size] for name, tensor in pending.items()})
            pending = {name: tensor[size:] for name, tensor in pending.items()}
    if pending and _count(pending):
        yield _as_batch(pending)


def _named_tensors(path: Path) -> Named:
    content: Any = read_file(path, DataError)
    named = {"x": content} if isinstance(content, Tensor) else content
    if not isinstance(named, Mapping) or not all(isinstance(tensor, Tensor) for tensor in named.values()):
        raise DataError(f"{path} holds {a_kind(content)}, not a tensor or a dict of tensors")
    if not set(named) - set(TARGET_NAMES):
        raise DataError(
            f"{path} holds no input tensor", help=f"name it {', '.join(INPUT_NAMES[:-1])} or {INPUT_NAMES[-1]}"
        )
    counts = {name: list(tensor.shape[:1]) for name, tensor in named.items()}
    if [] in counts.values() or len({count[0] for count in counts.values()}) != 1:
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
        raise DataError(f"the tensors of {path} differ in dimension 0, the samples: {listed}")
    return dict(named)


def _joined(first: Named, second: Named, path: Path) -> Named:
    kinds = [{name: (tensor.dtype, tensor.shape[1:]) for name, tensor in named.items()} for named in (first, second)]
    if kinds[0] != kinds[1]:
        raise DataError(f"{path} does not go with the files before it: {_listed(second)} after {_listed(first)}")
    return {name: torch.cat([tensor, second[name]]) for name, tensor in first.items()}


def _listed(named: Named) -> str:
    return ", ".join(f"{name} {tensor.dtype} {list(tensor.shape[1:])}" for name, tensor in named.items())


def _count(named: Named) -> int:
    return next(iter(named.values())).shape[0]


def _as_batch(named: Named) -> Batch:
    inputs = {name: tensor for name, tensor in named.items() if name not in TARGET_NAMES}
    target = next((named[name] for name in TARGET_NAMES if name in named), None)
    chosen = next((name for name in INPUT_NAMES if name in inputs), None) or (
        next(iter(inputs)) if len(inputs) == 1 else None
    )
    if chosen is None:
        return Batch((), inputs, target, named)
    x = inputs[chosen]
    return Batch((x,), {}, target, x if target is None else (x, target))
