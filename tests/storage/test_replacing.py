"""A file is replaced completely or not at all, has the permissions that are expected of it, and is
quantizer's own or allowed to be replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantizer.errors import ResultError, UsageError
from quantizer.results.result_set import locked
from quantizer.storage import owned_folder
from quantizer.storage.folder_list import LIST_FILE
from quantizer.storage.permission import replacing
from quantizer.storage.replacing import (
    remove_file,
    replace_file,
    replaced_files,
    replaced_folder,
    require_replaceable_folder,
)


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files but the list, by their paths in the folder."""
    files: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != LIST_FILE:
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


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
@pytest.mark.parametrize("is_owned", [False, True])
def test_a_replaced_file_keeps_its_permissions_and_is_private_before(
    is_owned: bool, tmp_path: Path
) -> None:
    path = tmp_path / "place" / "secret.json"
    path.parent.mkdir()
    if is_owned:
        with locked(path.parent):
            replace_file(path, b"old")
    else:
        path.write_bytes(b"old")
    path.chmod(0o604)
    while_written: list[int] = []

    def parts() -> Iterator[bytes]:
        for file in path.parent.rglob("*"):
            if file.is_file() and file.name not in (path.name, "lock", LIST_FILE):
                while_written.append(permissions(file))
        yield b"new"

    with replacing(overwrite=True):
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

    with replacing(overwrite=True), pytest.raises(OSError, match=r"no space left"):
        replace_file(path, parts())
    assert contents(tmp_path) == {"result.json": b"old"}


def test_a_file_of_the_user_is_replaced_if_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"net\.json exists already"):
        replace_file(path, b"new")
    with (
        replacing(overwrite=True, inputs=[path]),
        pytest.raises(UsageError, match=r"net\.json is an input of this run"),
    ):
        replace_file(path, b"new")
    os.link(path, tmp_path / "twin.json")
    with (
        replacing(overwrite=True, inputs=[path]),
        pytest.raises(UsageError, match=r"twin\.json is an input of this run"),
    ):
        replace_file(tmp_path / "twin.json", b"new")
    with (
        replacing(overwrite=True, inputs=[tmp_path]),
        pytest.raises(UsageError, match=r"net\.json belongs to"),
    ):
        replace_file(path, b"new")
    assert path.read_bytes() == b"mine"
    with replacing(overwrite=True):
        replace_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_only_listed_and_unchanged_files_of_a_folder_are_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with locked(folder):
        replace_file(folder / "ours.json", b"1")
        replace_file(folder / "changed.json", b"1")
    (folder / "changed.json").write_bytes(b"edited")
    (folder / "theirs.json").write_bytes(b"mine")
    replace_file(folder / "ours.json", b"2")
    with pytest.raises(UsageError, match=r"holds files that were changed: changed\.json"):
        replace_file(folder / "changed.json", b"2")
    with pytest.raises(UsageError, match=r"quantizer has not written: theirs\.json"):
        replace_file(folder / "theirs.json", b"2")
    for name in ("ours.json", "changed.json", "theirs.json"):
        remove_file(folder / name)
    assert contents(folder) == {"changed.json": b"edited", "theirs.json": b"mine"}
    with replacing(overwrite=True):
        replace_file(folder / "changed.json", b"3")
    assert (folder / "changed.json").read_bytes() == b"3"


@pytest.mark.parametrize("name", ["thesis.tex", ".tmp", ".quantizer-new", "checkpoint.pth"])
def test_a_folder_with_other_files_is_never_quantizers(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError) as raised, locked(tmp_path):
        pass
    assert f"holds {name} and is not a folder of quantizer's" in raised.value.message
    assert raised.value.help == "give an empty folder, or one that does not exist"
    assert contents(tmp_path) == {name: b""}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "{",
        "[" * 100_000,
        '{"format": 1, "token": "../a", "files": {}}',
        '{"format": 1, "token": "TOKEN", "files": {"../a": ["DIGEST"]}}',
        '{"format": 1, "token": "TOKEN", "files": {"a\\u0000": ["DIGEST"]}}',
        '{"format": 1, "token": "TOKEN", "files": {"a": ["short"]}}',
        '{"format": 1, "token": "TOKEN", "files": {}, "moves": {"files": ["a"], "gone": []}}',
        '{"format": 1, "token": "TOKEN", "files": {}, "moves": {"files": [], "gone": []}}',
        '{"format": 2, "token": "TOKEN", "files": {}}',
    ],
)
def test_a_damaged_list_is_refused(text: str, tmp_path: Path) -> None:
    content = text.replace("TOKEN", "0" * 32).replace("DIGEST", "0" * 64)
    (tmp_path / LIST_FILE).write_text(content)
    with (
        pytest.raises(ResultError, match=r"it is not a list of quantizer's files"),
        locked(tmp_path),
    ):
        pass
    assert (tmp_path / LIST_FILE).read_text() == content


def write_pair(folder: Path, content: bytes) -> None:
    with (
        replacing(overwrite=True),
        replaced_files(folder / "net.xml", [folder / "net.bin"]) as new,
    ):
        new.write_bytes(content)
        new.with_suffix(".bin").write_bytes(content)


def write_folder(folder: Path, content: bytes) -> None:
    with replaced_folder(folder / "checkpoint") as new:
        for name in ("config.json", "model.safetensors"):
            (new / name).write_bytes(content)
        (new / "inner").mkdir()
        (new / "inner" / "more.json").write_bytes(content)


def test_a_file_that_is_put_into_an_export_meanwhile_stays(tmp_path: Path) -> None:
    write_folder(tmp_path, b"old")
    notes = tmp_path / "checkpoint" / "notes.txt"
    with (
        pytest.raises(UsageError, match=r"notes\.txt is not a file that quantizer has written"),
        replaced_folder(tmp_path / "checkpoint") as new,
    ):
        (new / "config.json").write_bytes(b"new")
        notes.write_bytes(b"mine")
    assert notes.read_bytes() == b"mine"
    assert (tmp_path / "checkpoint" / "config.json").read_bytes() == b"old"


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    """The list of a folder may name a file elsewhere with its sha256."""
    folder = tmp_path / "out"
    with locked(folder):
        replace_file(folder / "export" / "verify.json", b"{}")
    (folder / "export").rename(tmp_path / "elsewhere")
    (folder / "export").symlink_to(tmp_path / "elsewhere")
    with locked(folder) as place, pytest.raises(UsageError, match="export is a link"):
        place.remove("export/verify.json")
    assert (tmp_path / "elsewhere" / "verify.json").read_bytes() == b"{}"


class KilledError(BaseException):
    """Ends a write as a kill does: nothing that follows it has an effect."""


def killed_at(stop_at: int, monkeypatch: pytest.MonkeyPatch, write: Callable[[], None]) -> bool:
    """Write, and change nothing more on the disk from the operation of this number on.

    Returns:
        Whether it came that far.
    """
    numbers = itertools.count()

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*words: Any, **more: Any) -> Any:
            if next(numbers) >= stop_at:
                raise KilledError
            return original(*words, **more)

        return operation

    with monkeypatch.context() as patched:
        for name in ("replace", "rename", "unlink", "fsync", "mkdir", "rmdir"):
            patched.setattr(os, name, counted(getattr(os, name)))
        patched.setattr(owned_folder, "exchange", counted(owned_folder.exchange))
        patched.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            write()
        except KilledError:
            return True
    return False


@pytest.mark.parametrize("is_owned", [False, True])
@pytest.mark.parametrize(
    ("write", "main"), [(write_pair, "net.xml"), (write_folder, "checkpoint/config.json")]
)
@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_set_of_files_is_old_or_new_whenever_its_writer_is_stopped(
    write: Callable[[Path, bytes], None],
    main: str,
    is_owned: bool,
    can_exchange: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not can_exchange:
        monkeypatch.setattr(owned_folder, "exchange", lambda first, second: False)
    seen: set[bytes] = set()
    for stop_at in itertools.count():
        folder = tmp_path / str(stop_at)
        folder.mkdir()
        if is_owned:
            with locked(folder):
                replace_file(folder / "report.json", b"{}")
        write(folder, b"old")
        before = contents(folder)
        (folder / "notes.txt").write_bytes(b"mine")
        was_killed = killed_at(stop_at, monkeypatch, lambda: write(folder, b"new"))  # noqa: B023
        # What a consumer sees that knows nothing of lists: no mixture
        visible = {
            name: (folder / name).read_bytes() for name in before if (folder / name).exists()
        }
        if main in visible:
            texts = {visible[name] for name in visible if name != "report.json"}
            if can_exchange or write is write_pair:
                assert len(texts) == 1, stop_at
            seen |= texts
        # The only copy of the old files is never lost: the next call ends with one or the other
        copies = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
        assert b"old" in copies or b"new" in copies
        write(folder, b"last")
        after = contents(folder)
        assert after.pop("notes.txt") == b"mine"
        assert set(after) == set(before)
        assert {after[name] for name in after if name != "report.json"} == {b"last"}
        hidden = [path.name for path in folder.rglob(".*") if path.name != LIST_FILE]
        assert not hidden, stop_at
        if not was_killed:
            break
    assert stop_at > 10
    assert seen == {b"old", b"new"}


def test_no_folder_replaces_results_of_a_version_without_lists(tmp_path: Path) -> None:
    info = b"{}"
    index = {"files": {"quant_info.json": hashlib.sha256(info).hexdigest()}}
    (tmp_path / "quant_info.json").write_bytes(info)
    (tmp_path / "checksums.json").write_text(json.dumps(index))
    for check in (require_replaceable_folder, replaced_folder):
        with (
            pytest.raises(UsageError, match=r"holds results of a version before 0\.20"),
            check(tmp_path) or contextlib.nullcontext(),
        ):
            pass
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"quant_info.json", "checksums.json"}
