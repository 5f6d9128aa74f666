"""Describe and rebuild the inputs that a model was calibrated with, from quant_info.json."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantizer.errors import ResultError
from quantizer.graph.ir import Call
from quantizer.sources.batches import Batch

InputShapes = Sequence[Sequence[int | None] | None]
"""The shape of each input, with None for the batch size. An input that is not a tensor is None.
"""
_SAMPLES_OF_EXAMPLE = 2
"""More than one: a trace would take a batch size of 1 for fixed."""


def window_length(shapes: InputShapes) -> int | None:
    """Return the number of tokens s if the only input has the shape [b, s], else None."""
    if len(shapes) != 1 or shapes[0] is None or len(shapes[0]) != 2:
        return None
    length = shapes[0][1]
    # An input [b, 1] is one number per sample, not a text
    return None if length == 1 else length


def example_batch(header: Mapping[str, Any]) -> Batch:
    """Return a batch of two samples of zeros, with the shapes and dtypes that a model was
    calibrated with.

    Args:
        header: of quant_info.json. Its `call` has the path of each input in the arguments: 0
            and an index, or 1 and a name, then the keys of nested containers.

    Raises:
        ResultError: quant_info.json does not say how the model is called.
    """
    shapes = header["inputs"]
    call_paths = header.get("call", ())
    inputs = list(zip(shapes, call_paths, strict=False))
    if not inputs or any(shape is None for shape, _ in inputs):
        help_ = "give data: a batch to trace the model on"
        raise ResultError("the results do not say how the model is called", help=help_)
    # Positional arguments are under 0, keyword arguments under 1
    roots: dict[Any, Any] = {0: {}, 1: {}}
    for shape, (path, dtype) in inputs:
        parent = roots
        for key in path[:-1]:
            parent = parent.setdefault(key, {})
        sizes = _with_batch_size(shape, _SAMPLES_OF_EXAMPLE)
        parent[path[-1]] = torch.zeros(sizes, dtype=getattr(torch, dtype))
    args = _with_tuples(roots[0])
    # Without keyword arguments, it is an empty tuple
    kwargs = dict(_with_tuples(roots[1]))
    return Batch(args, kwargs, target=None, raw=None)


def _with_batch_size(shape: Sequence[int | None], batch_size: int) -> list[int]:
    """Return a shape with the batch size instead of None."""
    sizes: list[int] = []
    for size in shape:
        if size is None:
            sizes.append(batch_size)
        else:
            sizes.append(size)
    return sizes


def _with_tuples(value: Any) -> Any:
    """Return nested dicts, with a tuple instead of each dict whose keys are indices."""
    if not isinstance(value, dict):
        return value
    items = {}
    for key, item in value.items():
        items[key] = _with_tuples(item)
    if all(isinstance(key, int) for key in items):
        return tuple(items.values())
    return items


def call_with_shapes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: InputShapes
) -> Call | None:
    """Return a call with zeros of other shapes instead of its tensors.

    Return None if there are not as many shapes as inputs.
    """
    keywords = dict(kwargs)
    leaves, structure = pytree.tree_flatten((args, keywords))
    if len(leaves) != len(shapes):
        return None
    resized: list[Any] = []
    for leaf, shape in zip(leaves, shapes, strict=True):
        if isinstance(leaf, Tensor) and shape is not None:
            samples = 1
            if None in shape:
                samples = leaf.shape[shape.index(None)]
            sizes = _with_batch_size(shape, samples)
            resized.append(leaf.new_zeros(sizes))
        else:
            resized.append(leaf)
    call: Call = pytree.tree_unflatten(resized, structure)
    return call


def shapes_text(shapes: InputShapes) -> str:
    """Return the shapes of inputs with the batch size as b.

    >>> shapes_text([[None, 3, 8, 8], [None, 4]])
    '[b, 3, 8, 8] and [b, 4]'
    """
    texts: list[str] = []
    for shape in shapes:
        if shape is None:
            continue
        sizes: list[str] = []
        for size in shape:
            text = "b" if size is None else str(size)
            sizes.append(text)
        joined = ", ".join(sizes)
        texts.append(f"[{joined}]")
    return " and ".join(texts)
