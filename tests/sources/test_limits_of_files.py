"""Files that would take any time or memory, or end the process, are refused within a budget."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantizer.errors import DataError
from quantizer.sources.texts.documents import read_documents
from quantizer.sources.texts.tokenizer import load_tokenizer
from quantizer.storage import child_process
from quantizer.storage.child_process import run_apart
from quantizer.storage.process_memory import peak_bytes

MB = 10**6


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "SECONDS", 2)
    monkeypatch.setattr(child_process, "MEMORY", 300 * MB)


def forever() -> None:
    while True:
        pass


def aborts() -> None:
    os.kill(os.getpid(), signal.SIGABRT)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (forever, "the work takes more than 1 s"),
        (lambda: 9**9**9, "the work takes more than 1 s"),
        (lambda: len(bytes(10**9)), "the work needs more than 100 MB of memory"),
        (lambda: "x" * 26 * MB, "the work needs more than 100 MB of memory"),
        (aborts, "the work ended its process with SIGABRT"),
        (lambda: {}["key"], "the work raised KeyError: 'key'"),
        (lambda: os._exit(0), "the work needs more than 100 MB of memory"),
    ],
)
def test_work_has_limits(
    work: Callable[[], Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "MEMORY", 100 * MB)
    if "takes more than 1 s" in said:
        monkeypatch.setattr(child_process, "SECONDS", 1)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text()
    with pytest.raises(DataError, match=said):
        run_apart(work, "the work", DataError, size=0)
    assert children.read_text() == before


def test_results_and_errors_are_passed_on() -> None:
    value = {"ids": [*range(MB)], "text": "\ud800é"}
    assert run_apart(lambda: value, "the work", DataError, size=0) == value

    def refuse() -> None:
        raise DataError("row 3 is empty", help="remove it")

    with pytest.raises(DataError, match="row 3 is empty") as caught:
        run_apart(refuse, "the work", DataError, size=0)
    assert caught.value.help == "remove it"


def tokenizer(folder: Path, **parts: Any) -> Path:
    """A tokenizer.json with a few letters and these parts, such as a normalizer."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs quantizer[llm]")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    content = json.loads(words.to_str()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return folder / "tokenizer.json"


def sequence(kind: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BACKTRACKING = {"Regex": "(?:(?:a*)*)*(?:a?){40}c"}
ISOLATED = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence("normalizers", [DOUBLED] * 60)},
        {"normalizer": {"type": "Replace", "pattern": BACKTRACKING, "content": ""}},
        {"pre_tokenizer": {**ISOLATED, "pattern": BACKTRACKING}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/////w=="}},
        {"normalizer": {"type": "Prepend", "prepend": "a" * MB}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}},
    ],
    ids=["doubling", "replacing", "splitting", "charsmap", "prepending", "pieces"],
)
def test_a_tokenizer_ends(parts: dict[str, Any], tmp_path: Path) -> None:
    start = time.monotonic()
    before = peak_bytes() or 0
    try:
        ids = load_tokenizer(tokenizer(tmp_path, **parts)).encode("a" * 60)
    except DataError as error:
        assert "tokenizer" in error.message
    else:
        assert ids
    assert time.monotonic() - start < 30
    assert (peak_bytes() or 0) - before < 500 * MB


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than",
        ),
        ("{{ 9 ** (9 ** 9) }}", "takes more than"),
        ("{{ ('a' * 10 ** 9) | length }}", "needs more than"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "raised"),
    ],
)
def test_a_chat_template_ends(template: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs quantizer[llm]")
    from quantizer.sources.texts.documents import Document

    path = tokenizer(tmp_path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    chat = Document("row 1", [{"role": "user", "content": "a"}])
    with pytest.raises(DataError, match=rf"the chat template of .*{said}"):
        load_tokenizer(path).chat_texts([chat])


def test_a_small_file_of_rows_cannot_ask_for_any_memory(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs quantizer-torch[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    values = arrow.DictionaryArray.from_arrays([0] * 4000, ["a" * MB])
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"text": values}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    before = peak_bytes() or 0
    with pytest.raises(DataError, match=r"reading .*rows.parquet needs more than 30. MB"):
        [*read_documents(path)]
    assert (peak_bytes() or 0) - before < 300 * MB


def test_rows_have_all_their_values(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs quantizer-torch[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    content = bytes(range(256))
    rows = [{"text": "é\u2028", "image": {"bytes": content, "path": "a.png"}}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    [document] = read_documents(tmp_path / "rows.parquet")
    assert document.content == "é\u2028"
    assert document.images[0].content == content  # type: ignore[union-attr]


def test_a_header_of_any_length_is_not_read(tmp_path: Path) -> None:
    from quantizer.sources.tensor_files import read_deferred

    path = tmp_path / "weights.safetensors"
    with path.open("wb") as file:
        file.write((6 * 10**9).to_bytes(8, "little"))
        # A file with a hole takes no space
        file.truncate(7 * 10**9)
    before = peak_bytes() or 0
    with pytest.raises(DataError, match="its header is longer than 100000000 bytes"):
        read_deferred(path, DataError)
    assert (peak_bytes() or 0) - before < 100 * MB
