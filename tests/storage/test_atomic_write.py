"""A file is replaced completely or not at all, and has the permissions that are expected of it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantizer.storage.atomic_write import TEMPORARY_NAME, remove_left_over, replace_file


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def strict_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("strict_umask")
def test_a_new_file_has_the_permissions_of_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The umask is not set to read it: files of other threads would be open to all meanwhile."""

    def refuse(mask: int) -> int:
        raise AssertionError(f"the umask of the process becomes {mask:o}")

    with monkeypatch.context() as patched:
        patched.setattr(os, "umask", refuse)
        replace_file(tmp_path / "new.json", b"{}")
    assert permissions(tmp_path / "new.json") == 0o640


@pytest.mark.usefixtures("strict_umask")
def test_a_replaced_file_keeps_its_permissions_and_is_private_before(tmp_path: Path) -> None:
    path = tmp_path / "secret.json"
    path.write_bytes(b"old")
    path.chmod(0o604)
    while_written: list[int] = []

    def parts() -> Iterator[bytes]:
        (temporary,) = (other for other in tmp_path.iterdir() if other != path)
        assert TEMPORARY_NAME.fullmatch(temporary.name)
        while_written.append(permissions(temporary))
        yield b"new"

    replace_file(path, parts())
    assert path.read_bytes() == b"new"
    assert permissions(path) == 0o604
    assert while_written == [0o600]


def test_an_error_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(b"old")

    def parts() -> Iterator[bytes]:
        yield b"half"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        replace_file(path, parts())
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [
        ("result.json", b"old")
    ]


def test_temporary_files_of_killed_runs_are_removed(tmp_path: Path) -> None:
    """A file that a kill leaves has a name that `remove_left_over` knows."""
    left: list[Path] = []

    def parts() -> Iterator[bytes]:
        left.extend(tmp_path.iterdir())
        yield b"half"

    replace_file(tmp_path / "result.json", parts())
    (temporary,) = left
    temporary.write_bytes(b"half")
    (tmp_path / ".notes.swp").write_bytes(b"mine")
    remove_left_over(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".notes.swp", "result.json"]
