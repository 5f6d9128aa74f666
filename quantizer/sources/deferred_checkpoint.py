"""A Hugging Face model whose weights stay in their files until they are computed with."""

import importlib
import json
from pathlib import Path, PurePath

from torch import nn

from quantizer.errors import ModelError
from quantizer.graph.parameters import replace_parameters
from quantizer.storage.allocator import map_large_blocks
from quantizer.storage.deferred_tensor import DeferredTensor
from quantizer.storage.safetensors_file import deferred_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def deferred_model(folder: Path, architecture: str) -> nn.Module | None:
    """The model as `from_pretrained` makes it, its parameters deferred; None where that has
    more to do than to read.

    It has where names, shapes or dtypes in the files are not those of the model: it renames,
    fuses and converts.

    Raises:
        Exception: as transformers and safetensors say; so does the usual way.
    """
    transformers = importlib.import_module("transformers")
    accelerate = importlib.import_module("accelerate")
    stored = _stored(folder)
    config = transformers.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if not stored or getattr(config, "quantization_config", None) is not None:
        return None
    model = getattr(transformers, architecture)
    if not hasattr(model, "_from_config"):  # one of the Auto classes
        return None
    with accelerate.init_empty_weights(include_buffers=False):
        module: nn.Module = model._from_config(
            config, dtype=config.dtype or next(iter(stored.values())).dtype
        )
    module.tie_weights()  # type: ignore[operator]  # which making them empty has undone
    if not _fits(module, stored):
        return None
    map_large_blocks()
    replace_parameters(module, {name: stored[name] for name, _ in module.named_parameters()})
    if (folder / "generation_config.json").is_file():
        settings = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        module.generation_config = settings
    return module


def _stored(folder: Path) -> dict[str, DeferredTensor]:
    """All tensors of the folder's files, by name; none where there are no safetensors."""
    if (folder / INDEX).is_file():
        files = indexed_files(folder / INDEX)
    else:
        files = [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    found: dict[str, DeferredTensor] = {}
    for name in files:
        found |= deferred_file(folder / name)
    return found


def indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index of weights names, all inside its folder.

    Raises:
        ModelError: one is elsewhere, or the file is no index.
    """
    content = json.loads(index.read_text("utf-8"))
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(
        isinstance(name, str) for name in places.values()
    ):
        raise ModelError(f"{index} is damaged: its weight_map does not name files")
    for name in places.values():
        require_inside(index, name)
    return sorted(set(places.values()))


def require_inside(source: Path, name: str) -> None:
    """Refuse a file that is named by another one and not in the same folder, or in one below
    it.

    Raises:
        ModelError: naming both.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        help_ = "read as data, a folder may name its own files only: put the weights into it"
        raise ModelError(f"{source} names a file outside its folder: {name!r:.200}", help=help_)


def _fits(module: nn.Module, stored: dict[str, DeferredTensor]) -> bool:
    """Whether the files hold exactly the parameters, and no buffer."""
    own = dict(module.named_parameters())
    computed = all(buffer.device.type != "meta" for buffer in module.buffers())
    return (
        computed
        and own.keys() == stored.keys()
        and all(
            own[name].shape == each.shape and own[name].dtype == each.dtype
            for name, each in stored.items()
        )
    )
