"""A checkpoint survives a stop at any write: what comes back is the last whole snapshot or the
one before it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantizer.calibration.events import ForkedEvents, RunStage, Snapshot
from quantizer.calibration.snapshots import snapshot_of, value_of
from quantizer.errors import DataError, ResultError
from quantizer.results import checkpoint
from quantizer.results.checkpoint import Checkpoint, Checkpoints
from quantizer.storage.deferred_tensor import DeferredTensor, move_to_disk
from quantizer.storage.opened_files import json_digest

KEY = {"weights": "a", "seed": 0}


class KilledError(Exception):
    """The process ends here."""


def snapshots() -> list[Snapshot]:
    """Three states: a tensor that stays, one that changes, one under two names, one that comes
    and goes.
    """
    kept, shared = torch.arange(4.0), torch.ones(2, dtype=torch.int32)
    contents: list[dict[str, Tensor]] = [
        {"kept": kept, "changing": torch.zeros(3)},
        {
            "kept": kept,
            "changing": torch.ones(3),
            "one": shared,
            "other": shared,
            "passing": torch.eye(2),
        },
        {"kept": kept, "changing": torch.full((3,), 2.0), "one": shared},
    ]
    return [Snapshot(tensors, {"done": number}) for number, tensors in enumerate(contents)]


def assert_equal(found: Snapshot | None, expected: Snapshot) -> None:
    assert found is not None
    assert found.state == expected.state
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(
        torch.equal(tensor, expected.tensors[name]) for name, tensor in found.tensors.items()
    )


def test_what_was_saved_comes_back_and_unused_files_go(tmp_path: Path) -> None:
    for number, snapshot in enumerate(snapshots()):
        saved = Checkpoint(tmp_path, "stage", KEY)
        assert (saved.restore() is None) is (number == 0)
        saved.save(snapshot)
        assert_equal(Checkpoint(tmp_path, "stage", KEY).restore(), snapshot)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    # The others are the list of the folder and the JSON file
    assert len(sizes) == len(set(tmp_path.iterdir())) - 2
    assert sum(sizes) < 2000


def test_a_tensor_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[set[str]] = []
    original = checkpoint.write_tensors
    monkeypatch.setattr(
        checkpoint,
        "write_tensors",
        lambda path, tensors: written.append(set(tensors)) or original(path, tensors),
    )
    saved = Checkpoint(tmp_path, "stage", KEY)
    for snapshot in snapshots():
        saved.save(snapshot)
    assert written == [
        {"kept", "changing"},
        {"changing", "one", "other", "passing"},
        {"changing"},
    ]


def test_what_was_out_of_memory_comes_back_out_of_it_and_outlives_the_files(
    tmp_path: Path,
) -> None:
    values = torch.arange(6.0).view(2, 3)
    given = Snapshot({"out": move_to_disk(values), "in": values + 1}, {})
    Checkpoint(tmp_path, "stage", KEY).save(given)
    found = Checkpoint(tmp_path, "stage", KEY).restore()
    assert found is not None
    assert {
        name for name, each in found.tensors.items() if isinstance(each, DeferredTensor)
    } == {"out"}
    Checkpoints(tmp_path).remove()
    assert [path.name for path in tmp_path.iterdir()] == [".quantizer.json"]
    assert_equal(found, given)


@pytest.mark.parametrize("stop_at", range(7))
def test_a_stop_at_any_write_leaves_a_whole_snapshot(
    stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = snapshots()
    saved = Checkpoint(tmp_path, "stage", KEY)
    saved.save(first)
    writes = 0

    def stopping(original: Any) -> Any:
        def write(*arguments: Any, **more: Any) -> Any:
            nonlocal writes
            if writes == stop_at:
                raise KilledError
            writes += 1
            return original(*arguments, **more)

        return write

    with monkeypatch.context() as patched:
        for name in ("write_tensors", "write_json"):
            patched.setattr(checkpoint, name, stopping(getattr(checkpoint, name)))
        patched.setattr(Path, "unlink", stopping(Path.unlink))
        whole = first
        try:
            for snapshot in others:
                saved.save(snapshot)
                whole = snapshot
        except KilledError:
            pass
    found = Checkpoint(tmp_path, "stage", KEY).restore()
    assert found is not None
    after = others[others.index(whole) + 1 :] if whole in others else others
    assert_equal(found, next((each for each in after[:1] if each.state == found.state), whole))


@pytest.mark.parametrize("resume", [False, True])
def test_another_runs_files_never_mix_with_this_ones(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes over the checkpoint of one that was stopped: a kill in between leaves that as
    it was.
    """
    Checkpoint(tmp_path, "stage", KEY).save(snapshots()[1])
    fresh = Checkpoint(tmp_path, "stage", KEY)
    if resume:
        fresh.restore()
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(
            checkpoint, "write_json", lambda *_: (_ for _ in ()).throw(KilledError())
        )
        fresh.save(snapshots()[2])
    assert_equal(Checkpoint(tmp_path, "stage", KEY).restore(), snapshots()[1])
    fresh.save(snapshots()[2])
    assert_equal(Checkpoint(tmp_path, "stage", KEY).restore(), snapshots()[2])


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    Checkpoint(tmp_path, "stage", KEY).save(snapshots()[0])
    with pytest.raises(ResultError, match="belongs to another run: seed differs"):
        Checkpoint(tmp_path, "stage", KEY | {"seed": 1}).restore()


@pytest.mark.parametrize(
    "change", [{"state": 3}, {"tensors": {"a": ["DIGEST", "a", True, False]}}]
)
def test_a_snapshot_that_none_can_be_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Though its checksum is right."""
    Checkpoint(tmp_path, "stage", KEY).save(Snapshot({"a": torch.ones(2)}, {}))
    path = tmp_path / "checkpoint.stage.json"
    content = json.loads(path.read_text())
    ((digest, *_),) = content["tensors"].values()
    content |= json.loads(json.dumps(change).replace("DIGEST", digest))
    rest = {key: content[key] for key in ("key", "state", "tensors")}
    path.write_text(json.dumps(content | {"checksum": json_digest(rest)}))
    with pytest.raises(ResultError, match="is damaged"):
        Checkpoint(tmp_path, "stage", KEY).restore()


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path: Path) -> None:
    Checkpoint(tmp_path, "stage", KEY).save(snapshots()[0])
    path = tmp_path / "checkpoint.stage.json"
    content = json.loads(path.read_text())
    del content["key"]["format"]
    path.write_text(json.dumps(content))
    with pytest.raises(ResultError, match="belongs to another run: format differs"):
        Checkpoint(tmp_path, "stage", KEY).restore()


@pytest.mark.parametrize(
    "change",
    [
        {"structure": "no JSON"},
        {"structure": None},
        {"values": [1]},
        {"values": 3},
        {"values": [None, "1", 2]},
    ],
)
def test_a_damaged_value_is_refused(change: dict[str, Any]) -> None:
    given = snapshot_of({"a": torch.ones(2), "b": (1, 2)})
    kind = dict[str, Tensor | tuple[int, ...]]
    assert value_of(given, kind)["b"] == (1, 2)
    with pytest.raises(ResultError, match="the checkpoint is damaged"):
        value_of(Snapshot(given.tensors, {**given.state, **change}), kind)


@pytest.mark.parametrize(
    ("error", "needs_same_data", "saved"),
    [
        (KeyboardInterrupt(), True, True),
        (DataError("batch 3 is empty"), True, False),
        (DataError("batch 3 is empty"), False, True),
        (ResultError("the disk is full"), True, True),
        (None, True, False),
        (RuntimeError("a bug"), True, False),
    ],
)
def test_a_stop_saves_what_can_be_gone_on_with(
    error: BaseException | None, needs_same_data: bool, saved: bool, tmp_path: Path
) -> None:
    said: list[tuple[int, str]] = []

    class Listener(ForkedEvents):
        def message(self, level: int, text: str, finding: Any = None) -> None:
            said.append((level, text))

    checkpoints = Checkpoints(tmp_path)
    checkpoints.restore("work", KEY)
    stage = RunStage(
        Listener(checkpoints),
        "gptq",
        8,
        "groups",
        saved_as="work",
        needs_same_data=needs_same_data,
    )
    stage.snapshot = lambda: snapshots()[0]
    try:
        with stage:
            stage.advance()
            if error is not None:
                raise error
    except BaseException as raised:  # noqa: BLE001 - whatever it was
        assert raised is error
    assert (Checkpoint(tmp_path, "work", KEY).restore() is not None) is saved
    assert said == (
        [(logging.WARNING, "gptq stopped after 1 of 8 groups; --resume continues from there")]
        if saved
        else []
    )
