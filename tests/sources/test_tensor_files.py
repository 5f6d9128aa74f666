"""Tensor files as data: each format, what is input and what target, cutting anew, and files
that cannot be used.
"""

from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("hypothesis", reason="property tests need hypothesis (extra: dev)")

from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from quantizer.errors import DataError, UsageError
from quantizer.sources.data import load_batches

X = torch.arange(30, dtype=torch.float32).reshape(5, 3, 2)
Y = torch.arange(5)


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def inputs(spec: str, size: int = 100) -> list[Tensor]:
    """The first input of each batch."""
    return [batch.args[0] for batch in load_batches(spec, batch_size=size)]


def refusal(spec: str, **options: Any) -> str:
    """The sentence with which `spec` is refused."""
    with pytest.raises((DataError, UsageError)) as caught:
        list(load_batches(spec, **options))
    return f"{caught.value.message} | {caught.value.help}"


def test_torch_and_safetensors_files() -> None:
    torch.save(X, "a.pt")
    save_file({"images": X, "label": Y}, "b.safetensors")
    save_file({"whatever": X}, "c.safetensors")
    for file in ("a.pt", "b.safetensors", "c.safetensors"):
        assert torch.equal(inputs(file)[0], X)
    (batch,) = load_batches("b.safetensors")
    assert batch.target is not None
    assert torch.equal(batch.target, Y) and torch.equal(batch.raw[1], Y)


def test_several_tensors_without_an_input_name_are_keyword_arguments() -> None:
    save_file({"ids": Y + 1, "mask": X, "y": Y}, "a.safetensors")
    (batch,) = load_batches("a.safetensors")
    assert (batch.args, set(batch.kwargs)) == ((), {"ids", "mask"})


@pytest.mark.parametrize(
    "dtype", ["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1"]
)
def test_numpy_files_are_read_exactly(dtype: str) -> None:
    array = (numpy.arange(24).reshape(2, 3, 4) % 7 - 3 * (dtype[1] in "fi")).astype(dtype)
    for layout in (array, numpy.asfortranarray(array), array[:, :, :0]):
        numpy.save("a.npy", layout)
        if layout.size:
            (x,) = inputs("a.npy")
            assert x.dtype == torch.from_numpy(layout).dtype
            assert x.tolist() == layout.tolist()
        numpy.savez("b.npz", x=layout, y=numpy.arange(2))
        (batch,) = load_batches("b.npz")
        assert batch.args[0].tolist() == layout.tolist()


@pytest.mark.parametrize("size", [1, 2, 4, 7, 15, 99])
def test_the_samples_of_all_files_are_cut_to_the_batch_size(size: int) -> None:
    Path("data").mkdir()
    for name in "cab":
        save_file({"x": X + ord(name), "y": Y + ord(name)}, f"data/{name}.safetensors")
    Path("data/README.md").touch()
    expected = torch.cat([X + ord(name) for name in "abc"])
    for spec in ("data", "data/*.safetensors"):
        batches = inputs(spec, size)
        assert torch.equal(torch.cat(batches), expected)
        assert all(len(batch) == size for batch in batches[:-1])


def npy(header: str, data: bytes = b"", magic: bytes = b"\x93NUMPY\x01\x00") -> bytes:
    text = header.encode()
    return magic + len(text).to_bytes(2, "little") + text + data


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 1)}\n"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.npy", b"", "a.npy cannot be read: it is empty"),
        ("a.npy", b"hello, world", "it is not a NumPy array file"),
        ("a.npy", npy(HEADER, b"1234567"), "it is truncated: 7 bytes of data, 8 expected"),
        ("a.npy", npy(HEADER)[:20], "its NumPy header is damaged"),
        ("a.npy", npy("__import__('os').mkdir('pwned')"), "its NumPy header is damaged"),
        ("a.npy", npy("[1]"), "its NumPy header is damaged"),
        (
            "a.npy",
            npy(HEADER.replace("(2, 1)", "(-2, -1)"), b"12345678"),
            "its NumPy header is damaged",
        ),
        ("a.npy", npy(HEADER.replace("<f4", "|O"), b"x"), "its dtype '|O' has no tensor"),
        ("a.npy", npy(HEADER.replace("<f4", ">f4"), b"x"), "its dtype '>f4' has no tensor"),
        ("a.npz", b"PK\x03\x04 and no more", "it is truncated or not an npz archive"),
        ("a.pt", b"version https://git-lfs.github.com/spec/v1\n", "it is a Git LFS pointer"),
    ],
)
def test_a_file_that_cannot_be_read(name: str, content: bytes, sentence: str) -> None:
    Path(name).write_bytes(content)
    assert sentence in refusal(name)
    assert not Path("pwned").exists()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    position=st.integers(0, 10_000),
    value=st.integers(0, 255),
    suffix=st.sampled_from(["npy", "npz"]),
)
def test_a_flipped_byte_gives_data_or_a_sentence(
    position: int, value: int, suffix: str
) -> None:
    content = bytearray(npy(HEADER, b"12345678"))
    if suffix == "npz":
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("x.npy", bytes(content))
        content = bytearray(archive.getvalue())
    content[position % len(content)] = value
    Path(f"a.{suffix}").write_bytes(content)
    with contextlib.suppress(DataError):
        list(load_batches(f"a.{suffix}"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([X, Y], "a.pt holds a list, not a tensor or a dict of tensors"),
        ({"x": X, "epoch": 3}, "a.pt holds a dict, not a tensor or a dict of tensors"),
        ({"y": Y}, "a.pt holds no input tensor"),
        ({}, "a.pt holds no input tensor"),
        ({"x": X, "y": Y[:3]}, "differ in dimension 0, the samples: x [5, 3, 2], y [3]"),
        (torch.tensor(1.0), "differ in dimension 0"),
        (X[:0], "gives no batch"),
        (io.BytesIO, "could run code"),
    ],
)
def test_content_that_is_no_batch(content: object, sentence: str) -> None:
    torch.save(content, "a.pt")
    assert sentence in refusal("a.pt")


def test_files_that_do_not_go_together() -> None:
    save_file({"x": X}, "a.safetensors")
    save_file({"x": X.half()}, "b.safetensors")
    assert "b.safetensors does not go with the files before it" in refusal("*.safetensors")


def test_places_that_hold_no_data() -> None:
    Path("empty").mkdir()
    Path("notes.md").write_text("hello")
    assert "there is no file or folder missing" in refusal("missing")
    assert "*.npy gives no tensor file, no text and no image" in refusal("*.npy")
    assert "notes.md gives no tensor file, no text and no image" in refusal("notes.md")
    assert "empty holds no tensor file, no text and no image" in refusal("empty")
    Path("mixed").mkdir()
    for name in ("a.npy", "b.png"):
        (Path("mixed") / name).touch()
    assert "mixed holds tensor files and images" in refusal("mixed")
    torch.save(X, "a.pt")
    assert "--preprocess is for images" in refusal("a.pt", options={"preprocess": "{}"})
