"""Names the files in a folder of transformers, and reads those that are not weights.

Without `trust_remote_code=False`, transformers asks on the terminal whether to run code.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from quantizer.errors import ModelError, QuantizerError
from quantizer.sources.files.json_files import parse_value, read_object, read_text

CONFIG_FILE = "config.json"
CHECKPOINT_FILE = "model.safetensors"
QUANTIZATION_KEY = "quantization_config"
QUANTIZATION_KEYS = (QUANTIZATION_KEY, "compression_config")
"""The fields of config.json that say how weights are quantized. The second one is of early
versions of compressed-tensors.
"""
GPTQ_FILE = "quantize_config.json"
"""The file in which early versions of AutoGPTQ put their settings."""
MODELOPT_FILE = "hf_quant_config.json"
"""The file in which NVIDIA's ModelOpt puts its settings."""
FLOAT_FOLDER_HELP = "give the folder of the float model that it was made from"
_OBJECTS = (
    CONFIG_FILE,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_TEMPLATES = "*.jinja"
_MODULES_FILE = "modules.json"
_POOLING = "Pooling"
_MODE = "pooling_mode"
_MODES = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "lasttoken": "last",
}
"""The short names of the modes that other engines have too."""


@dataclass(frozen=True)
class EmbeddingModule:
    """A step from a text to its embedding.

    Attributes:
        kind: the name of its class, such as Transformer, Pooling, Dense or Normalize.
        path: of its files in the folder; empty for the model itself.
    """

    kind: str
    path: str


def embedding_modules(folder: Path) -> list[EmbeddingModule]:
    """Return the modules of a folder; none if it is not of Sentence Transformers.

    Raises:
        ModelError: modules.json is damaged, or names files outside of the folder.
    """
    file = folder / _MODULES_FILE
    if not file.is_file():
        return []
    rows = parse_value(read_text(file, ModelError), file, ModelError)
    modules: list[EmbeddingModule] = []
    for row in rows if isinstance(rows, list) else [None]:
        fields: dict[str, Any] = row if isinstance(row, dict) else {}
        kind, path = fields.get("type"), fields.get("path")
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelError(
                f"{file} is damaged: it is not a list of modules with type and path",
                help="copy or download the file again",
            )
        require_inside(file, path)
        # Both "" and "." are the folder itself
        inner_path = "/".join(PurePath(path).parts)
        modules.append(EmbeddingModule(kind.rpartition(".")[2], inner_path))
    return modules


def pooling_mode(folder: Path) -> str | None:
    """Return how the embeddings of tokens become one: mean, cls or last; or the words of the
    folder for another way. None if nothing is pooled.

    Raises:
        ModelError: the settings cannot be read.
    """
    paths = [module.path for module in embedding_modules(folder) if module.kind == _POOLING]
    if not paths:
        return None
    settings = read_object(folder / paths[0] / CONFIG_FILE, ModelError)
    modes: list[str] = []
    if _MODE in settings:
        modes.append(str(settings[_MODE]))
    for name, value in settings.items():
        if name.startswith(f"{_MODE}_") and value is True:
            modes.append(name.removeprefix(f"{_MODE}_"))
    if len(modes) == 1:
        return _MODES.get(modes[0], modes[0])
    return " and ".join(modes) or "no mode"


def require_inside(source: Path, name: str) -> None:
    """Check that a file named by another one is in its folder or in a folder below.

    Raises:
        ModelError: it is not; both are named.
    """
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ModelError(
            f"{source} names a file outside its folder: {name!r:.200}",
            help="move the weights into this folder: a model may only read files of its folder",
        )


def require_readable(folder: Path, error: type[QuantizerError]) -> None:
    """Check the files of a Hugging Face folder that are not weights, as transformers and other
    engines read them later, some from a copy of the folder.

    Raises:
        error: one is damaged.
    """
    for name in _OBJECTS:
        if (folder / name).exists():
            read_object(folder / name, error)
    for template in sorted(folder.glob(_TEMPLATES)):
        read_text(template, error)


def load_pretrained(
    kind: Any, folder: Path | None, *, trust: bool = False, **settings: Any
) -> Any:
    """Return what `from_pretrained` of a class reads. Errors are those of transformers.

    Args:
        kind: the class, or its name in transformers.
        folder: what is read; None if `settings` have it all.
        trust: whether code of the folder may run.
        settings: more arguments of `from_pretrained`.
    """
    if isinstance(kind, str):
        kind = getattr(importlib.import_module("transformers"), kind)
    return kind.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust, **settings
    )
