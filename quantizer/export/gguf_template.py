"""A GGUF file of the same model as the template of another: its keys, the names and arrangement of its tensors."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from quantizer.errors import UsageError
from quantizer.export.gguf_file import FILE_TYPE, Arrangement, Entry, Outline, Stored

HELP = "give a .gguf of this very model, in any type, e.g. what llama.cpp's convert_hf_to_gguf.py makes of it"
NEAR = 0.5
"""The relative error up to which a tensor of the template is the model's: the coarsest types have .3, others 1.4."""
_WRITTEN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", FILE_TYPE)
_SPLIT = "split.count"


def outline_of(path: Path, state: Mapping[str, Tensor], first: Mapping[str, str]) -> Outline:
    """All that a file keeps of a template.

    How a tensor is arranged is found by comparing it with the float model's, so nothing is known of architectures.

    Args:
        path: of the template.
        state: the float model's tensors.
        first: the name in `state` of each of the model's tensors, by all its names.

    Raises:
        UsageError: it cannot be read, or is of another model.
    """
    reader = _reader(path)
    keys = {name: _entry(found) for name, found in reader.fields.items() if name not in _WRITTEN}
    architecture = reader.fields["general.architecture"].contents()
    found = {tensor.name: tensor for tensor in reader.tensors}
    names = names_of(architecture, keys[f"{architecture}.block_count"].value, first)
    missing = [source for source in state if names.get(source) not in found]
    if missing:
        raise UsageError(f"{path.name} has no tensor for {missing[0]} of the model", help=HELP)
    arranged = {name: first[source] for source, name in names.items() if name in found}
    heads = [keys[key].value for part in ("", "_kv") if (key := f"{architecture}.attention.head_count{part}") in keys]
    tensors: dict[str, tuple[str, Arrangement]] = {}
    for name in sorted(arranged, key=lambda name: name.endswith(".bias")):
        layer = tensors.get(f"{name.removesuffix('.bias')}.weight") if name.endswith(".bias") else None
        source = arranged[name]
        fit = layer[1] if layer else _arrangement(found[name], state[source], heads, f"{path.name}: {source}")
        tensors[name] = (source, fit)
    stay = {
        name: Stored(tensor.data, tensor.tensor_type.name) for name, tensor in found.items() if name not in arranged
    }
    return Outline(architecture, keys, {name: tensors[name] for name in found if name in tensors}, stay)


def names_of(architecture: str, blocks: int, sources: Mapping[str, str]) -> dict[str, str]:
    """The name in a file of each tensor of the model that the package gguf has one for."""
    number = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if number is None:
        raise UsageError(f"the package gguf knows no architecture {architecture}", help="install a newer one")
    table = gguf.get_tensor_name_map(number, blocks)
    named = ((source, table.get_name(source, (".weight", ".bias"))) for source in sources)
    return {source: name for source, name in named if name is not None}


def _reader(path: Path) -> Any:
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UsageError(f"{path} cannot be read as GGUF: {error}", help=HELP) from None
    if _SPLIT in reader.fields and reader.fields[_SPLIT].contents() > 1:
        raise UsageError(f"{path} is one part of several", help="merge them: llama-gguf-split --merge")
    return reader


def _entry(found: Any) -> Entry:
    """A key as it is written again."""
    return Entry(found.contents(), found.types[0], found.types[-1] if len(found.types) > 1 else None)


def _arrangement(tensor: Any, value: Tensor, heads: list[Any], what: str) -> Arrangement:
    """The one in which the model's tensor is nearest to the template's.

    Raises:
        UsageError: it is near in none.
    """
    there = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=True))
    if there.shape != value.shape:
        raise UsageError(f"{what} has the shape {list(there.shape)}, in the model {list(value.shape)}", help=HELP)
    errors = {each: float((each.values(value.float()) - there).norm()) for each in _possible(value, heads)}
    best = min(errors, key=lambda each: errors[each])
    if errors[best] > NEAR * float(there.norm()):
        raise UsageError(f"{what} is not the model's", help=HELP)
    return best


def _possible(value: Tensor, heads: list[Any]) -> Iterator[Arrangement]:
    yield Arrangement()
    if value.dim() == 1:
        yield Arrangement(added=1.0)
    for count in dict.fromkeys(count for count in heads if isinstance(count, int)):
        if value.dim() > 1 and len(value) % (2 * count) == 0:
            yield Arrangement(heads=count)
