"""Load a tokenizer, with its chat template: from a `tokenizer.json`, a model's folder or the
user's file.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from quantizer.config.wording import a_kind
from quantizer.errors import DataError
from quantizer.sources.json_files import load_pretrained, require_readable
from quantizer.sources.texts.documents import Document
from quantizer.sources.user_code import user_errors
from quantizer.storage.child_process import loaded_twice, run_apart

_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_FILES = (_FILE, "tokenizer.model", "vocab.json", "vocab.txt", _SETTINGS)
_FORMS = "give a tokenizer.json, or the folder of a Hugging Face model"


def load_tokenizer(spec: str | Path, *, trust: bool = False) -> TextTokenizer:
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
            tokenizer = _load_from_folder(path, trust)
            size = None if trust else _size(path)
            return TextTokenizer(tokenizer, str(path), size=size)
    if not file.is_file():
        raise DataError(f"there is no file or folder {path}", help=_FORMS)
    load_template = partial(_load_from_folder, file.parent, trust)
    return TextTokenizer(_load_file(file), str(file), load_template, size=_size(file.parent))


def _load_file(file: Path) -> Any:
    """Return the tokenizer of a `tokenizer.json`."""
    tokenizers = _package("tokenizers", file)

    def load() -> Any:
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as cause:
            message = f"{file} cannot be read as a tokenizer: {cause}"
            raise DataError(message, help=_FORMS) from cause

    what = f"reading the tokenizer {file}"
    return loaded_twice(load, what, DataError, size=_size(file.parent))


def _size(folder: Path) -> int:
    """Return the bytes of the files of a tokenizer."""
    files = [folder / name for name in _FILES]
    return sum(file.stat().st_size for file in files if file.is_file())


def _load_from_folder(folder: Path, trust: bool) -> Any:
    """Return the tokenizer of a folder, loaded by transformers."""
    _package("transformers", folder)
    require_readable(folder, DataError)
    if not trust and _is_code(folder):
        raise DataError(
            f"the tokenizer of {folder} is code in this folder",
            help="read its Python files, and add <--trust> to run them; or give a "
            "tokenizer.json",
        )

    def load() -> Any:
        with user_errors(f"transformers, loading the tokenizer of {folder},", DataError):
            return load_pretrained("AutoTokenizer", folder, trust=trust)

    if trust:
        return load()
    what = f"reading the tokenizer of {folder}"
    return loaded_twice(load, what, DataError, size=_size(folder))


def _is_code(folder: Path) -> bool:
    """Return whether the settings of a folder's tokenizer name a Python file."""
    file = folder / _SETTINGS
    return file.is_file() and '"auto_map"' in file.read_text("utf-8", errors="replace")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file of a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


@dataclass(frozen=True)
class TextTokenizer:
    """Splits text into tokens, and writes the messages of a chat as text.

    Args:
        tokenizer: an object with `encode(text)`, such as the tokenizers of `tokenizers` and
            transformers.
        label: names it in messages.
        load_template: returns an object with transformers' `apply_chat_template`; without it,
            `tokenizer` itself is asked.
        size: of the files that it was read from. It then works in another process, within
            limits. None for code of the user's.

    Raises:
        DataError: the tokenizer has no `encode`.
    """

    tokenizer: Any
    label: str
    load_template: Callable[[], Any] | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.tokenizer, "encode", None)):
            kind = a_kind(self.tokenizer)
            raise DataError(f"{self.label} is {kind} without encode(text)", help=_FORMS)
        # A stored limit would cut the text silently
        for name in ("no_truncation", "no_padding"):
            if hasattr(self.tokenizer, name):
                getattr(self.tokenizer, name)()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the tokenizer adds.

        Raises:
            DataError: it raises an error, or the ids are not a list of integers.
        """
        what = f"encode() of {self.label}"
        ids: list[int] = self._limited(partial(self._ids, text, what), what, len(text))
        return ids

    def _ids(self, text: str, what: str) -> list[int]:
        with user_errors(what, DataError):
            encoding = self.tokenizer.encode(text)
        ids = getattr(encoding, "ids", encoding)
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise DataError(f"{what} returns {a_kind(encoding)}, not a list of token ids")
        return ids

    def chat_texts(self, chats: Sequence[Document]) -> list[str]:
        """Return the messages of chats as the texts that the model was trained on.

        Args:
            chats: their contents are lists of dicts with `role` and `content`.

        Raises:
            DataError: there is no chat template, or it refuses these messages.
        """
        template = self._template
        what = f"the chat template of {self.label}"

        def write_out() -> list[str]:
            texts: list[str] = []
            for chat in chats:
                with user_errors(f"{what}, on {chat.place},", DataError):
                    text = template.apply_chat_template(chat.content, tokenize=False)
                    texts.append(str(text))
            return texts

        size = sum(len(str(chat.content)) for chat in chats)
        written: list[str] = self._limited(write_out, what, size)
        return written

    def _limited(self, work: Callable[[], Any], what: str, size: int) -> Any:
        """Return what `work()` returns, in another process for a tokenizer of a file.

        Args:
            work: the work.
            what: names it in messages.
            size: of the texts that it reads.
        """
        if self.size is None:
            return work()
        return run_apart(work, what, DataError, size=self.size + size)

    @cached_property
    def _template(self) -> Any:
        template = self.tokenizer
        if self.load_template is not None:
            template = self.load_template()
        has_template = getattr(template, "chat_template", None) is not None
        if not has_template or not hasattr(template, "apply_chat_template"):
            raise DataError(
                f"{self.label} has no chat template, which messages need",
                help="give rows with text instead of messages, or <--tokenizer FOLDER> of a "
                "chat model",
            )
        return template


def _package(name: str, path: Path) -> Any:
    if importlib.util.find_spec(name) is None:
        # Only a missing extra needs it
        from quantizer.installation import pip_line

        message = f"{path} needs the package {name}, which is missing"
        raise DataError(message, help=pip_line("llm"))
    return importlib.import_module(name)
