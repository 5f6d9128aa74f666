"""Read text and JSON files of other programs, with errors that say file, line and what is
damaged there. Those of transformers do not name the file.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from quantizer.config.wording import a_kind
from quantizer.errors import ModelError, QuantizerError
from quantizer.sources.tensor_files import reading, require_data

_AGAIN = "copy or download the file again"


def read_text(path: Path, error: type[QuantizerError]) -> str:
    """Return the text of a file.

    Raises:
        error: it cannot be read, is empty or is not UTF-8.
    """
    with reading(path, error):
        require_data(path)
        content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as cause:
        line = content.count(b"\n", 0, cause.start) + 1
        byte = content[cause.start]
        raise error(
            f"{path}:{line} is not UTF-8 text: byte {byte:#04x} at offset {cause.start}",
            help="save it as UTF-8; if it was cut off, copy it again",
        ) from cause


def read_object(path: Path, error: type[QuantizerError]) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        error: it cannot be read, or is something else.
    """
    return parse_object(read_text(path, error), path, error)


def parse_object(
    text: str,
    path: Path,
    error: type[QuantizerError],
    *,
    remedy: str = _AGAIN,
    first_line: int = 1,
) -> dict[str, Any]:
    """Return the object that a part of a file is; the arguments are those of `parse_value`.

    Raises:
        error: the text is not JSON, or is something else.
    """
    value = parse_value(text, path, error, remedy=remedy, first_line=first_line)
    if not isinstance(value, dict):
        raise error(f"{path}:{first_line} is {a_kind(value)}, not an object", help=remedy)
    return value


def parse_value(
    text: str,
    path: Path,
    error: type[QuantizerError],
    *,
    remedy: str = _AGAIN,
    first_line: int = 1,
) -> Any:
    """Return the value of a part of a file.

    Args:
        text: of the value, which begins at `first_line`.
        path: of the file.
        error: the error to raise.
        remedy: what to do about it.
        first_line: counted from 1.

    Raises:
        error: the text is not JSON.
    """
    try:
        value = json.loads(text)
        # A half of a character can only come from an escape, and cannot be written again
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as cause:
        place = f"{path}:{first_line - 1 + cause.lineno}:{cause.colno}"
        raise error(f"{place} is not JSON: {cause.msg}", help=remedy) from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}:{first_line} is not JSON: {cause}", help=remedy) from cause
    return value


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
