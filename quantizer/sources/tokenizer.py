"""A tokenizer as a function from text to token ids: of a `tokenizer.json`, a model's folder or
the user's file.
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
FILE = "tokenizer.json"
FORMS = "give a tokenizer.json, or the folder of a Hugging Face model"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_tokenizer(spec: str | Path, *, trust: bool = False) -> Encode:
    """The tokenizer of `--tokenizer`: a `tokenizer.json`, or a folder that holds one or what
    transformers can read.

    Special tokens are added as the tokenizer does by default; its truncation and padding are
    switched off. Code of a folder runs with `trust` alone.

    Raises:
        DataError: there is none, it is damaged, or the package that reads it is missing.
    """
    path = Path(spec)
    if path.is_dir() and not has_tokenizer(path):
        raise DataError(f"the folder {path} holds no tokenizer", help=FORMS)
    if path.is_dir() and not (path / FILE).is_file():
        auto = _package("transformers", path).AutoTokenizer
        if not trust and _is_code(path):
            help_ = (
                "read its Python files, and add --trust if you would run them; or give a "
                "tokenizer.json"
            )
            raise DataError(f"the tokenizer of {path} is code in this folder", help=help_)
        with user_errors(f"transformers, loading the tokenizer of {path},", DataError):
            return as_encode(
                auto.from_pretrained(path, local_files_only=True, trust_remote_code=trust),
                str(path),
            )
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"there is no file or folder {path}", help=FORMS)
    tokenizers = _package("tokenizers", file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as cause:
        raise DataError(f"{file} cannot be read as a tokenizer: {cause}", help=FORMS) from cause
    return as_encode(tokenizer, str(file))


def _is_code(folder: Path) -> bool:
    """Whether the settings of a folder's tokenizer name a Python file."""
    file = folder / "tokenizer_config.json"
    return file.is_file() and '"auto_map"' in file.read_text("utf-8", errors="replace")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a file that tokenizers come in."""
    return any((folder / name).is_file() for name in (FILE, *_OTHER_FILES))


def as_encode(tokenizer: Any, label: str) -> Encode:
    """A function from text to ids, of a tokenizer of `tokenizers` or transformers, or of any
    with `encode(text)`.

    Raises:
        DataError: it has no `encode`; the function raises it if the ids are no list of
            integers.
    """
    if not callable(getattr(tokenizer, "encode", None)):
        raise DataError(f"{label} is {a_kind(tokenizer)} without encode(text)", help=FORMS)
    # A stored limit would cut the text without a word
    for name in ("no_truncation", "no_padding"):
        if hasattr(tokenizer, name):
            getattr(tokenizer, name)()

    def encode(text: str) -> list[int]:
        with user_errors(f"encode() of {label}", DataError):
            found = tokenizer.encode(text)
        ids = getattr(found, "ids", found)
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise DataError(
                f"encode() of {label} returns {a_kind(found)}, not a list of token ids"
            )
        return ids

    return encode


def _package(name: str, path: Path) -> Any:
    if importlib.util.find_spec(name) is None:
        raise DataError(
            f"{path} needs the package {name}, which is missing", help=pip_line("llm")
        )
    return importlib.import_module(name)
