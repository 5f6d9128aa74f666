"""Load a tokenizer as a function from text to token ids: from a `tokenizer.json`, a model's
folder or the user's file.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantizer.config.wording import a_kind
from quantizer.errors import DataError, pip_line
from quantizer.sources.user_code import user_errors

Encode = Callable[[str], list[int]]
_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_FILES = (_FILE, "tokenizer.model", "vocab.json", "vocab.txt", _SETTINGS)
_FORMS = "give a tokenizer.json, or the folder of a Hugging Face model"


def load_tokenizer(spec: str | Path, *, trust: bool = False) -> Encode:
    """Return the tokenizer of `--tokenizer`: a `tokenizer.json`, or a folder with one or with
    other files that transformers can read.

    Special tokens are added as the tokenizer does by default. Its truncation and padding are
    switched off. Code in a folder runs only with `trust`.

    Raises:
        DataError: there is none, it is damaged, or the package that reads it is missing.
    """
    path = Path(spec)
    file = path
    if path.is_dir():
        if not has_tokenizer(path):
            raise DataError(f"the folder {path} holds no tokenizer", help=_FORMS)
        file = path / _FILE
        if not file.is_file():
            return _load_with_transformers(path, trust)
    if not file.is_file():
        raise DataError(f"there is no file or folder {path}", help=_FORMS)
    tokenizers = _package("tokenizers", file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as cause:
        message = f"{file} cannot be read as a tokenizer: {cause}"
        raise DataError(message, help=_FORMS) from cause
    return as_encode(tokenizer, str(file))


def _load_with_transformers(folder: Path, trust: bool) -> Encode:
    transformers = _package("transformers", folder)
    if not trust and _is_code(folder):
        raise DataError(
            f"the tokenizer of {folder} is code in this folder",
            help="read its Python files, and add --trust to run them; or give a tokenizer.json",
        )
    with user_errors(f"transformers, loading the tokenizer of {folder},", DataError):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust
        )
        return as_encode(tokenizer, str(folder))


def _is_code(folder: Path) -> bool:
    """Return whether the settings of a folder's tokenizer name a Python file."""
    file = folder / _SETTINGS
    return file.is_file() and '"auto_map"' in file.read_text("utf-8", errors="replace")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file of a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def as_encode(tokenizer: Any, label: str) -> Encode:
    """Return a function from text to ids, from any object with `encode(text)`, such as the
    tokenizers of `tokenizers` and transformers.

    Raises:
        DataError: it has no `encode`. The function raises it if the ids are not a list of
            integers.
    """
    if not callable(getattr(tokenizer, "encode", None)):
        raise DataError(f"{label} is {a_kind(tokenizer)} without encode(text)", help=_FORMS)
    # A stored limit would cut the text silently
    for name in ("no_truncation", "no_padding"):
        if hasattr(tokenizer, name):
            getattr(tokenizer, name)()

    def encode(text: str) -> list[int]:
        with user_errors(f"encode() of {label}", DataError):
            encoding = tokenizer.encode(text)
        ids = getattr(encoding, "ids", encoding)
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise DataError(
                f"encode() of {label} returns {a_kind(encoding)}, not a list of token ids"
            )
        return ids

    return encode


def _package(name: str, path: Path) -> Any:
    if importlib.util.find_spec(name) is None:
        message = f"{path} needs the package {name}, which is missing"
        raise DataError(message, help=pip_line("llm"))
    return importlib.import_module(name)
