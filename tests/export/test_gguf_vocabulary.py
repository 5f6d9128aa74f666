"""The tokenizer of a folder in a GGUF file: llama.cpp finds the same tokens in a text, and a kind
that it does not know is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.llama_cpp import next_probabilities, served
from support.llamas import llama, saved, text_llama, tokens
from support.runs import ROOT

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import DataError
from quantizer.export.targets import EXPORTERS

for package in (*EXPORTERS["gguf"].needs, "tokenizers"):
    pytest.importorskip(package, reason="needs quantizer-torch[llm]")
import gguf
import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from quantizer.export.gguf.architectures import NO_TOKENIZER
from quantizer.export.gguf.vocabulary import vocabulary_keys

CORPUS = [
    "The quick brown fox's 12345 jumps over 3.14 lazy dogs, isn't it?  Yes!\n\n  It IS the 2nd.",
    "Über straße naïve café — 世界你好 🙂 done\t\ttabs, we've been there 100 times",
    "def f(x):\n    return x**2  # comment",
]
TEXTS = (
    "The quick brown fox's 12345",
    "isn't it?  Yes!\n\n  It IS",
    "Über 世界 🙂",
    "we've  WE'VE 3.14159",
    " x**2  # 1000000",
)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = 523
"""Of each model, as models of one size share a trace."""


def of_bytes(*steps: Any, by_words: bool = False, **settings: Any) -> Tokenizer:
    """Like those of GPT-2, which begin with all bytes."""
    tokenizer = Tokenizer(models.BPE(**settings))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, SPECIAL, vocab_size=400, initial_alphabet=alphabet)


def of_pieces(*first: Any) -> Tokenizer:
    """Like those of SentencePiece, which begin with characters, and have bytes for others."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    made = trained(tokenizer, [*SPECIAL, *letters], vocab_size=520, limit_alphabet=60)
    content = json.loads(made.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def of_joined_words() -> Tokenizer:
    """The same with spaces that are replaced when a text is split."""
    tokenizer = of_pieces(normalizers.Prepend("▁"))
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def trained(tokenizer: Tokenizer, special: list[str], **settings: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(special_tokens=special, show_progress=False, **settings)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def split(digits: str) -> Any:
    return pre_tokenizers.Split(Regex(WORDS + digits + REST), "isolated")


KNOWN: dict[str, tuple[str, Callable[[], Tokenizer]]] = {
    "GPT-2": ("gpt-2", lambda: of_bytes(by_words=True)),
    "StarCoder": (
        "starcoder",
        lambda: of_bytes(pre_tokenizers.Digits(individual_digits=True), by_words=True),
    ),
    "Qwen2": ("qwen2", lambda: of_bytes(split(r"\p{N}"))),
    "OLMo 2": ("dbrx", lambda: of_bytes(split(r"\p{N}{1,3}"))),
    "LLaMA 3": ("llama-bpe", lambda: of_bytes(split(r"\p{N}{1,3}"), ignore_merges=True)),
    "LLaMA 2": ("default", lambda: of_pieces(normalizers.Prepend("▁"))),
    "Gemma": ("default", of_pieces),
    "Mistral": ("default", of_joined_words),
}


def folder_of(tokenizer: Tokenizer, folder: Path, **more: Any) -> Path:
    """A LLaMA with a tokenizer, and at least three tokens that it does not name."""
    assert tokenizer.get_vocab_size() + 3 <= TOKENS
    saved(folder, llama(vocab_size=TOKENS, **more))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = "{{ messages[0]['content'] }}"
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_llama_cpp_finds_the_same_tokens(name: str, tmp_path: Path) -> None:
    """The next token's probabilities are those after the tokens that the folder's tokenizer
    gives.
    """
    pytest.importorskip("xllamacpp", reason="needs xllamacpp, the CPU binding of llama.cpp")
    splitter, make = KNOWN[name]
    tokenizer = make()
    folder = folder_of(tokenizer, tmp_path / "model", max_position_embeddings=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.config.use_cache = False
    result = quantizer.calibrate(model, ROOT / "configs" / "gguf_q8_0.json", tokens())
    verification = result.export("gguf", tmp_path / "net.gguf")
    assert NO_TOKENIZER not in verification.remarks
    fields = gguf.GGUFReader(tmp_path / "net.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == splitter
    assert fields["tokenizer.chat_template"].contents() == "{{ messages[0]['content'] }}"
    server = served(tmp_path / "net.gguf")
    size = model.config.vocab_size
    texts = TEXTS
    if name == "Mistral":
        # SentencePiece and llama.cpp begin with a space in any case, but Metaspace with one
        texts = TEXTS[:-1]
    for text in texts:
        ids = tokenizer.encode(text).ids
        expected, _ = next_probabilities(server, ids, size)
        found, count = next_probabilities(server, text, size)
        assert count == len(ids), text
        assert torch.allclose(found, expected, atol=1e-4, equal_nan=True), text


def lowered() -> Tokenizer:
    tokenizer = of_bytes(by_words=True)
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def after(special: str) -> Tokenizer:
    """With these tokens before each text."""
    tokenizer = of_bytes(by_words=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special} $A",
        pair=f"{special} $A $B",
        special_tokens=[("<s>", 1), ("<unk>", 0)],
    )
    return tokenizer


def of_separate_words(**settings: Any) -> Tokenizer:
    """Like those of Mistral, with other settings of what replaces spaces."""
    tokenizer = of_joined_words()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**settings)
    return tokenizer


def of_other_letters() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({"b": 0, "c": 1, "bc": 2}, [("b", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def without_spaces() -> Tokenizer:
    tokenizer = of_pieces()
    tokenizer.normalizer = None
    return tokenizer


def without_bytes() -> Tokenizer:
    vocabulary = {"<unk>": 0, "a": 1, "▁": 2, "▁a": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


UNKNOWN: dict[str, Callable[[], Tokenizer]] = {
    "words": lambda: Tokenizer(models.WordPiece({"<unk>": 0, "a": 1}, unk_token="<unk>")),
    "unigrams": lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
    "another split": lambda: of_bytes(split(r"\p{N}{1,2}")),
    "whole words": lambda: of_bytes(split(r"\p{N}"), ignore_merges=True),
    "small letters": lowered,
    "small letters in pieces": lambda: of_pieces(normalizers.Lowercase()),
    "other quotes in pieces": lambda: of_pieces(normalizers.Replace("'", "`")),
    "another prefix of pieces": lambda: of_pieces(normalizers.Prepend("_")),
    "one more special token": lambda: after("<unk> <s>"),
    "another special token": lambda: after("<unk>"),
    "a special token twice": lambda: after("<s> <s>"),
    "replaced letters": lambda: of_pieces(normalizers.Replace("a", "b")),
    "joined spaces": lambda: of_pieces(normalizers.Replace(Regex(" +"), " ")),
    "another prefix": lambda: of_pieces(normalizers.Prepend("a")),
    "spaces as they are": without_spaces,
    "another letter for spaces": lambda: of_separate_words(replacement="_", split=False),
    "pieces within words": lambda: of_separate_words(split=True),
    "no bytes": without_bytes,
    "no letters": of_other_letters,
    "no merges": lambda: Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [])),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_another_kind_is_left_out(name: str, tmp_path: Path) -> None:
    UNKNOWN[name]().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    assert vocabulary_keys(tmp_path, 8) is None


def of_pieces_with(word: str, **settings: Any) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = of_pieces()
        tokenizer.add_special_tokens([AddedToken(word, **settings)])
        return tokenizer

    return make


def of_pieces_like_phi_3() -> Tokenizer:
    tokenizer = of_pieces_with("<a>", rstrip=True)()
    content = json.loads(tokenizer.to_str())
    content["added_tokens"][2]["rstrip"] = True
    return Tokenizer.from_str(json.dumps(content))


SPACES: dict[str, tuple[Callable[[], Tokenizer], str, str]] = {
    "before": (of_pieces_with("<a>", lstrip=True), "Llama", "spaces next to these tokens: <a>"),
    "behind": (of_pieces_with("<a>", rstrip=True), "Llama", "spaces next to these tokens: <a>"),
    "behind, known by name": (of_pieces_like_phi_3, "Phi3", ""),
    "kept, lost by name": (of_pieces_with("<a>"), "Phi3", "tokens: </s>, <a>"),
    "kept": (of_pieces_with("<a>"), "Llama", ""),
    "only first": (of_joined_words, "Llama", "behind special tokens"),
}
"""A tokenizer, the name of the model in the file, and what a remark says."""


@pytest.mark.parametrize("name", SPACES)
def test_spaces_that_llama_cpp_treats_otherwise_are_said(name: str, tmp_path: Path) -> None:
    make, model, expected = SPACES[name]
    make().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    found = vocabulary_keys(tmp_path, 600, model)
    assert found is not None
    remarks = " ".join(found[1])
    assert expected in remarks
    assert bool(remarks) == bool(expected)


@pytest.mark.parametrize("has_bos", [True, False])
def test_tokenizer_json_says_what_is_added_to_a_text(has_bos: bool, tmp_path: Path) -> None:
    """As transformers does, whatever `add_bos_token` of the folder says."""
    tokenizer = of_pieces()
    if not has_bos:
        tokenizer.post_processor = None
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "add_bos_token": not has_bos, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = vocabulary_keys(tmp_path, 600)
    assert found is not None
    assert found[0]["tokenizer.ggml.add_bos_token"].value == has_bos
    assert found[0]["tokenizer.ggml.add_eos_token"].value is False


@pytest.mark.parametrize(
    "text", ["", "[]", '{"model": 3}', '{"model": {"type": "BPE", "merges": 3}}', "[" * 9999]
)
def test_a_damaged_file_is_no_unknown_kind(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        vocabulary_keys(tmp_path, 8)


def test_settings_that_gguf_cannot_read_are_no_unknown_kind(tmp_path: Path) -> None:
    of_bytes(by_words=True).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(DataError, match="the package gguf, reading the tokenizer of"):
        vocabulary_keys(tmp_path, 8)


NAMED = {"default": "{{ a }}", "tool_use": "{{ b }}", "rag+": "{{ c }}"}


def as_list(folder: Path) -> None:
    rows = [{"name": name, "template": text} for name, text in NAMED.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": rows}))


def as_files(folder: Path) -> None:
    """Files go before a template among the settings, as in transformers."""
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ old }}"}')
    (folder / "additional_chat_templates").mkdir()
    for name, text in NAMED.items():
        file = folder / "additional_chat_templates" / f"{name}.jinja"
        if name == "default":
            file = folder / "chat_template.jinja"
        file.write_text(text)


def without_settings(folder: Path) -> None:
    as_files(folder)
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("write", [as_list, as_files, without_settings])
def test_all_chat_templates_are_in_the_file(write: Any, tmp_path: Path) -> None:
    of_bytes(by_words=True).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path)
    found = vocabulary_keys(tmp_path, 600)
    assert found is not None
    values = {name: key.value for name, key in found[0].items() if "chat_template" in name}
    names = values.pop("tokenizer.chat_templates")
    assert sorted(names) == ["rag_", "tool_use"]
    assert values == {
        "tokenizer.chat_template": "{{ a }}",
        "tokenizer.chat_template.tool_use": "{{ b }}",
        "tokenizer.chat_template.rag_": "{{ c }}",
    }


def test_a_run_says_that_the_file_has_no_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text_llama(tmp_path)
    folder, book = tmp_path / "my_llama", tmp_path / "book.txt"
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(file)
    words = ["run", str(folder), "--to", "gguf", "--data", str(book)]
    assert run_command([*words, "-o", str(tmp_path / "q8")]) == 0
    assert "Note: it has no tokenizer" in capsys.readouterr().out
