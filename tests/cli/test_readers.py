"""Who reads a result folder sees one calibration, whatever is written meanwhile, and takes no
lock for it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantizer
from quantizer.cli.main import run_command
from quantizer.errors import ResultError
from quantizer.results import folder as results_folder
from quantizer.results.folder import (
    FILES_OF_TESTS,
    REPORT_FILE,
    OpenedResults,
    QuantInfo,
    read_info,
)
from quantizer.results.result_set import locked, replace_set
from quantizer.storage import opened_files
from quantizer.storage.folder_list import LIST_FILE, Moves, parse_list
from quantizer.storage.owned_folder import OwnedFolder

MODEL = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def calibration_data():
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(3)]

def larger():
    return [batch * 3 for batch in calibration_data()]
"""
STATIC = {"dtype": "int8", "qscheme": "per_tensor"}
RUN_FILES = ("run.json", "run.log", LIST_FILE)
CHANGED = "holds other results than when this command began"
Switch = Callable[[], None]
Capture = pytest.CaptureFixture[str]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrations of one model: `old` and `part` alike but for their data, `new` with fewer
    bits, all tested.
    """
    place = tmp_path_factory.mktemp("calibrations")
    (place / "net.py").write_text(MODEL)
    for name, bits, data in (
        ("old", 8, "larger"),
        ("part", 8, "calibration_data"),
        ("new", 4, "calibration_data"),
    ):
        weight = {"dtype": f"int{bits}", "qscheme": "per_tensor"}
        config = {"global_quant_config": {"weight": weight, "input_tensors": STATIC}}
        (place / f"{name}.json").write_text(json.dumps(config))
        options = ["--model", f"{place / 'net.py'}", "--output_dir", str(place / name), "-q"]
        calib = ["--quant_mode", "calib", "--config_file", str(place / f"{name}.json")]
        assert run_command([*calib, *options, "--data", f"{place / 'net.py'}:{data}"]) == 0
        assert run_command(["--quant_mode", "test", *options]) == 0
    return place


@pytest.fixture
def folder(calibrations: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(calibrations / "old", tmp_path / "out"))


def contents(folder: Path) -> dict[str, bytes]:
    """Of all files, but for those that tell of the last run."""
    paths = [
        path for path in folder.rglob("*") if path.is_file() and path.name not in RUN_FILES
    ]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def replace_all(folder: Path, other: Path) -> None:
    """Do what a calibration does when it is complete."""
    with replace_set(folder, FILES_OF_TESTS) as new:
        for path in other.iterdir():
            if path.name not in RUN_FILES:
                shutil.copy(path, new / path.name)


def begin_to_replace(folder: Path, other: Path) -> None:
    """Do what a calibration does that is stopped in the middle: every second file is in its
    place.
    """
    place = folder / LIST_FILE
    content = parse_list(place.read_bytes(), place)
    new_files = folder / content.work_folder / "new"
    new_files.mkdir(parents=True)
    names = sorted(path.name for path in other.iterdir() if path.name not in RUN_FILES)
    files = dict(content.files)
    for name in names:
        shutil.copy(other / name, new_files / name)
        digest = hashlib.sha256((new_files / name).read_bytes()).hexdigest()
        files[name] = (*files.get(name, ()), digest)
    place.write_bytes(replace(content, files=files, moves=Moves(tuple(names), ())).content())
    for name in names[::2]:
        os.replace(new_files / name, folder / name)


def everything(opened: QuantInfo) -> list[Any]:
    """What a reader can learn of a calibration, and of a test of it."""
    weights = {
        key: tensor.decoded()
        for key, tensor in opened.solution.tensors.items()
        if tensor.codes is not None
    }
    values = {str(key): value.tolist() for key, value in weights.items()}
    statistics = {name: value.tolist() for name, value in opened.statistics().items()}
    return [
        opened.header,
        opened.entries,
        opened.plan,
        values,
        statistics,
        opened.read_findings(REPORT_FILE)["metrics"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("write", [replace_all, begin_to_replace])
def test_a_calibration_that_ends_at_any_moment_is_seen_whole_or_not(
    write: Callable[[Path, Path], None],
    calibrations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [everything(read_info(calibrations / name)) for name in ("old", "new")]
    plain, seen = os.open, []
    for moment in itertools.count():
        folder = Path(shutil.copytree(calibrations / "old", tmp_path / str(moment)))
        opens = itertools.count()

        def opening(
            *args: Any,
            opens: Any = opens,
            last: int = moment,
            folder: Path = folder,
            **more: Any,
        ) -> int:
            if next(opens) == last:
                write(folder, calibrations / "new")
            return plain(*args, **more)

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", opening)
            opened = read_info(folder)
            opens_in_all = next(opens)
        seen.append(expected.index(everything(opened)))
        if opens_in_all <= moment:
            break
    assert {0, 1} == set(seen)
    assert len(seen) > 10


def test_who_meets_writers_again_and_again_gives_up(
    folder: Path, calibrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reader gives a mixture, and none reads for ever."""
    others, plain, is_writing = itertools.cycle(["new", "old"]), os.open, [False]

    def opening(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith("weights.safetensors") and not is_writing[0]:
            is_writing[0] = True
            replace_all(folder, calibrations / next(others))
            is_writing[0] = False
        return plain(path, *args, **more)

    monkeypatch.setattr(opened_files, "MAX_OPEN_ATTEMPTS", 5)
    monkeypatch.setattr(os, "open", opening)
    with pytest.raises(ResultError, match="is written again and again by other runs"):
        read_info(folder)
    monkeypatch.undo()
    assert everything(read_info(folder))


def test_what_was_opened_stays_what_it_was(folder: Path, calibrations: Path) -> None:
    before, opened = everything(read_info(folder)), read_info(folder)
    replace_all(folder, calibrations / "new")
    assert everything(opened) == before
    shutil.rmtree(folder)
    assert everything(opened) == before


def test_readers_move_nothing(folder: Path, calibrations: Path) -> None:
    begin_to_replace(folder, calibrations / "new")
    before = contents(folder)
    with locked_elsewhere(folder):
        opened = read_info(folder)
    assert everything(opened) == everything(read_info(calibrations / "new"))
    loaded = quantizer.load(folder, model())
    assert loaded.test([torch.ones(4, 3)]).metrics["sqnr_db"] < 30
    assert contents(folder) == before


@contextmanager
def locked_elsewhere(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, as another run does that has not cleaned up yet."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OwnedFolder, "complete", lambda self: None)
        with locked(folder):
            yield


READERS: dict[str, tuple[list[str], int]] = {
    "test": (["--quant_mode", "test", "--model", "{net}", "--output_dir", "{out}", "-q"], 5),
    "test elsewhere": (
        [
            "--quant_mode",
            "test",
            "--model",
            "{net}",
            "--output_dir",
            "{out}",
            "--report_dir",
            "{to}",
            "-q",
        ],
        0,
    ),
    "report": (["report", "{out}"], 5),
    "retune": (["retune", "{out}", "--method", "percentile"], 5),
    "retune elsewhere": (
        ["retune", "{out}", "--method", "percentile", "--output_dir", "{to}"],
        0,
    ),
    "merge": (["merge", "{out}", "{part}", "--model", "{net}", "-q", "-o", "{to}"], 0),
    "diff": (["diff", "{out}", "{part}"], 0),
    "analyze": (
        ["analyze", "--config_file", "{config}", "--model", "{net}", "--report", "{out}"],
        5,
    ),
}
"""Commands that read a folder, and how they end if another calibration takes its place
meanwhile.
"""


@pytest.mark.parametrize("name", READERS)
def test_a_command_tells_of_one_calibration_and_writes_about_no_other(
    name: str,
    folder: Path,
    calibrations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    words, code = READERS[name]
    places = {
        "out": folder,
        "part": calibrations / "part",
        "net": calibrations / "net.py",
        "to": tmp_path / "to",
    }
    command = [word.format(**places, config=calibrations / "old.json") for word in words]
    capsys.readouterr()
    assert run_command(command) == 0
    undisturbed, output = contents(tmp_path), capsys.readouterr().out
    shutil.rmtree(tmp_path / "to", ignore_errors=True)
    shutil.rmtree(folder)
    shutil.copytree(calibrations / "old", folder)
    plain, to_replace = results_folder.open_results, [folder]

    def open_and_replace(place: Path) -> OpenedResults:
        opened = plain(place)
        if place in to_replace:
            to_replace.remove(place)
            replace_all(place, calibrations / "new")
        return opened

    monkeypatch.setattr(results_folder, "open_results", open_and_replace)
    assert run_command(command) == code
    told = capsys.readouterr()
    assert not to_replace
    complete = Path(shutil.copytree(calibrations / "old", tmp_path / "expected"))
    replace_all(complete, calibrations / "new")
    assert contents(folder) == contents(complete)
    if code:
        assert CHANGED in told.err
    else:
        assert told.out == output
        written = {
            path: content for path, content in undisturbed.items() if path.startswith("to/")
        }
        assert {
            f"to/{path}": content for path, content in contents(tmp_path / "to").items()
        } == written


def test_python_goes_on_with_what_it_loaded(
    folder: Path, calibrations: Path, tmp_path: Path
) -> None:
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(7))]
    expected = quantizer.load(calibrations / "old", model())
    loaded = quantizer.load(folder, model())
    replace_all(folder, calibrations / "new")
    assert loaded.test(data).to_json() == expected.test(data).to_json()
    assert loaded.report().values == expected.report().values
    loaded.save(tmp_path / "saved")
    expected.save(tmp_path / "expected")
    assert contents(tmp_path / "saved") == contents(tmp_path / "expected")
    (folder / "run.json").unlink()  # it has the commands that made the old results
    loaded.save(folder)
    assert contents(folder) == contents(tmp_path / "expected"), (
        "what replaced it is replaced as a whole"
    )


def test_a_generated_network_is_filled_from_one_calibration(
    folder: Path, calibrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are those of quant_info.json, also if another calibration ends between the
    two.
    """
    plain, switched = json.loads, []

    def loads(text: Any, *args: Any, **more: Any) -> Any:
        value = plain(text, *args, **more)
        if isinstance(value, dict) and "tensors" in value and not switched:
            switched.append(True)
            replace_all(folder, calibrations / "new")
        return value

    namespace: dict[str, Any] = {
        "__file__": str(folder / "Sequential.py"),
        "__name__": "generated",
    }
    code = compile((folder / "Sequential.py").read_text(), "Sequential.py", "exec")
    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", loads)
        exec(code, namespace)
        network = namespace["Sequential"]()
    assert switched
    x = torch.randn(5, 3)
    new = quantizer.load(calibrations / "new", model()).network
    with torch.no_grad():
        assert torch.equal(network(x), new(x))


EDITS: dict[str, Callable[[Path], None]] = {
    "plan.json": lambda path: path.write_text(path.read_text().replace("default", "default ")),
    "config.resolved.json": lambda path: path.write_text(path.read_text() + "\n"),
    "report.json": lambda path: path.write_text(
        path.read_text().replace('"metrics": {', '"metrics": {"a": 1,')
    ),
    "statistics.safetensors": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"),
}


@pytest.mark.parametrize("file", EDITS)
@pytest.mark.parametrize("name", ["test", "report", "retune", "merge", "diff", "load"])
def test_what_is_acted_on_is_checked(
    name: str, file: str, folder: Path, calibrations: Path, tmp_path: Path, capsys: Capture
) -> None:
    EDITS[file](folder / file)
    before = contents(folder)
    acts_on_report = name in ("report", "diff")
    is_refused = file != "report.json" or acts_on_report
    if name == "load":
        if is_refused:
            with pytest.raises(ResultError, match="was changed after"):
                quantizer.load(folder, model())
        return
    words, _ = READERS[name]
    places = {
        "out": folder,
        "part": calibrations / "part",
        "net": calibrations / "net.py",
        "to": tmp_path / "to",
    }
    code = run_command([word.format(**places) for word in words])
    if not is_refused and name in ("test", "retune"):
        # They would replace a report that was changed by hand
        assert code == 2
        assert "holds files that were changed: report.json" in capsys.readouterr().err
    else:
        assert code == (5 if is_refused else 0)
    if is_refused:
        assert f"{file} was changed after" in capsys.readouterr().err
        assert contents(folder) == before


def test_a_report_of_another_calibration_is_none(
    folder: Path, calibrations: Path, capsys: Capture
) -> None:
    """As a run that is not ours would leave it there."""
    shutil.copy(calibrations / "new" / "report.json", folder / "report.json")
    assert read_info(folder).read_findings(REPORT_FILE) == {}
    assert run_command(["report", str(folder), "--json", "--overwrite"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {}


def test_run_json_decides_nothing(
    folder: Path, calibrations: Path, tmp_path: Path, capsys: Capture
) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    told = json.loads((folder / "run.json").read_text())
    told["options"] |= {
        "model": str(tmp_path / "own.py"),
        "weights": "/dev/null",
        "trust": True,
    }
    (folder / "run.json").write_text(json.dumps(told))
    places = {
        "out": folder,
        "part": calibrations / "part",
        "net": calibrations / "net.py",
        "to": tmp_path / "to",
    }
    for name in ("diff", "retune elsewhere", "merge", "report", "test"):
        words = [word.format(**places) for word in READERS[name][0]]
        if name == "test":
            words.append("--overwrite")
        assert run_command(words) == 0
        shutil.rmtree(tmp_path / "to", ignore_errors=True)
    assert not ran.exists()
