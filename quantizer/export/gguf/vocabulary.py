"""The tokenizer of a Hugging Face folder as keys of a GGUF file.

llama.cpp has a tokenizer of its own for each kind, which a file names. Those of byte pairs are
known here, with or without pieces of SentencePiece.

Source: the converters of llama.cpp (conversion/base.py), and its src/llama-vocab.cpp.
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from quantizer.errors import DataError
from quantizer.export.gguf.file import GgufValue, typed
from quantizer.sources.json_files import read_object, read_text
from quantizer.sources.texts.tokenizer import load_tokenizer
from quantizer.sources.user_code import user_errors
from quantizer.storage.child_process import run_apart

_FILE = "tokenizer.json"
_SPACE = "▁"
"""What pieces have instead of a space."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How most models since GPT-4 split words. They differ in the digits that stay together."""
_THREE_DIGITS = _SPLIT.replace("DIGITS", r"\p{N}{1,3}")
_ONE_DIGIT = _SPLIT.replace("DIGITS", r"\p{N}")
_SPLITTERS = {
    ("bytes by words",): "gpt-2",
    ("single digits", "bytes by words"): "starcoder",
    (_ONE_DIGIT, "bytes"): "qwen2",
    (_THREE_DIGITS, "bytes"): "dbrx",
}
"""The name in llama.cpp of what splits a text, by its steps."""
_WHOLE_WORDS = {"dbrx": "llama-bpe"}
"""The name where a word of the vocabulary is taken whole, without merges."""
_TOKEN_KEYS = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
_TEMPLATE_KEY = "tokenizer.chat_template"
_TEMPLATE_FOLDER = "additional_chat_templates"
_TEMPLATE_ENDING = ".jinja"
_TEMPLATE_SETTINGS = ("tokenizer_config.json", "chat_template.json")
_DEFAULT = "default"
_PREFIX = {"type": "Prepend", "prepend": _SPACE}
_REPLACED_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_STRIPPING_NAME = "phi3"
"""llama.cpp removes the spaces behind special tokens of models with this in their name."""
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
"""The tokens of these models behind which spaces stay."""


def vocabulary_keys(
    folder: Path, size: int, name: str = ""
) -> tuple[dict[str, GgufValue], tuple[str, ...]] | None:
    """Return the keys of a folder's `tokenizer.json`, and notes on what llama.cpp does
    otherwise; None if there is none, or none of a kind that is known here.

    Args:
        folder: of the model.
        size: the number of tokens that the model has.
        name: of the model in the file.

    Raises:
        DataError: the file is damaged.
    """
    file = folder / _FILE
    if not file.exists():
        return None
    tokenizer = load_tokenizer(file).tokenizer
    # The file itself may leave out what its reader adds
    content = json.loads(tokenizer.to_str())
    what = f"the package gguf, reading the tokenizer of {folder},"

    def read() -> dict[str, GgufValue] | None:
        with user_errors(what, DataError):
            return _keys(folder, content, tokenizer, size)

    # The tokenizer splits words, which may not end for a hostile file
    run_apart(lambda: read() is None, what, DataError, size=file.stat().st_size)
    keys = read()
    if keys is None:
        return None
    return keys, tuple(_differences(content, name))


def _keys(
    folder: Path, content: Mapping[str, Any], tokenizer: Any, size: int
) -> dict[str, GgufValue] | None:
    """Return the values of tokenizer keys; None if llama.cpp would split texts otherwise."""
    model = content["model"]
    # The package gguf writes no empty lists
    if model["type"] != "BPE" or not model["merges"]:
        return None
    has_pieces = bool(model.get("byte_fallback"))
    if has_pieces and _splits_words(tokenizer):
        return None
    values = _piece_values(content, size) if has_pieces else _byte_values(content)
    if values is None:
        return None
    values["tokens"], values["token_type"] = _tokens(content, size)
    # It reports templates for pairs of texts, which files of language models do not need
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
    special = gguf.SpecialVocab(folder, load_merges=not has_pieces, n_vocab=size)
    if special.merges:
        values["merges"] = special.merges
    numbers = special.special_token_ids
    known = {key: token for token, key in _TOKEN_KEYS.items() if token in numbers}
    values |= {f"{key}_token_id": numbers[token] for key, token in known.items()}
    added = _added_around(tokenizer, numbers)
    if added is None:
        return None
    values |= added
    keys = {f"tokenizer.ggml.{name}": typed(value) for name, value in values.items()}
    return keys | _template_keys(folder)


def _template_keys(folder: Path) -> dict[str, GgufValue]:
    """Return the chat templates of a folder as keys: the default one, and others by name.

    As in transformers, files of templates go before those in tokenizer_config.json.
    """
    paths = sorted((folder / _TEMPLATE_FOLDER).glob(f"*{_TEMPLATE_ENDING}"))
    templates = {path.stem: read_text(path, DataError) for path in paths}
    default = folder / f"chat_template{_TEMPLATE_ENDING}"
    if default.is_file():
        templates[_DEFAULT] = read_text(default, DataError)
    for name in _TEMPLATE_SETTINGS:
        if not templates and (folder / name).is_file():
            templates = _listed_templates(read_object(folder / name, DataError))
    names = {name: re.sub("[^A-Za-z0-9]", "_", name) for name in templates if name != _DEFAULT}
    keys: dict[str, GgufValue] = {}
    for name, template in templates.items():
        ending = f".{names[name]}" if name in names else ""
        keys[f"{_TEMPLATE_KEY}{ending}"] = typed(template)
    if names:
        keys[f"{_TEMPLATE_KEY}s"] = typed([*names.values()])
    return keys


def _listed_templates(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates in the settings of a tokenizer, by name."""
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {_DEFAULT: template}
    if isinstance(template, dict):
        return {name: text for name, text in template.items() if isinstance(text, str)}
    return {str(row["name"]): str(row["template"]) for row in template or ()}


def _splits_words(tokenizer: Any) -> bool:
    """Return whether no piece has letters of two words, which llama.cpp joins."""
    words = "a a"
    if tokenizer.normalizer is not None:
        words = tokenizer.normalizer.normalize_str(words)
    splitter = tokenizer.pre_tokenizer
    return splitter is not None and len(splitter.pre_tokenize_str(words)) > 1


def _added_around(tokenizer: Any, numbers: Mapping[str, int]) -> dict[str, bool] | None:
    """Return which tokens are added to a text, as keys; None if not only BOS and EOS are,
    or if letters have no tokens.

    transformers does as this file says, whatever the folder's other files say.
    """
    encoding = tokenizer.encode("a")
    are_added = encoding.special_tokens_mask
    if not are_added:
        return None
    has_bos = are_added[0] == 1 and encoding.ids[0] == numbers.get("bos")
    has_eos = are_added[-1] == 1 and encoding.ids[-1] == numbers.get("eos")
    if sum(are_added) != has_bos + has_eos:
        return None
    return {"add_bos_token": has_bos, "add_eos_token": has_eos}


def _differences(content: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield what llama.cpp does otherwise with spaces."""
    is_stripped = _STRIPPING_NAME in name.lower()
    words: list[str] = []
    for token in content.get("added_tokens") or ():
        word = token["content"]
        expected = is_stripped and word not in _UNSTRIPPED
        is_other = token.get("rstrip", False) != expected
        if is_other or token.get("lstrip") or token.get("single_word"):
            words.append(word)
    if words:
        text = ", ".join(words)
        yield f"llama.cpp and the tokenizer differ in spaces next to these tokens: {text}"
    for step in _steps(content, "pre_tokenizer"):
        if step.get("prepend_scheme") == "first":
            yield (
                "llama.cpp puts a space before each text and behind special tokens, which the "
                "tokenizer does not"
            )


def _tokens(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token that the model has."""
    kinds = gguf.TokenType
    model = content["model"]
    has_pieces = bool(model.get("byte_fallback"))
    tokens = {number: (f"[PAD{number}]", kinds.UNUSED) for number in range(size)}
    for word, number in model["vocab"].items():
        is_byte = has_pieces and _BYTE.fullmatch(word)
        tokens[number] = (word, kinds.BYTE if is_byte else kinds.NORMAL)
    for token in content.get("added_tokens") or ():
        word = token["content"]
        kind = kinds.CONTROL
        if not token["special"]:
            kind = kinds.USER_DEFINED
            word = word.replace(_SPACE, " ")
        if has_pieces and word == model.get("unk_token"):
            kind = kinds.UNKNOWN
        tokens[token["id"]] = (word, kind)
    texts, types = zip(*(tokens[number] for number in range(size)), strict=True)
    return [*texts], [*map(int, types)]


def _piece_values(content: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """Return how SentencePiece joins pieces, as keys without their prefix; None if llama.cpp
    does not know that. Pieces of the highest score are joined first, here the earliest merge.
    """
    has_prefix = False
    has_spaces = False
    for step in _steps(content, "normalizer"):
        if step not in (_PREFIX, _REPLACED_SPACES):
            return None
        has_prefix |= step == _PREFIX
        has_spaces |= step == _REPLACED_SPACES
    for step in _steps(content, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            has_prefix |= scheme != "never"
            has_spaces |= step["replacement"] == _SPACE
        elif step.get("pattern") != {"String": " "}:
            return None
    model = content["model"]
    vocabulary = model["vocab"]
    # llama.cpp has no other token for characters without a piece
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not has_spaces or not has_bytes:
        return None
    scores = [0.0] * size
    joined: set[int] = set()
    for rank, merge in enumerate(model["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        number = vocabulary["".join(pair)]
        if number < size and number not in joined:
            scores[number] = -float(rank)
        joined.add(number)
    return {
        "model": "llama",
        "pre": "default",
        "scores": scores,
        "add_space_prefix": has_prefix,
    }


def _byte_values(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how a text is split into words, as keys; None if llama.cpp has no name for it."""
    for step in _steps(content, "normalizer"):
        # llama.cpp normalizes nothing. Few texts are not in this form already
        if step["type"] != "NFC":
            return None
    steps = tuple(_splitting(step) for step in _steps(content, "pre_tokenizer"))
    name = _SPLITTERS.get(steps, "")
    model = content["model"]
    if model.get("ignore_merges"):
        name = _WHOLE_WORDS.get(name, "")
    has_marks = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if not name or has_marks:
        return None
    return {"model": "gpt2", "pre": name}


def _splitting(step: Mapping[str, Any]) -> str:
    """Return what a step of splitting does, in the words of `_SPLITTERS`."""
    kind = str(step["type"])
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return "bytes by words" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step["individual_digits"]:
        return "single digits"
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex"))
    return kind


def _steps(content: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """Return the steps of a part of the file, in order."""
    part = content.get(name)
    if part is None:
        return ()
    if part["type"] != "Sequence":
        return (part,)
    steps: Sequence[Mapping[str, Any]] = part.get("normalizers", part.get("pretokenizers"))
    return steps
