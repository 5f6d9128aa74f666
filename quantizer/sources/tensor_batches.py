"""Read batches of samples from files of tensors."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.config.wording import a_kind, first_names
from quantizer.errors import DataError
from quantizer.sources.arguments import Arguments, arguments_of
from quantizer.sources.batches import Batch, prefix_errors
from quantizer.sources.data import DEFAULT_BATCH_SIZE, Batches
from quantizer.sources.kinds import NamedData
from quantizer.sources.tensor_files import NamedTensors, read_file
from quantizer.sources.tensor_kinds import PLAIN_TENSORS_HELP, unsupported_reason

_END: Any = object()
_INPUT_NAMES = ("x", "input", "images", "data")


def prefetched(read: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    """Yield batches that a thread reads up to two batches ahead.

    If reading a batch raises an error, it is raised here instead of that batch. The thread
    ends when the iterator is exhausted or closed.
    """
    batches = read()
    thread = ThreadPoolExecutor(1, "prefetch")
    try:
        ahead = deque(thread.submit(next, batches, _END) for _ in range(2))
        while True:
            batch = ahead.popleft().result()
            if batch is _END:
                return
            ahead.append(thread.submit(next, batches, _END))
            yield batch
    finally:
        thread.shutdown(cancel_futures=True)


def open_tensors(data: NamedData) -> Batches:
    """Return the batches of files of tensors."""
    size = data.batch_size or DEFAULT_BATCH_SIZE
    limit = data.defaults.get("max_unpacked")
    read = partial(tensor_batches, data.paths, size, arguments_of(data.module), limit)
    return Batches(partial(prefetched, read), data.spec)


def tensor_batches(
    paths: Sequence[Path], size: int, arguments: Arguments, max_unpacked: int | None
) -> Iterator[Batch]:
    """Yield batches of `size` samples. The last one may be smaller.

    Dimension 0 of each tensor is that of the samples. The name of a tensor decides what it is:

    - y, target, label or labels: the target.
    - x, input, images or data: the input. A single tensor is the input, with any name.
    - other names: keyword arguments. If there is a tensor with a name of an input, only those
      that `forward` takes.

    Args:
        paths: the files, whose samples are joined in this order.
        size: the number of samples of a batch.
        arguments: what `forward` takes.
        max_unpacked: as for `read_file`.

    Raises:
        DataError: a file cannot be read, or its tensors are not samples.
    """
    pending: NamedTensors = {}
    for path in paths:
        named = _named_tensors(path, arguments, max_unpacked)
        if pending and _sample_kinds(pending) != _sample_kinds(named):
            raise DataError(
                f"{path} does not go with the files before it: {_describe_tensors(named)} "
                f"after {_describe_tensors(pending)}"
            )
        if pending:
            named = {name: torch.cat([pending[name], named[name]]) for name in pending}
        pending = named
        while _count_samples(pending) >= size:
            first = {name: tensor[:size] for name, tensor in pending.items()}
            yield _as_batch(first, arguments)
            pending = {name: tensor[size:] for name, tensor in pending.items()}
    if pending and _count_samples(pending):
        yield _as_batch(pending, arguments)


def _named_tensors(path: Path, arguments: Arguments, max_unpacked: int | None) -> NamedTensors:
    """Return the tensors of a file, after checking that all have the same number of samples.

    Raises:
        DataError: they do not, or the file cannot be read.
    """
    content = read_file(path, DataError, max_unpacked)
    named = {"x": content} if isinstance(content, Tensor) else content
    is_dict = isinstance(named, Mapping)
    if not is_dict or not all(isinstance(tensor, Tensor) for tensor in named.values()):
        raise DataError(f"{path} holds {a_kind(content)}, not a tensor or a dict of tensors")
    for name, tensor in named.items():
        reason = unsupported_reason(tensor)
        if reason is not None:
            raise DataError(
                f"{path} cannot be computed with: {name} {reason}", help=PLAIN_TENSORS_HELP
            )
    if not set(named) - set(arguments.labels):
        names = f"{', '.join(_INPUT_NAMES[:-1])} or {_INPUT_NAMES[-1]}"
        raise DataError(f"{path} holds no input tensor", help=f"name it {names}")
    _check_samples(path, named)
    keywords = [name for name in named if name not in arguments.labels]
    if len(keywords) > 1 and not set(keywords) & set(_INPUT_NAMES):
        with prefix_errors(f"{path} "):
            arguments.require(keywords)
    return dict(named)


def _check_samples(path: Path, named: Mapping[str, Tensor]) -> None:
    """Check that all tensors have the same number of samples.

    Tensors without values, such as [10**9, 0], take no space in a file. To bound the number of
    batches, they may not have more samples than the file has bytes.

    Raises:
        DataError: they do not, or have.
    """
    size = path.stat().st_size
    counts: set[int | None] = set()
    for name, tensor in named.items():
        shape = list(tensor.shape)
        count = shape[0] if shape else None
        counts.add(count)
        if count is not None and count > size and not tensor.numel():
            raise DataError(f"{path} holds no values of {name}: its shape is {shape}")
    if None in counts or len(counts) != 1:
        shapes = [f"{name} {list(tensor.shape)}" for name, tensor in named.items()]
        raise DataError(
            f"the tensors of {path} differ in dimension 0, the samples: {first_names(shapes)}"
        )


def _sample_kinds(named: NamedTensors) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return the dtype and the shape of one sample of each tensor, by name."""
    return {name: (tensor.dtype, list(tensor.shape[1:])) for name, tensor in named.items()}


def _describe_tensors(named: NamedTensors) -> str:
    kinds = _sample_kinds(named).items()
    return ", ".join(f"{name} {dtype} {shape}" for name, (dtype, shape) in kinds)


def _count_samples(named: NamedTensors) -> int:
    return next(iter(named.values())).shape[0]


def _as_batch(named: NamedTensors, arguments: Arguments) -> Batch:
    """Return the batch of named tensors: the input, its labels, and keyword arguments."""
    target = None
    others = dict(named)
    for label in arguments.labels:
        tensor = others.pop(label, None)
        if target is None:
            target = tensor
    main = next((name for name in _INPUT_NAMES if name in others), None)
    inputs: NamedTensors = {}
    left_out: list[str] = []
    for name, tensor in others.items():
        if main is None or name == main or name in arguments.known:
            inputs[name] = tensor
        else:
            left_out.append(name)
    if len(inputs) == 1:
        (x,) = inputs.values()
        return replace(Batch.of(x, target), left_out=tuple(left_out))
    args: tuple[Tensor, ...] = ()
    if main is not None and main not in arguments.known:
        args = (inputs.pop(main),)
    return Batch(args, inputs, target, named, tuple(left_out))
