"""Files for --gguf_template that are damaged, hostile or no files: each is refused with a
sentence, and soon.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from support.gguf_templates import template
from support.llamas import llama

from quantizer.errors import UsageError
from quantizer.export.gguf.template import outline_of_template

HUGE = 1 << 62


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture(scope="module")
def content(model: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return template(tmp_path_factory.mktemp("template") / "base.gguf", model).read_bytes()


def outline(path: Path, model: Any) -> Any:
    state: dict[str, Tensor] = dict(model.state_dict())
    return outline_of_template(path, state, {name: name for name in state})


def put(content: bytes, at: int, form: str, value: int) -> bytes:
    """The file with a number in it changed."""
    number = struct.pack(f"<{form}", value)
    return content[:at] + number + content[at + len(number) :]


def behind(content: bytes, name: bytes) -> int:
    """Where the type of a key's value is."""
    return content.index(name) + len(name)


def in_key(name: bytes, form: str, value: int, further: int = 4) -> Callable[[bytes], bytes]:
    """Changes what stands behind a key: `further` bytes on is its value, or the type of a
    list's elements.
    """
    return lambda content: put(content, behind(content, name) + further, form, value)


def renamed(name: bytes, other: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(name, other, 1)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "nothing in it": (lambda content: b"", "it is empty"),
    "another format": (lambda content: b"PK" + content[2:], "does not begin with GGUF"),
    "cut off": (lambda content: content[:5000], "truncated|beyond the end"),
    "tensors beyond counting": (
        lambda content: put(content, 8, "Q", HUGE),
        "truncated|cannot be read",
    ),
    "keys beyond counting": (
        lambda content: put(content, 16, "Q", HUGE),
        "truncated|cannot be read",
    ),
    "a name that never ends": (
        lambda content: put(content, 24, "Q", HUGE),
        "a length in it is wrong",
    ),
    "no architecture": (
        renamed(b"general.architecture", b"general.architectura"),
        "names no architecture",
    ),
    "an architecture that is a number": (
        lambda content: renamed(b"general.architecture", b"general.architectura")(
            renamed(b"llama.context_length", b"general.architecture")(content)
        ),
        "names no architecture",
    ),
    "another architecture": (
        renamed(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llame"),
        "llame",
    ),
    "no blocks": (
        renamed(b"llama.block_count", b"llama.block_cound"),
        "block_count is nothing",
    ),
    "blocks beyond counting": (
        in_key(b"llama.block_count", "I", 4_000_000_000),
        "block_count is 4000000000",
    ),
    "blocks that are no number": (
        in_key(b"llama.block_count", "I", 6, further=0),
        "block_count is",
    ),
    "a list beyond counting": (
        in_key(b"custom.list", "Q", 1 << 40, further=8),
        "elements, more than",
    ),
    "a list as long as the limit": (
        in_key(b"custom.list", "Q", 3_000_000, further=8),
        "truncated",
    ),
    "a list of lists": (in_key(b"custom.list", "I", 9), "a list of lists"),
    "an unknown type": (in_key(b"custom.list", "I", 77, further=0), "77"),
    "a text that is none": (renamed(b"tiny", b"\xff\xfe\xff\xfe"), "cannot be read as GGUF"),
    "dimensions beyond counting": (
        lambda content: put(content, content.index(b"token_embd.weight") + 17, "I", 1 << 30),
        "dimensions, more than 4",
    ),
    "sizes beyond counting": (
        lambda content: put(content, content.index(b"token_embd.weight") + 21, "Q", HUGE),
        "goes beyond the end",
    ),
    "values beyond the file": (
        lambda content: put(content, content.index(b"token_embd.weight") + 41, "Q", HUGE),
        "goes beyond the end",
    ),
    "no heads": (
        in_key(b"llama.attention.head_count\x04", "I", 0, further=3),
        "is not the model's",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_template_is_refused(
    name: str, model: Any, content: bytes, tmp_path: Path
) -> None:
    damage, why = DAMAGES[name]
    changed = damage(content)
    assert changed != content
    (tmp_path / "base.gguf").write_bytes(changed)
    with pytest.raises(UsageError, match=why) as refused:
        outline(tmp_path / "base.gguf", model)
    assert refused.value.help


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing"])
def test_what_is_no_file_is_refused(kind: str, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "base.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(UsageError, match="cannot be read as GGUF: "):
        outline(path, model)


def test_no_changed_byte_is_more_than_a_sentence(
    model: Any, content: bytes, tmp_path: Path
) -> None:
    """In the header, which has all counts and lengths."""
    draw = random.Random(0)
    end = content.index(b"rope_freqs.weight") + 64
    read = 0
    for _ in range(120):
        changed = bytearray(content)
        changed[draw.randrange(end)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
        (tmp_path / "base.gguf").write_bytes(changed)
        try:
            outline(tmp_path / "base.gguf", model)
            read += 1
        except UsageError:
            pass
    assert read, "most bytes are letters of the vocabulary"


def test_values_that_are_not_finite_are_not_the_models(model: Any, tmp_path: Path) -> None:
    other = llama()
    with torch.no_grad():
        other.lm_head.weight.fill_(float("nan"))
    path = template(tmp_path / "base.gguf", other, "F32")
    with pytest.raises(UsageError, match=r"lm_head\.weight is not the model's"):
        outline(path, model)
