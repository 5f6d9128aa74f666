"""Read what a folder of Sentence Transformers runs after its model: modules.json, and how
tokens are pooled to one embedding.
"""

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from quantizer.errors import ModelError
from quantizer.sources.deferred_checkpoint import require_inside
from quantizer.sources.json_files import parse_value, read_object, read_text

_FILE = "modules.json"
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
    file = folder / _FILE
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
    settings = read_object(folder / paths[0] / "config.json", ModelError)
    modes: list[str] = []
    if _MODE in settings:
        modes.append(str(settings[_MODE]))
    for name, value in settings.items():
        if name.startswith(f"{_MODE}_") and value is True:
            modes.append(name.removeprefix(f"{_MODE}_"))
    if len(modes) == 1:
        return _MODES.get(modes[0], modes[0])
    return " and ".join(modes) or "no mode"
