"""Small files that ask for much: refused before it is taken, unless it is allowed."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from quantizer.cli.main import run_command
from quantizer.errors import DataError, ModelError
from quantizer.sources import tensor_files
from quantizer.sources.data import load_batches
from quantizer.sources.tensor_files import load_weights

MB = 10**6
ZEROS = torch.zeros(MB, 3)


def npy(tensor: Tensor, shape: str = "") -> bytes:
    """An array of float32, perhaps of another shape than it says."""
    header = repr(
        {"descr": "<f4", "fortran_order": False, "shape": tuple(tensor.shape)}
    ).encode()
    header = (
        header.replace(str(tuple(tensor.shape)).encode(), shape.encode()) if shape else header
    )
    return (
        b"\x93NUMPY\x01\x00"
        + struct.pack("<H", len(header))
        + header
        + tensor.numpy().tobytes()
    )


def archived(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def deflated(path: Path, content: Any) -> None:
    """What torch saves, in an archive that is packed, which torch reads as well."""
    held = io.BytesIO()
    torch.save(content, held)
    with zipfile.ZipFile(held) as archive:
        archived(path, {name: archive.read(name) for name in archive.namelist()})


BOMBS: dict[str, Callable[[Path], None]] = {
    "x.npz": lambda path: archived(path, {"x.npy": npy(ZEROS)}),
    "x.pth": lambda path: deflated(path, {"x": ZEROS}),
    "x.pt": lambda path: torch.save({"x": torch.zeros(1).expand(MB, 3)}, path),
}


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        list(load_batches(source, **options))
    return f"{caught.value.message} | {caught.value.help}"


@pytest.mark.parametrize("name", BOMBS)
def test_what_unpacks_to_more_than_is_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    BOMBS[name](path)
    assert path.stat().st_size < MB / 10
    said = refusal(str(path), defaults={"max_unpacked": 2 * MB})
    size = path.stat().st_size / 1000
    assert (
        f"{name} cannot be read: it has {size:.0f} kB and would unpack to 12 MB, more than 2 MB"
    ) in said
    assert "--max_unpacked allows more" in said
    assert (
        sum(
            batch.size
            for batch in load_batches(
                str(path), batch_size=MB, defaults={"max_unpacked": 13 * MB}
            )
        )
        == MB
    )
    assert next(iter(load_batches(str(path)))).size == 32
    monkeypatch.setattr(tensor_files, "DEFAULT_MAX_UNPACKED", MB)
    assert "more than 1 MB" in refusal(str(path))


def test_nothing_is_unpacked_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archived(tmp_path / "x.npz", {"x.npy": npy(ZEROS)})
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("unpacked"))
    refusal(str(tmp_path / "x.npz"), defaults={"max_unpacked": MB})


def test_files_that_are_as_large_themselves_are_read(tmp_path: Path) -> None:
    archived(tmp_path / "x.npz", {"x.npy": npy(ZEROS)}, zipfile.ZIP_STORED)
    torch.save({"x": ZEROS}, tmp_path / "x.pt")
    for path in tmp_path.iterdir():
        assert next(iter(load_batches(str(path), defaults={"max_unpacked": MB}))).size == 32


@pytest.mark.parametrize("inside", [False, True])
def test_a_long_header_is_not_parsed(inside: bool, tmp_path: Path) -> None:
    content = b"\x93NUMPY\x02\x00" + struct.pack("<I", MB) + b"[" * MB
    if inside:
        archived(tmp_path / "x.npz", {"x.npy": content})
    else:
        (tmp_path / "x.npy").write_bytes(content)
    assert "its NumPy header is damaged, or longer than 10000 bytes" in refusal(str(tmp_path))


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.pt", "x.safetensors"])
def test_any_number_of_samples_without_values(name: str, tmp_path: Path) -> None:
    path, none = tmp_path / name, torch.empty(2**40, 0)
    if name == "x.npy":
        path.write_bytes(npy(torch.empty(0), f"({2**40}, 0)"))
    elif name == "x.npz":
        archived(path, {"x.npy": npy(torch.empty(0), f"({2**40}, 0)")})
    elif name == "x.pt":
        torch.save(none, path)
    else:
        save_file({"x": none}, path)
    assert f"{name} holds no values of x: its shape is [1099511627776, 0]" in refusal(str(path))


def test_weights_have_the_same_limit(tmp_path: Path) -> None:
    model = nn.Linear(1000, 3000, bias=False)
    deflated(tmp_path / "w.pth", {"weight": torch.zeros(3000, 1000)})
    with pytest.raises(ModelError, match="would unpack to 12 MB, more than 2 MB"):
        load_weights(model, str(tmp_path / "w.pth"), 2 * MB)
    load_weights(model, str(tmp_path / "w.pth"))
    assert not model.weight.any()


def test_the_option_of_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archived(tmp_path / "x.npz", {"x.npy": npy(ZEROS)})
    deflated(tmp_path / "w.pth", {"weight": torch.zeros(3000, 1000)})
    (tmp_path / "net.py").write_text(
        "import torch\ndef model(): return torch.nn.Linear(1000, 3000, bias=False)\n"
    )
    given = [
        "--model",
        str(tmp_path / "net.py"),
        "--data",
        str(tmp_path / "x.npz"),
        "--max_unpacked",
        "2MB",
    ]
    assert run_command(["plan", *given]) == 4
    assert (
        "x.npz cannot be read: it has 12 kB and would unpack to 12 MB, more than 2 MB"
        in capsys.readouterr().err
    )
    assert run_command(["plan", *given, "--weights", str(tmp_path / "w.pth")]) == 3
    assert (
        "w.pth cannot be read: it has 13 kB and would unpack to 12 MB"
        in capsys.readouterr().err
    )
