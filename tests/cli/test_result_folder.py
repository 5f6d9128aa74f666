"""A result folder is written as a whole, and nothing beside what we write is touched: no links,
no foreign files.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extended import extended_except
from support.runs import calibrate, check

import quantizer
from quantizer import Config, ModelQuantizer
from quantizer.cli.main import run_command
from quantizer.errors import ResultError, UsageError
from quantizer.results.folder import read_info
from quantizer.results.result_set import locked
from quantizer.results.write import write_info
from quantizer.storage import system_calls
from quantizer.storage.folder_list import LIST_FILE, FolderList, Moves, parse_list
from quantizer.storage.replacing import replace_file

Toy = Callable[..., str]


@pytest.fixture(scope="module")
def calibrated_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a calibration of the model that `toy` writes."""
    place = tmp_path_factory.mktemp("toy")
    functions = "def model():\n    torch.manual_seed(0)\n    return torch.nn.Linear(3, 2)\n"
    functions += "def calibration_data():\n    return [torch.ones(4, 3)] * 4\n"
    (place / "toy.py").write_text(f"import torch\n{functions}")
    assert calibrate(place / "out", model=str(place / "toy.py"), config=None) == 0
    return place / "out"


@pytest.fixture
def folder(calibrated_toy: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return Path(shutil.copytree(calibrated_toy, tmp_path / "out"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in ("run.json", "run.log", ".quantizer.json")
    }


def filling_disks(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """For n from 0 on: the disk is full when the n-th file is written, until no run writes as
    many.
    """
    for full_at in itertools.count():
        written = itertools.count()
        hit = []

        def fsync(
            descriptor: int,
            full_at: int = full_at,
            written: Iterator[int] = written,
            hit: Any = hit,
        ) -> None:
            if next(written) == full_at:
                hit.append(True)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(system_calls.os, "fsync", fsync)
            yield full_at
        if not hit:
            return


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_results(
    folder: Path, toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, other = contents(folder), toy("return [torch.randn(4, 3)] * 2")
    identity = read_info(folder).identity
    refused = 0
    for _ in filling_disks(monkeypatch):
        code = calibrate(folder, model=other, config=None)
        if read_info(folder).identity != identity:
            break  # from here on the new results are decided
        assert code == 5
        assert re.search(
            r"No space left on device, [\d.]+ [MG]B are free", capsys.readouterr().err
        )
        assert contents(folder) == old
        refused += 1
    assert refused > 5


def test_a_full_disk_leaves_the_model_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = {"dtype": "int8", "qscheme": "per_tensor"}
    quantizer = ModelQuantizer(Config.from_dict({"global_quant_config": {"weight": weight}}))
    one, other = (
        quantizer.quantize_model(torch.nn.Sequential(torch.nn.Linear(3, n))) for n in (2, 5)
    )
    ModelQuantizer.save(one, tmp_path / "saved")
    ModelQuantizer.save(other, tmp_path / "other")
    old, new = contents(tmp_path / "saved"), contents(tmp_path / "other")
    refused = 0
    for _ in filling_disks(monkeypatch):
        try:
            ModelQuantizer.save(other, tmp_path / "saved")
        except ResultError as error:
            assert "No space left" in error.message
            listed = parse_list((tmp_path / "saved" / LIST_FILE).read_bytes(), tmp_path)
            if listed.moves is None:
                assert contents(tmp_path / "saved") in (old, new)
            refused += 1
    assert refused >= 3
    ModelQuantizer.load(torch.nn.Sequential(torch.nn.Linear(3, 5)), tmp_path / "saved")


@pytest.mark.parametrize(
    "name",
    [
        "weights.safetensors",
        "quant_info.json",
        "run.log",
        "checkpoint.calibration.json",
        LIST_FILE,
    ],
)
def test_links_are_not_written_through(
    name: str, folder: Path, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(precious)
    assert calibrate(folder, "--overwrite", model=toy(), config=None) == 2
    assert f"{name} is a link" in capsys.readouterr().err
    assert precious.read_text() == "mine"


def test_files_that_have_another_name_elsewhere_are_replaced_and_not_written_to(
    folder: Path, toy: Toy, tmp_path: Path
) -> None:
    """Hard links, which nobody can tell from files."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    names = sorted(path.name for path in folder.iterdir() if path.name != LIST_FILE)
    assert {"weights.safetensors", "quant_info.json", "run.log"} <= set(names)
    for name in names:
        (folder / name).unlink()
        (folder / name).hardlink_to(precious)
    assert calibrate(folder, "--overwrite", model=toy(), config=None) == 0
    assert precious.read_text() == "mine"
    assert check(folder, model=toy()) == 0


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_keeps_the_old_results(
    number: int,
    folder: Path,
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the system says of a folder of another user, and of a disk that is read alone."""
    old = contents(folder)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    system_open = os.open

    def refuse_new_files(path: Any, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_CREAT and Path(path).name in ("file", "list"):
            refuse()
        return system_open(path, flags, *mode, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse_new_files)
        assert calibrate(folder, model=toy("return [torch.randn(4, 3)] * 2"), config=None) == 5
        assert os.strerror(number) in capsys.readouterr().err
    assert contents(folder) == old
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", refuse)
        assert calibrate(folder.parent / "other", model=toy(), config=None) == 5
        assert (
            f"cannot use {folder.parent / 'other'} for results: {os.strerror(number)}"
            in capsys.readouterr().err
        )


def test_results_of_another_format_are_refused(
    folder: Path, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a newer version, whose checksums are right."""
    content = json.loads((folder / "quant_info.json").read_text())
    write_info(
        folder,
        content["header"] | {"format": content["header"]["format"] + 1},
        content["tensors"],
    )
    assert check(folder, model=toy()) == 5
    assert "quant_info.json is not of format" in capsys.readouterr().err


def test_inputs_without_samples_are_refused(
    folder: Path, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((folder / "quant_info.json").read_text())
    write_info(folder, content["header"] | {"inputs": [[0, 3]]}, content["tensors"])
    assert check(folder, model=toy()) == 5
    assert "is damaged: header/inputs: a batch without samples" in capsys.readouterr().err


def test_a_link_to_a_folder_is_a_result_folder(toy: Toy, tmp_path: Path) -> None:
    (tmp_path / "large_disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large_disk")
    assert calibrate(tmp_path / "out", model=toy(), config=None) == 0
    assert check(tmp_path / "out", model=toy()) == 0


@pytest.mark.parametrize("listed", ["thesis.tex", "../thesis.tex", "notes.py"])
def test_files_that_a_result_names_and_nobody_wrote_stay(
    listed: str, folder: Path, toy: Toy
) -> None:
    thesis = folder / listed
    thesis.write_text("years of work")
    info = json.loads((folder / "quant_info.json").read_text())
    info["header"]["files"][listed] = "0"
    info["header"]["model"] = listed.removesuffix(".py")
    (folder / "quant_info.json").write_text(json.dumps(info))
    assert calibrate(folder, "--overwrite", model=toy(), config=None) == 0
    assert thesis.read_text() == "years of work"


def test_the_code_of_another_model_goes_with_its_results(folder: Path, toy: Toy) -> None:
    assert (folder / "Linear.py").exists()
    other = toy(model="return torch.nn.Sequential(torch.nn.Linear(3, 2))")
    assert calibrate(folder, "--overwrite", model=other, config=None) == 0
    assert sorted(path.name for path in folder.glob("*.py")) == ["Sequential.py"]


def crafted(folder: Path, files: Sequence[str] = (), gone: Sequence[str] = ()) -> Path:
    """Have the list of a folder ask whoever opens it next to move files, with sha256 that no
    file has. The subfolder with the new files is returned.
    """
    place = folder / LIST_FILE
    listed = parse_list(place.read_bytes(), place) if place.exists() else FolderList()
    digests = dict(listed.files)
    for name in ("weights.safetensors", *files, *gone):
        digests.setdefault(name, ("0" * 64,))
    moves = Moves((*files, "weights.safetensors"), tuple(gone))
    place.write_bytes(FolderList(listed.token, digests, moves).content())
    new_files = folder / listed.work_folder / "new"
    new_files.mkdir(parents=True)
    return new_files


OPENERS: dict[str, Callable[[Path, str], int]] = {
    "test": lambda folder, net: check(folder, model=net),
    "calib": lambda folder, net: calibrate(folder, "--overwrite", model=net, config=None),
    "report": lambda folder, net: run_command(["report", str(folder)]),
    "retune": lambda folder, net: run_command(
        ["retune", str(folder), "--method", "percentile"]
    ),
    "diff": lambda folder, net: run_command(["diff", str(folder), str(folder)]),
    "merge": lambda folder, net: run_command(
        ["merge", str(folder), str(folder), "--model", net, "-o", str(folder)]
    ),
    "load": lambda folder, net: (
        bool(quantizer.load(folder, torch.nn.Linear(3, 2)).test([torch.ones(4, 3)])) - 1
    ),
    "ModelQuantizer.load": lambda folder, net: ModelQuantizer.load(
        torch.nn.Sequential(torch.nn.Linear(3, 2)), folder
    ),
    "ModelQuantizer.save": lambda folder, net: ModelQuantizer.save(quantized(), folder),
}
"""Whoever opens a folder; each ends with an exit code, or with an exception."""
LINKED = ("export", "WORK", "WORK/new", "WORK/new/export", "export/verify.json")
"""Links that a folder may have on the way to files that are moved; WORK is its work folder."""


def quantized() -> torch.nn.Module:
    weight = {"dtype": "int8", "qscheme": "per_tensor"}
    config = Config.from_dict({"global_quant_config": {"weight": weight}})
    return ModelQuantizer(config).quantize_model(torch.nn.Sequential(torch.nn.Linear(3, 2)))


LINKS = [*product(OPENERS, LINKED)]


@pytest.mark.slow
@pytest.mark.parametrize(("opener", "link"), extended_except(LINKS, *LINKS[::2]))
def test_nothing_outside_is_touched_through_links_whoever_opens_a_folder(
    opener: str, link: str, folder: Path, toy: Toy, tmp_path: Path
) -> None:
    """Moves would go through `export`, which leads elsewhere, as might the folder with the
    files to move.
    """
    elsewhere = tmp_path / "elsewhere"
    for inner in (
        elsewhere,
        elsewhere / "new",
        elsewhere / "export",
        elsewhere / "new" / "export",
    ):
        inner.mkdir()
        for name in ("verify.json", "weights.safetensors", "model.safetensors"):
            (inner / name).write_text("mine")
    if opener.startswith("ModelQuantizer"):
        shutil.rmtree(folder)
        ModelQuantizer.save(quantized(), folder)
    new_files = crafted(folder, files=["export/verify.json"], gone=["export/verify.json"])
    for inner in (new_files / "export", folder / "export"):
        inner.mkdir(exist_ok=True)
        (inner / "verify.json").write_text("{}")
    place = Path(str(folder / link).replace("WORK", new_files.parent.name))
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(elsewhere if place.suffix != ".json" else elsewhere / "verify.json")
    before = {path: path.read_text() for path in elsewhere.rglob("*") if path.is_file()}
    with contextlib.suppress(ResultError, UsageError):
        OPENERS[opener](folder, toy())
    after = {path: path.read_text() for path in elsewhere.rglob("*") if path.is_file()}
    assert after == before
    assert place.is_symlink() or not place.exists()


STRANGERS = ("thesis.tex", "notes.py", "export/notes.json", "weights.safetensors.bak", "folder")
MOVES = [*product(OPENERS, STRANGERS, ("files", "gone"))]


# Three of each opener, by turns
@pytest.mark.slow
@pytest.mark.parametrize(("opener", "name", "kind"), extended_except(MOVES, *MOVES[::3]))
def test_only_files_that_quantizer_writes_are_moved_or_removed(
    opener: str, name: str, kind: str, folder: Path, toy: Toy
) -> None:
    (folder / "export").mkdir()
    if name == "folder":
        (folder / name / "inner").mkdir(parents=True)
    else:
        (folder / name).write_text("years of work")
    new_files = crafted(folder, **{kind: [name]})
    (new_files / "export").mkdir()
    (new_files / name).write_text("theirs")
    with contextlib.suppress(ResultError, UsageError):
        OPENERS[opener](folder, toy())
    assert (
        (folder / name / "inner").is_dir()
        if name == "folder"
        else (folder / name).read_text() == "years of work"
    )


def test_folders_are_not_moved(
    folder: Path, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    (crafted(folder, files=["report.json"]) / "report.json").mkdir()
    assert check(folder, model=toy()) == 5
    assert "report.json is not a file" in capsys.readouterr().err


def test_checkpoints_from_python_are_not_written_through_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantizer.results.checkpoint.SAVE_INTERVAL_S", 0.0)
    precious, folder = tmp_path / "precious", tmp_path / "out"
    precious.write_text("mine")
    folder.mkdir()
    (folder / "checkpoint.calibration.json").symlink_to(precious)
    with pytest.raises(UsageError, match=r"holds checkpoint\.calibration\.json"):
        quantizer.calibrate(torch.nn.Linear(3, 2), None, [torch.ones(4, 3)] * 2, folder=folder)
    assert precious.read_text() == "mine"
    with (
        locked(folder.parent / "used"),
        pytest.raises(ResultError, match="in use by another run"),
    ):
        quantizer.calibrate(
            torch.nn.Linear(3, 2), None, [torch.ones(4, 3)] * 2, folder=folder.parent / "used"
        )


def test_code_of_the_user_is_not_replaced(
    folder: Path, toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model's own file may have the name of its class."""
    (folder / "Linear.py").write_text("class Linear: ...")
    assert calibrate(folder, model=toy(), config=None) == 2
    assert "holds files that were changed: Linear.py" in capsys.readouterr().err
    assert (folder / "Linear.py").read_text() == "class Linear: ..."


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize(
    "name", ["quant_info.json", "weights.safetensors", "checksums.json", "report.json"]
)
def test_what_is_no_file_is_not_read(kind: str, name: str, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if kind == "link":
        (folder.parent / name).write_bytes(content)
        (folder / name).symlink_to(folder.parent / name)
    elif kind == "folder":
        (folder / name).mkdir()
    else:
        os.mkfifo(folder / name)
    with pytest.raises(ResultError, match=f"{name} is (a link|not a file)"):
        read_info(folder)


def test_reading_waits_for_no_run_that_is_about_to_replace_them(folder: Path) -> None:
    """The new set is complete, and who wrote it holds the lock."""
    with locked(folder) as place:
        new_files = crafted(folder)
        (new_files / "weights.safetensors").write_bytes(b"new")
        with pytest.raises(ResultError, match=r"weights\.safetensors was changed"):
            read_info(folder)
        assert (new_files / "weights.safetensors").exists(), (
            "who holds the lock moves files, nobody else"
        )
        # Else the end of this block would take it for an unfinished set
        place.list = parse_list((folder / LIST_FILE).read_bytes(), folder / LIST_FILE)


def test_what_stopped_runs_have_left_goes(folder: Path, toy: Toy) -> None:
    """Files of a run that was killed are in the work folder, and nothing else is touched."""
    listed = parse_list((folder / LIST_FILE).read_bytes(), folder / LIST_FILE)
    work = folder / listed.work_folder
    (work / "new").mkdir(parents=True)
    (work / "new" / "weights.safetensors").write_bytes(b"half")
    (work / "file").write_bytes(b"half")
    (folder / ".quant_info.json.abcd1234.tmp").write_text("mine")
    assert check(folder, model=toy()) == 0
    hidden = sorted(path.name for path in folder.iterdir() if path.name[0] == ".")
    assert hidden == [".quant_info.json.abcd1234.tmp", LIST_FILE]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    """`-o /dev/null` or a pipe: a file in its place would be a surprise to all who use it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_file(pipe, b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()
