"""A GGUF file of the same model as the template of another: its keys, the names and arrangement
of its tensors.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quantizer.errors import UsageError
from quantizer.export.gguf.file import FILE_TYPE, Arrangement, Entry, Outline, Stored
from quantizer.export.gguf.header import check_header

HELP = (
    "give a .gguf of this very model, in any type, e.g. what llama.cpp's "
    "convert_hf_to_gguf.py makes of it"
)
NEAR = 0.5
"""The relative error up to which a tensor of the template is the model's: the coarsest types
have .3, others 1.4.
"""
_ARCHITECTURE = "general.architecture"
_WRITTEN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", _ARCHITECTURE, FILE_TYPE)
_SPLIT = "split.count"
_DAMAGED = (ValueError, TypeError, KeyError, IndexError, OverflowError)
"""What the package gguf raises for a file that is damaged."""


def outline_of(path: Path, state: Mapping[str, Tensor], first: Mapping[str, str]) -> Outline:
    """All that a file keeps of a template.

    How a tensor is arranged is found by comparing it with the float model's, so nothing is
    known of architectures.

    Args:
        path: of the template.
        state: the float model's tensors.
        first: the name in `state` of each of the model's tensors, by all its names.

    Raises:
        UsageError: it cannot be read, or is of another model.
    """
    reader = _reader(path)
    keys, architecture = _keys(reader, path)
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = names_of(architecture, _blocks(keys, architecture, len(found), path), first)
    missing = [source for source in state if names.get(source) not in found]
    if missing:
        raise UsageError(f"{path.name} has no tensor for {missing[0]} of the model", help=HELP)
    arranged = {name: first[source] for source, name in names.items() if name in found}
    heads = [
        keys[key].value
        for part in ("", "_kv")
        if (key := f"{architecture}.attention.head_count{part}") in keys
    ]
    tensors: dict[str, tuple[str, Arrangement]] = {}
    for name in sorted(arranged, key=lambda name: name.endswith(".bias")):
        layer = (
            tensors.get(f"{name.removesuffix('.bias')}.weight")
            if name.endswith(".bias")
            else None
        )
        source = arranged[name]
        fit = (
            layer[1]
            if layer
            else _arrangement(found[name], state[source], heads, f"{path.name}: {source}")
        )
        tensors[name] = (source, fit)
    stay = {
        name: Stored(tensor.data, tensor.tensor_type.name)
        for name, tensor in found.items()
        if name not in arranged
    }
    return Outline(
        architecture, keys, {name: tensors[name] for name in found if name in tensors}, stay
    )


def _keys(reader: Any, path: Path) -> tuple[dict[str, Entry], str]:
    """Return the keys that another file keeps, and the architecture.

    Raises:
        UsageError: a value cannot be read, there is no architecture, or the file is a part.
    """
    try:
        keys = {
            name: _entry(field) for name, field in reader.fields.items() if name not in _WRITTEN
        }
        field = reader.fields.get(_ARCHITECTURE)
        architecture = None if field is None else field.contents()
    except _DAMAGED as error:
        raise UsageError(f"{path} cannot be read as GGUF: {error}", help=HELP) from None
    if not isinstance(architecture, str):
        raise UsageError(
            f"{path} names no architecture: it has no text {_ARCHITECTURE}", help=HELP
        )
    parts = keys.get(_SPLIT, Entry(1, None)).value
    if not isinstance(parts, int) or parts > 1:
        raise UsageError(
            f"{path} is one part of several", help="merge them: llama-gguf-split --merge"
        )
    return keys, architecture


def _blocks(keys: Mapping[str, Entry], architecture: str, tensors: int, path: Path) -> int:
    """Return how many blocks the template says it has.

    Raises:
        UsageError: it does not say, or has fewer tensors than blocks.
    """
    key = f"{architecture}.block_count"
    count = keys[key].value if key in keys else None
    if not isinstance(count, int) or not 0 <= count <= tensors:
        shown = "nothing" if count is None else f"{count!r:.40}"
        raise UsageError(
            f"{path}: {key} is {shown}, and the file has {tensors} tensors", help=HELP
        )
    return count


def names_of(architecture: str, blocks: int, sources: Mapping[str, str]) -> dict[str, str]:
    """The name in a file of each tensor of the model that the package gguf has one for."""
    number = next(
        (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None
    )
    if number is None:
        raise UsageError(
            f"the package gguf knows no architecture {architecture}", help="install a newer one"
        )
    table = gguf.get_tensor_name_map(number, blocks)
    named = ((source, table.get_name(source, (".weight", ".bias"))) for source in sources)
    return {source: name for source, name in named if name is not None}


def _reader(path: Path) -> Any:
    try:
        check_header(path)
        return gguf.GGUFReader(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read as GGUF: {error.strerror or error}", help=HELP
        ) from None
    except _DAMAGED as error:
        raise UsageError(f"{path} cannot be read as GGUF: {error}", help=HELP) from None


def _entry(found: Any) -> Entry:
    """A key as it is written again."""
    return Entry(
        found.contents(), found.types[0], found.types[-1] if len(found.types) > 1 else None
    )


def _arrangement(tensor: Any, value: Tensor, heads: list[Any], what: str) -> Arrangement:
    """The one in which the model's tensor is nearest to the template's.

    Raises:
        UsageError: it is near in none.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # values that are not finite are compared, too
            decoded = gguf.dequantize(tensor.data, tensor.tensor_type)
    except (*_DAMAGED, NotImplementedError) as error:
        raise UsageError(f"{what} cannot be decoded: {error}", help=HELP) from None
    there = torch.from_numpy(decoded.astype("float32", copy=True))
    if there.shape != value.shape:
        raise UsageError(
            f"{what} has the shape {list(there.shape)}, in the model {list(value.shape)}",
            help=HELP,
        )
    errors = {
        each: float((each.values(value.float()) - there).norm())
        for each in _possible(value, heads)
    }
    best = min(errors, key=lambda each: errors[each])
    # Written so that NaN in the template is not near.
    if not errors[best] <= NEAR * float(there.norm()):
        raise UsageError(f"{what} is not the model's", help=HELP)
    return best


def _possible(value: Tensor, heads: list[Any]) -> Iterator[Arrangement]:
    yield Arrangement()
    if value.dim() == 1:
        yield Arrangement(added=1.0)
    for count in dict.fromkeys(
        count for count in heads if isinstance(count, int) and count > 0
    ):
        if value.dim() > 1 and len(value) % (2 * count) == 0:
            yield Arrangement(heads=count)
