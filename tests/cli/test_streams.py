"""Standard streams that are closed, full or read by nobody, and places that are no files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.runs import ROOT, calibrate, check

from quantizer.cli.main import run_command
from quantizer.cli.terminal.process import Outlet
from quantizer.results.result_set import mark_result_folder
from quantizer.storage import system_calls

LISTING = f"{sys.executable} -m quantizer init --list"
REFUSED = f"{sys.executable} -m quantizer nonsense"
INVALID = ROOT / "tests/cases/configs/invalid/documented_issue_half_up_as_method.json"
FOUND = f"{sys.executable} -m quantizer validate --format json {INVALID}"
FULL = "standard output cannot be written: No space left on device"
STREAMS = {
    "full": (f"{LISTING} > /dev/full", 5, FULL),
    "full, and an invalid config": (f"{FOUND} > /dev/full", 1, FULL),
    "no room for errors": (f"{REFUSED} 2> /dev/full", 2, ""),
    "closed": (f"{LISTING} >&-", 0, ""),
    "all closed": (f"{LISTING} >&- 2>&- <&-", 0, ""),
    "errors closed": (f"{REFUSED} 2>&-", 2, ""),
    "nobody reads": (f"{LISTING} | true; exit ${{PIPESTATUS[0]}}", 0, ""),
    "unbuffered": (f"PYTHONUNBUFFERED=1 {LISTING} > /dev/full", 5, FULL),
}
Capture = pytest.CaptureFixture[str]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", STREAMS)
def test_streams_that_cannot_be_written_end_no_run(name: str) -> None:
    line, code, said = STREAMS[name]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_pipe_that_does_not_block_gets_all() -> None:
    """As node gives its children; it holds 64 kB."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with ThreadPoolExecutor(1) as reading, os.fdopen(reader, "rb") as stream:
        content = reading.submit(stream.read)
        with Outlet(writer, "w") as outlet:
            assert outlet.write(b"x" * 1_000_000) == 1_000_000
        assert len(content.result()) == 1_000_000


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


PLACES = {
    "--config_file": ("net.json", 2),
    "--weights": ("net.pth", 3),
    "--model": ("net.py", 3),
    "--data": ("x.npy", 4),
    "--preprocess": ("how.json", 2),
    "--tokenizer": ("tokenizer.json", 4),
    "--evaluate": ("metrics.py", 4),
}


@pytest.mark.parametrize("make", [pipe, folder, link_to_itself])
@pytest.mark.parametrize("option", PLACES)
def test_what_is_no_file_is_told_with_the_code_of_the_option(
    option: str,
    make: Callable[[Path], None],
    toy: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(system_calls, "PIPE_TIMEOUT_S", 0.01)
    name, code = PLACES[option]
    make(tmp_path / name)
    (tmp_path / "text.txt").write_text("a b c")
    more = {
        "--tokenizer": ["--data", str(tmp_path / "text.txt")],
        "--preprocess": ["--data", str(tmp_path / "images")],
    }.get(option, [])
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"")
    model = [] if option == "--model" else ["--model", toy()]
    assert (
        run_command(["--quant_mode", "float", *model, *more, option, str(tmp_path / name)])
        == code
    )
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize("make", [pipe, folder])
@pytest.mark.parametrize("name", ["plan.json", "export"])
def test_a_result_folder_with_something_else_in_place_of_a_file(
    name: str,
    make: Callable[[Path], None],
    toy: Callable[..., str],
    tmp_path: Path,
    capsys: Capture,
) -> None:
    """It is told before anything is calibrated or tested."""
    out = tmp_path / "out"
    mark_result_folder(out)
    make(out / name)
    if name == "export":
        assert calibrate(out, model=toy(), config=None) == 0
        capsys.readouterr()
        code = check(out, "--deploy", "safetensors", model=toy())
        assert code == (0 if make is folder else 2)
    else:
        assert calibrate(out, model=toy(), config=None) == 2
    shown = capsys.readouterr()
    assert "internal error" not in shown.err
    if name != "export" or make is pipe:
        assert f"{name} is not a fil" in shown.err or f"{name} is not a folder" in shown.err
        assert not shown.out, "nothing has been calibrated or tested"


def test_a_name_that_is_too_long(toy: Callable[..., str], capsys: Capture) -> None:
    assert (
        run_command(["--quant_mode", "float", "--model", toy(), "--data", "a" * 300 + ".npy"])
        == 4
    )
    assert "cannot be used: File name too long" in capsys.readouterr().err


def test_a_lock_on_a_disk_without_a_byte(
    toy: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The lock holds without its text; what cannot be written after that is told."""
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if content.startswith(b"process "):
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    assert calibrate(tmp_path / "out", model=toy(), config=None) == 0


ESCAPES = "\x1b[2J\n::error::forged\r\u202e##[error]x"
COMMAND = "::error::forged"


@pytest.mark.parametrize("name", [ESCAPES, COMMAND])
def test_names_steer_no_terminal_and_no_log(
    name: str,
    toy: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    """In a metric's name, a key of weights, an exception's text and a config."""
    import torch

    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    toy(model="return torch.nn.Linear(3, 2)")
    path = tmp_path / "toy.py"
    path.write_text(
        path.read_text() + f"\ndef evaluate(model, data):\n    return {{{name!r}: 1.0}}\n"
    )
    assert run_command(["--quant_mode", "float", "--model", str(path)]) == 0
    assert run_command(["--quant_mode", "float", "--model", str(path), "--json"]) == 0
    torch.save({name: torch.ones(2)}, tmp_path / "w.pth")
    assert (
        run_command(["inspect", "--model", str(path), "--weights", str(tmp_path / "w.pth")])
        == 3
    )
    assert run_command(["inspect", "--model", toy(model=f"raise ValueError({name!r})")]) == 3
    (tmp_path / "net.json").write_text(
        "{" + f'"{name.encode("unicode_escape").decode()}": 1' + "}"
    )
    for form in ("text", "github", "json", "sarif"):
        assert run_command(["validate", "--format", form, str(tmp_path / "net.json")]) != 0
    shown = capsys.readouterr()
    for line in (*shown.out.split("\n"), *shown.err.split("\n")):
        assert line.isprintable(), repr(line)
        assert "##[" not in line
        assert not line.startswith("::error::")
