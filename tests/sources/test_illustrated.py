"""Rows with images go through the processor of the model's folder."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.llamas import llama, saved, text_llava

from quantizer.cli.main import run_command

pillow = pytest.importorskip("PIL.Image", reason="needs quantizer-torch[images]")
transformers = pytest.importorskip("transformers", reason="needs quantizer-torch[llm]")
import torch

TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)
TEXTS = ("<image>It is an orange.", "A <image> is blue, and seen from above")
ROWS = [
    {"text": TEXTS[0], "image": "pictures/a.png"},
    {"text": TEXTS[1], "images": ["pictures/b.png"]},
]
USER = {"role": "user"}
PARTS = [
    {"type": "text", "text": "A "},
    {"type": "text", "text": " is blue, and seen from above"},
]
CHATS = [
    {
        "messages": [
            USER | {"content": [{"type": "image", "path": "pictures/a.png"}]},
            USER | {"content": [{"type": "text", "text": "It is an orange."}]},
        ]
    },
    {
        "messages": [USER | {"content": [PARTS[0], {"type": "image"}, PARTS[1]]}],
        "image": "pictures/b.png",
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with my_llava and two pictures."""
    place = tmp_path_factory.mktemp("illustrated")
    text_llava(place)
    (place / "my_llava" / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    (place / "pictures").mkdir()
    for name, size in (("a", (40, 30)), ("b", (30, 50))):
        pillow.new("RGB", size, "orange").save(place / "pictures" / f"{name}.png")
    (place / "pictures" / "broken.png").write_bytes(b"no image")
    return place


def perplexity(folder: Path, rows: list[Any], capsys: pytest.CaptureFixture[str]) -> float:
    """What float mode prints."""
    assert run_on(folder, rows) == 0
    [printed] = re.findall(r"perplexity (\S+)", capsys.readouterr().out)
    return float(printed)


def run_on(folder: Path, rows: list[Any], *words: str, model: str = "my_llava") -> int:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    names = ["--model", str(folder / model), "--data", str(path)]
    return run_command(["--quant_mode", "float", *names, *words])


@pytest.mark.parametrize("rows", [ROWS, CHATS], ids=["texts", "messages"])
def test_the_perplexity_is_that_of_transformers(
    rows: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processor = transformers.AutoProcessor.from_pretrained(folder / "my_llava")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "my_llava")
    total, count = 0.0, 0
    for text, name in zip(TEXTS, "ab", strict=True):
        picture = pillow.open(folder / "pictures" / f"{name}.png")
        call = processor(text=[text], images=[picture], return_tensors="pt")
        labels = call["input_ids"].masked_fill(call["input_ids"] == 256, -100)
        with torch.no_grad():
            loss = model(**call, labels=labels).loss
        scored = int((labels[:, 1:] != -100).sum())
        total, count = total + float(loss) * scored, count + scored
    printed = perplexity(folder, rows, capsys)
    # The model computes in bfloat16
    assert printed == pytest.approx(math.exp(total / count), rel=1e-3)


def stored(folder: Path, name: str) -> dict[str, Any]:
    """An image as Hugging Face datasets store it."""
    path = f"pictures/{name}.png"
    return {"bytes": (folder / path).read_bytes(), "path": None}


def write_parquet(folder: Path, rows: list[Any]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs quantizer-torch[parquet]")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")


def test_parquet_rows_have_the_images_of_paths(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = perplexity(folder, ROWS, capsys)
    in_rows = [{"text": TEXTS[0], "image": stored(folder, "a")}]
    in_rows.append({"text": TEXTS[1], "image": {"bytes": None, "path": "pictures/b.png"}})
    lists = [{"text": row["text"], "images": [row["image"]]} for row in in_rows]
    parts = [
        USER | {"content": [{"type": "image", "image": stored(folder, "a")}]},
        USER | {"content": [{"type": "text", "text": "It is an orange."}]},
    ]
    names = ["--model", str(folder / "my_llava"), "--data", str(folder / "rows.parquet")]
    for rows in (in_rows, lists, [{"messages": parts}]):
        write_parquet(folder, rows)
        assert run_command(["--quant_mode", "float", *names]) == 0
        [printed] = re.findall(r"perplexity (\S+)", capsys.readouterr().out)
        if len(rows) == 2:
            assert float(printed) == expected


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            {"bytes": b"no image", "path": "a.png"},
            "image a.png of .*rows.parquet, row 1 cannot",
        ),
        ({"bytes": None, "path": None}, "an image of .*rows.parquet, row 1 is not the path"),
        ({"bytes": None, "path": "none.png"}, "none.png cannot be read"),
    ],
)
def test_images_in_rows_that_cannot_be_read_are_named(
    image: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parquet(folder, [{"text": TEXTS[0], "image": image}])
    names = ["--model", str(folder / "my_llava"), "--data", str(folder / "rows.parquet")]
    assert run_command(["--quant_mode", "float", *names]) == 4
    printed = capsys.readouterr().err
    assert re.search(message, printed)
    assert "0x" not in printed


IMAGE = {"type": "image", "image": "pictures/a.png"}
FAULTS = {
    "a row without an image": ([ROWS[0], {"text": "It"}], "rows.jsonl:2 has no image"),
    "a missing file": ([ROWS[0] | {"image": "none.png"}], "none.png cannot be read"),
    "a broken file": ([ROWS[0] | {"image": "pictures/broken.png"}], "as an image"),
    "an address": ([ROWS[0] | {"image": "https://a/b.png"}], "is not the path of a file"),
    "bytes": ([ROWS[0] | {"image": {"bytes": ""}}], "is not the path of a file"),
    "no list": ([ROWS[0] | {"images": "a.png"}], "images of .*rows.jsonl:1 is a str"),
    "two places": (
        [{"messages": [USER | {"content": [IMAGE]}], "image": "pictures/b.png"}],
        "names images itself and in its messages",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_cannot_be_read_is_named(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, message = FAULTS[name]
    assert run_on(folder, rows) == 4
    assert re.search(message, capsys.readouterr().err)


def test_batches_of_rows_and_folders_without_a_processor_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_on(folder, ROWS, "--batch_size", "2") == 2
    assert "each row is a batch" in capsys.readouterr().err
    saved(folder / "words", llama(vocab_size=264, max_position_embeddings=64))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "my_llava" / name, folder / "words" / name)
    assert run_on(folder, ROWS, model="words") == 4
    assert "LlamaForCausalLM takes no pixel_values" in capsys.readouterr().err
    shutil.copytree(folder / "my_llava", folder / "bare")
    (folder / "bare" / "processor_config.json").unlink()
    assert run_on(folder, ROWS, model="bare") == 4
    assert "save the processor of the model there" in capsys.readouterr().err


CODE = """
from pathlib import Path
from transformers import LlavaProcessor

Path(MARK).touch()

class Own(LlavaProcessor):
    pass
"""


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_a_processor_runs_only_where_it_is_trusted(
    trust: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "my_llava"
    shutil.copytree(folder / "my_llava", place)
    shutil.copytree(folder / "pictures", tmp_path / "pictures")
    mark = tmp_path / "ran"
    (place / "own.py").write_text(CODE.replace("MARK", repr(str(mark))), "utf-8")
    settings = {"auto_map": {"AutoProcessor": "own.Own"}, "processor_class": "Own"}
    for name in ("processor_config.json", "tokenizer_config.json"):
        stored = json.loads((place / name).read_text("utf-8"))
        (place / name).write_text(json.dumps(stored | settings), "utf-8")
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    # Whoever is asked whether the code may run says yes
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    words = ["--tokenizer", str(place / "tokenizer.json"), *["--trust"] * trust]
    code = run_on(tmp_path, ROWS, *words)
    assert (code, mark.exists()) == ((0, True) if trust else (4, False))
