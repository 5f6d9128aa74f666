"""Text as data: which tokens a window has, which of them count, and texts and tokenizers that
cannot be used.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from quantizer.errors import DataError, QuantizerError, UsageError
from quantizer.installation import pip_line
from quantizer.sources.batches import Batch
from quantizer.sources.data import load_batches
from quantizer.sources.models import UserFunction
from quantizer.sources.texts.tokenizer import TextTokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Bytes:
    """A token for each byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class LanguageModel(nn.Module):
    """Takes tokens by name, as transformers' models do, and knows the 256 bytes."""

    config = SimpleNamespace(vocab_size=256)

    def forward(self, input_ids: Tensor) -> Tensor:
        return input_ids


def windows(seq_len: int, tokenizer: Any = None, **options: Any) -> dict[str, Any]:
    """How `load_batches` splits texts, with a token for each byte by default."""
    own = UserFunction(lambda: tokenizer or Bytes(), "bytes")
    return {"options": {"seq_len": seq_len, **options}, "defaults": {"tokenizer": own}}


def batches(spec: str, seq_len: int, stride: int | None = None, **more: Any) -> list[Batch]:
    return list(load_batches(spec, **windows(seq_len, stride=stride), **more))


def refusal(spec: str, told: dict[str, Any] | None = None, **more: Any) -> str:
    with pytest.raises(QuantizerError) as caught:
        list(load_batches(spec, **(windows(4) if told is None else told), **more))
    assert isinstance(caught.value, DataError | UsageError)
    return f"{caught.value.message} | {caught.value.help}"


def words(ids: Tensor) -> list[str]:
    return [
        "".join("_" if token == -100 else chr(token) for token in row) for row in ids.tolist()
    ]


def test_windows_follow_each_other_and_are_their_own_targets() -> None:
    Path("a.txt").write_text("abcdefghijk")
    first, second = batches("a.txt", 4)
    assert [words(batch.args[0]) for batch in (first, second)] == [["abcd"], ["efgh"]], (
        "ijk fills no window"
    )
    assert torch.equal(first.target, first.args[0])
    assert torch.equal(first.raw[1], first.target)


def test_overlapping_windows_score_each_token_once() -> None:
    Path("a.txt").write_text("abcdefghijk")
    first, second = batches("a.txt", 4, 2, batch_size=3)
    assert words(torch.cat([first.args[0], second.args[0]])) == ["abcd", "cdef", "efgh", "ghij"]
    assert words(torch.cat([first.target, second.target])) == ["abcd", "__ef", "__gh", "__ij"]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(2, 9), st.data())
def test_every_token_but_the_first_counts_once_where_windows_overlap(
    seq_len: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, seq_len - 1))
    length = data.draw(st.integers(seq_len, 60))
    text = [chr(97 + index) for index in range(length)]
    path = Path("text.txt")
    path.write_text("".join(text))
    letters = SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
    size = data.draw(st.integers(1, 4))
    told = windows(seq_len, letters, stride=stride)
    found = list(load_batches(str(path), batch_size=size, **told))
    # The first has nothing before it
    targets = torch.cat([batch.target[:, 1:] for batch in found]).flatten()
    scored = [chr(token) for token in targets.tolist() if token != -100]
    last = (length - seq_len) // stride * stride + seq_len
    assert scored == text[1:last]


def test_a_model_that_names_its_tokens_gets_them_by_name() -> None:
    Path("a.txt").write_text("abcd")
    (batch,) = batches("a.txt", 4, module=LanguageModel())
    assert words(batch.kwargs["input_ids"]) == ["abcd"]
    assert set(batch.raw) == {"input_ids", "labels"}


def test_files_of_a_folder_come_in_order_with_an_empty_line_between() -> None:
    Path("d").mkdir()
    for name, text in {"b.txt": "cd", "a.txt": "\ufeffab", "notes.md": "no text"}.items():
        (Path("d") / name).write_text(text, "utf-8")
    assert [words(batch.args[0]) for batch in batches("d", 3)] == [["ab\n"], ["\ncd"]]
    assert [words(batch.args[0]) for batch in batches("d/*.txt", 3)] == [["ab\n"], ["\ncd"]]


def test_texts_that_cannot_be_used() -> None:
    Path("short.txt").write_text("abc")
    assert (
        "short.txt has 3 tokens, fewer than a window of 4 | give a longer text, or --seq_len 3"
        in refusal("short.txt")
    )
    Path("empty.txt").write_text(" \n")
    assert "empty.txt is empty" in refusal("empty.txt")
    Path("latin.txt").write_bytes("abcd\xe9fgh".encode("latin-1"))
    assert "latin.txt:1 is not UTF-8 text: byte 0xe9 at offset 4 | save it as UTF-8" in refusal(
        "latin.txt"
    )
    Path("a.npy").touch()
    assert ". holds tensor files and texts | name one kind, for example *.npy" in refusal(".")


def test_a_tokenizer_is_never_guessed_and_must_be_the_models() -> None:
    Path("a.txt").write_text("abcd")
    assert "a.txt is text, and there is no tokenizer" in refusal("a.txt", {})
    Path("a.txt").write_text("abcé")
    module = LanguageModel()
    module.config = SimpleNamespace(vocab_size=128)
    assert "the tokenizer gives token 195, but the model has only 128 tokens" in refusal(
        "a.txt", module=module
    )


@pytest.mark.parametrize(
    ("stride", "said"), [(5, "from 1 to --seq_len, 4, not 5"), (0, "from 1 to")]
)
def test_lengths_that_make_no_windows(stride: int, said: str) -> None:
    Path("a.txt").write_text("abcdefgh")
    assert said in refusal("a.txt", windows(4, stride=stride))


def test_what_is_no_tokenizer() -> None:
    Path("tokenizer.json").write_text("{}")
    Path("bare").mkdir()
    for spec, said in {
        "bare": "the folder bare holds no tokenizer",
        "missing": "there is no file or folder",
    }.items():
        with pytest.raises(DataError, match=said):
            load_tokenizer(spec)
    with pytest.raises(DataError, match="without encode"):
        TextTokenizer(len, "tokenizer() of net.py")
    with pytest.raises(DataError, match="returns a str, not a list of token ids"):
        TextTokenizer(SimpleNamespace(encode=str.upper), "tokenizer() of net.py").encode("abc")
    with pytest.raises(DataError, match=r"encode\(\) of net raised UnicodeEncodeError"):
        ascii_only = SimpleNamespace(encode=lambda text: list(text.encode("ascii")))
        TextTokenizer(ascii_only, "net").encode("é")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tokenizer.json").write_text("{}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError) as caught:
        load_tokenizer(".")
    assert (
        caught.value.message == "tokenizer.json needs the package tokenizers, which is missing"
    )


def test_a_tokenizers_stored_limit_does_not_cut_the_text() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs quantizer[llm]")
    words_only = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    )
    words_only.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words_only.enable_truncation(3)
    words_only.enable_padding(length=8)
    words_only.save("tokenizer.json")
    assert (
        load_tokenizer(".").encode("a b a b a")
        == load_tokenizer("tokenizer.json").encode("a b a b a")
        == [0, 1, 0, 1, 0]
    )
    Path("tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read as a tokenizer"):
        load_tokenizer(".")


class Chat(Bytes):
    """A tokenizer that begins each text with <, and whose template writes <role:content>."""

    chat_template = "…"

    def encode(self, text: str) -> list[int]:
        return super().encode("<" + text)

    def apply_chat_template(self, messages: list[dict[str, str]], *, tokenize: bool) -> str:
        assert not tokenize
        if messages[0]["role"] == "system":
            raise ValueError("no system messages")
        return "".join(f"<{message['role'][0]}:{message['content']}>" for message in messages)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ROWS: list[dict[str, Any]] = [
    {"messages": [message("user", "ab"), message("assistant", "c")]},
    {"text": "de", "id": 1},
    {"text": "fg", "messages": None},
]


def write_rows(file: str, rows: list[dict[str, Any]]) -> None:
    if file.endswith(".jsonl"):
        lines = [json.dumps(row) for row in rows]
        Path(file).write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    else:
        arrow = pytest.importorskip("pyarrow", reason="Parquet needs quantizer-torch[parquet]")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), file)


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_rows_are_texts_or_chats(file: str) -> None:
    rows = ROWS if file.endswith(".jsonl") else [{"text": None, **row} for row in ROWS]
    write_rows(file, rows)
    (batch,) = load_batches(file, **windows(17, Chat()))
    # The tokenizer's own < is not written twice
    assert words(batch.args[0]) == ["<u:ab><a:c>de\n\nfg"]


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_an_assistant_may_call_tools_and_say_nothing(file: str) -> None:
    class Calling(Chat):
        def apply_chat_template(self, messages: list[dict[str, Any]], *, tokenize: bool) -> str:
            assert [set(row) - {"role"} for row in messages] == [
                {"content"},
                {"tool_calls"},
                {"content"},
            ]
            return messages[1]["tool_calls"][0]["function"]["name"] + messages[2]["content"]

    call = {"type": "function", "function": {"name": "find", "arguments": "{}"}}
    asked = {"role": "assistant", "tool_calls": [call]}
    silent = asked | {"content": None}
    messages = [message("user", "ab"), silent, message("tool", "yes")]
    for row in (messages, [messages[0], asked, messages[2]]):
        write_rows(file, [{"messages": row}])
        (batch,) = load_batches(file, **windows(8, Calling()))
        assert words(batch.args[0]) == ["<findyes"]


def test_rows_and_files_are_one_text() -> None:
    Path("data").mkdir()
    Path("data/a.txt").write_text("abc")
    write_rows("data/b.jsonl", ROWS[1:])
    (batch,) = batches("data", 11)
    assert words(batch.args[0]) == ["abc\n\nde\n\nfg"]


def test_documents_are_shuffled_by_the_seed() -> None:
    write_rows("rows.jsonl", [{"text": letter * 2} for letter in "abcdef"])
    orders = []
    for seed in (0, 0, 1):
        (batch,) = load_batches("rows.jsonl", seed=seed, **windows(22, shuffle=True))
        (text,) = words(batch.args[0])
        orders.append(text.split("\n\n"))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == ["aa", "bb", "cc", "dd", "ee", "ff"]


def test_a_single_document_cannot_be_shuffled() -> None:
    Path("a.txt").write_text("abcdef")
    told = windows(2, shuffle=True)
    assert "--shuffle changes nothing: a.txt is one document" in refusal("a.txt", told)


def test_equal_first_tokens_of_a_chat_are_kept() -> None:
    class Doubling(Bytes):
        chat_template = "…"

        def apply_chat_template(self, messages: list[Any], *, tokenize: bool) -> str:
            return "aab"

    write_rows("rows.jsonl", ROWS[:1])
    (batch,) = load_batches("rows.jsonl", **windows(3, Doubling()))
    assert words(batch.args[0]) == ["aab"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "rows.jsonl:3:2 is not JSON: Expecting property name"),
        ("[1]", "rows.jsonl:3 is a list"),
        (
            '{"text": "\\ud83d"}',
            "rows.jsonl:3 is not JSON: 'utf-8' codec can't encode character",
        ),
        ('{"content": 1}', "rows.jsonl:3 has neither text nor messages, but content"),
        ("{}", "rows.jsonl:3 has neither text nor messages, but no value"),
        ('{"text": 1}', "text of rows.jsonl:3 is an int"),
        ('{"messages": "hello"}', "messages of rows.jsonl:3 is a str"),
        (
            '{"messages": [{"role": "user"}]}',
            "messages of rows.jsonl:3 is not a list of dicts with role and content (or tool_calls)",
        ),
        (
            '{"messages": [{"role": "assistant", "content": null}]}',
            "messages of rows.jsonl:3 is not a list of dicts with role and content (or tool_calls)",
        ),
        (
            '{"messages": [{"role": "system", "content": ""}]}',
            "the chat template of bytes, on rows.jsonl:3, raised ValueError: no system messages",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_named(row: str, said: str) -> None:
    Path("rows.jsonl").write_text('{"text": "abc"}\n\n' + row)
    assert said in refusal("rows.jsonl", windows(2, Chat()))


def test_messages_need_a_chat_template() -> None:
    write_rows("rows.jsonl", ROWS)
    assert refusal("rows.jsonl") == (
        "bytes has no chat template, which messages need | give rows with text instead of "
        "messages, or --tokenizer FOLDER of a chat model"
    )


def test_parquet_files_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows("rows.parquet", [{"content": "abc", "id": 1}])
    assert refusal("rows.parquet").startswith(
        "rows.parquet has no column text or messages, but content, id | rename the column"
    )
    Path("rows.parquet").write_text("no Parquet")
    assert "rows.parquet cannot be read as Parquet" in refusal("rows.parquet")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusal("rows.parquet") == (
        "rows.parquet needs the package pyarrow, which is missing | " + pip_line("parquet")
    )
