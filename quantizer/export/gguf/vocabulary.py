"""The tokenizer of a Hugging Face folder as keys of a GGUF file.

llama.cpp has a tokenizer of its own for each kind, which a file names. Those of byte pairs are
known here, with or without pieces of SentencePiece.

Source: the converters of llama.cpp (conversion/base.py), and its src/llama-vocab.cpp.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from quantizer.export.gguf.file import GgufValue
from quantizer.export.gguf.settings import typed

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
_DAMAGE_ERRORS = (
    OSError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
)
"""What a missing or damaged file raises."""


def vocabulary_keys(folder: Path, size: int) -> dict[str, GgufValue] | None:
    """Return the keys of a folder's `tokenizer.json`; None if there is none, or none of a kind
    that is known here.

    Args:
        folder: of the model.
        size: the number of tokens that the model has.
    """
    try:
        return _keys(folder, size)
    except _DAMAGE_ERRORS:
        return None


def _keys(folder: Path, size: int) -> dict[str, GgufValue] | None:
    text = (folder / _FILE).read_text("utf-8")
    content = json.loads(text)
    model = content["model"]
    # The package gguf writes no empty lists
    if model["type"] != "BPE" or not model["merges"]:
        return None
    has_pieces = bool(model.get("byte_fallback"))
    if has_pieces:
        values = _piece_values(content, size)
    else:
        values = _byte_values(content)
    if values is None:
        return None
    words, types = _tokens(content, size)
    values["tokens"] = words
    values["token_type"] = types
    # It reports templates for pairs of texts, which files of language models do not need
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)
    special = gguf.SpecialVocab(
        folder,
        load_merges=not has_pieces,
        n_vocab=size,
    )
    if special.merges:
        values["merges"] = special.merges
    numbers = special.special_token_ids
    for token, key in _TOKEN_KEYS.items():
        if token in numbers:
            values[f"{key}_token_id"] = numbers[token]
    for token in ("bos", "eos"):
        is_added = special.add_special_token.get(token)
        values[f"add_{token}_token"] = bool(is_added)
    keys = {f"tokenizer.ggml.{name}": typed(value) for name, value in values.items()}
    template = special.chat_template
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = typed(template)
    return keys


def _tokens(content: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of each token that the model has."""
    kinds = gguf.TokenType
    model = content["model"]
    has_pieces = bool(model.get("byte_fallback"))
    texts: list[str] = []
    types: list[int] = []
    for number in range(size):
        texts.append(f"[PAD{number}]")
        types.append(int(kinds.UNUSED))
    for word, number in model["vocab"].items():
        kind = kinds.NORMAL
        if has_pieces and _BYTE.fullmatch(word):
            kind = kinds.BYTE
        if number < size:
            texts[number] = word
            types[number] = int(kind)
    for token in content.get("added_tokens") or ():
        word = token["content"]
        number = token["id"]
        kind = kinds.CONTROL
        if not token["special"]:
            kind = kinds.USER_DEFINED
            word = word.replace(_SPACE, " ")
        if has_pieces and word == model.get("unk_token"):
            kind = kinds.UNKNOWN
        if number < size:
            texts[number] = word
            types[number] = int(kind)
    return texts, types


def _piece_values(content: Mapping[str, Any], size: int) -> dict[str, Any] | None:
    """Return how SentencePiece joins pieces, as keys without their prefix; None if llama.cpp
    does not know that. Pieces of the highest score are joined first, here the earliest merge.
    """
    has_prefix = False
    for step in _steps(content, "normalizer"):
        if step == {"type": "Prepend", "prepend": _SPACE}:
            has_prefix = True
        elif step != {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}:
            return None
    for step in _steps(content, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            has_prefix |= scheme != "never"
        elif step.get("pattern") != {"String": " "}:
            return None
    model = content["model"]
    vocabulary = model["vocab"]
    scores = [0.0] * size
    joined: set[int] = set()
    for rank, merge in enumerate(model["merges"]):
        pair = merge
        if isinstance(merge, str):
            pair = merge.split(" ")
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
    steps: list[str] = []
    for step in _steps(content, "pre_tokenizer"):
        steps.append(_splitting(step))
    name = _SPLITTERS.get(tuple(steps), "")
    model = content["model"]
    if model.get("ignore_merges"):
        name = _WHOLE_WORDS.get(name, "")
    if not name or model.get("continuing_subword_prefix"):
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
        pattern = step["pattern"]
        return str(pattern.get("Regex"))
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
