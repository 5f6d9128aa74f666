"""Save and restore checkpoints of the stages of a run. A run that is killed at any moment
leaves a consistent checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizer.calibration import steps
from quantizer.calibration.events import Events, RunStage, Snapshot
from quantizer.calibration.request import CalibrationRequest, CalibrationState
from quantizer.config.wording import counted
from quantizer.errors import BatchError, CheckpointError, DataError, QuantizerError, ResultError
from quantizer.option_words import Sentence, marked_text
from quantizer.storage.files import read_json
from quantizer.storage.ownership import listed_files
from quantizer.storage.replacing import remove_file

if TYPE_CHECKING:
    from quantizer.results.checkpoint_file import Checkpoint

SAVE_INTERVAL_S = 30.0
"""Seconds between two checkpoints, which is the work that a kill may cost."""
_PREFIX = "checkpoint."
"""What the names of all files of checkpoints begin with."""


class Checkpoints(Events):
    """Saves checkpoints of the stages of a run: at their boundaries, every `SAVE_INTERVAL_S`
    seconds, and when the run stops with an error.

    Args:
        folder: the result folder.
        resume: whether stages continue from the checkpoints in the folder.

    Attributes:
        how_to_resume: the end of the message of a run that stops.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.folder = folder
        self.resume = resume
        self.how_to_resume: str = Sentence("<--resume> continues from there")
        self._keys: dict[str, Mapping[str, Any]] = {}
        self._open: dict[str, Checkpoint] = {}
        self._last_save = time.monotonic()
        self._is_unsaved = False

    def restore(self, name: str, key: Mapping[str, Any]) -> Snapshot | None:
        """Return the snapshot of a stage from which this run continues, or None if it begins
        anew.

        Raises:
            ResultError: the checkpoint is damaged, or belongs to another run.
        """
        self._keys[name] = key
        self._open.pop(name, None)
        if not self.resume:
            return None
        return self._of_stage(name).restore()

    def stored_key(self, name: str) -> Mapping[str, Any]:
        """Return the key of a checkpoint, or an empty one if there is no readable
        checkpoint.
        """
        path = self.folder / f"checkpoint.{name}.json"
        info = read_json(path) if path.exists() else None
        key = info.get("key") if isinstance(info, dict) else None
        return key if isinstance(key, dict) else {}

    def exist(self) -> bool:
        """Return whether there is anything to resume from."""
        return bool(listed_files(self.folder, _PREFIX))

    def remove(self) -> None:
        """Remove all checkpoints of a complete run."""
        # The JSON files go first: they refer to the others
        paths = listed_files(self.folder, _PREFIX)
        for path in sorted(paths, key=lambda path: path.suffix != ".json"):
            remove_file(path)

    def started(self, stage: RunStage) -> None:
        """Note that the stage has nothing to save yet."""
        self._is_unsaved = False

    def advanced(self, stage: RunStage) -> None:
        """Save at a boundary, or if the last save is long enough ago."""
        self._is_unsaved = stage.snapshot is not None
        is_due = time.monotonic() - self._last_save >= SAVE_INTERVAL_S
        if self._is_unsaved and (stage.at_boundary or is_due):
            self._save(stage)

    def stopped(self, stage: RunStage, error: BaseException | None) -> None:
        """Save the work since the last checkpoint, if the run stops with an error that a later
        run may not have.

        Nothing is saved if the data have to change, because a run could not resume from it.
        After any error of the data they have to change if the stage needs the same data.
        """
        if not isinstance(error, (KeyboardInterrupt, QuantizerError)):
            return
        if isinstance(error, BatchError):
            return
        if isinstance(error, DataError) and stage.needs_same_data:
            return
        if stage.snapshot is None or not stage.done or not self._is_unsaved:
            return
        # With several ranks, the snapshot has fewer batches: those until the last exchange
        snapshot = self._save(stage)
        done = snapshot.state.get("batches", stage.done)
        progress = f"{done} {stage.unit}"
        if stage.unit == "batches":
            progress = counted(done, "batch")
        if stage.total and stage.unit != "batches":
            progress = f"{done} of {stage.total} {stage.unit}"
        how_to_resume = marked_text(self.how_to_resume)
        text = Sentence(f"{stage.name} stopped after {progress}; {how_to_resume}")
        stage.events.message(logging.WARNING, text)

    def _of_stage(self, name: str) -> Checkpoint:
        """Return the open checkpoint of a stage."""
        # Short runs save nothing
        from quantizer.results.checkpoint_file import Checkpoint

        if name not in self._open:
            self._open[name] = Checkpoint(self.folder, name, self._keys[name])
        return self._open[name]

    def _save(self, stage: RunStage) -> Snapshot:
        assert stage.snapshot is not None
        snapshot = stage.snapshot()
        self._of_stage(stage.saved_as).save(snapshot)
        self._last_save = time.monotonic()
        return snapshot


def calibrated(request: CalibrationRequest, *, must_resume: bool) -> CalibrationState:
    """Calibrate from where a stopped run has left off, or from the beginning.

    Args:
        request: with the checkpoints of its folder, or without any.
        must_resume: whether a checkpoint of another run is an error. If not, it is replaced.

    Raises:
        QuantizerError: the calibration failed.
    """
    checkpoints = request.checkpoints
    if must_resume or not isinstance(checkpoints, Checkpoints) or not request.ranks.is_alone:
        return steps.run_calibration(request)
    checkpoints.resume = checkpoints.exist()
    try:
        return steps.run_calibration(request)
    except CheckpointError as error:
        checkpoints.resume = False
        text = Sentence(f"{error.message.marked}, so calibration begins anew")
        request.events.message(logging.INFO, text)
        return steps.run_calibration(request)


def check_checkpoint(checkpoints: Checkpoints, mode: str | None) -> None:
    """Check that a run resumes with the finetuning mode of its checkpoint. This is called
    before anything is computed.

    Args:
        checkpoints: of the run.
        mode: of `--fast_finetune`, or None without it.

    Raises:
        ResultError: the checkpoint has another mode.
    """
    stored = checkpoints.stored_key("finetune").get("mode")
    if stored and stored != mode:
        option = f"<--fast_finetune {mode}>" if mode else "no <--fast_finetune>"
        raise ResultError(
            f"the checkpoint in {checkpoints.folder} was finetuning with {stored}, and this "
            f"run has {option}",
            help=f"add <--fast_finetune {stored}>, or run without <--resume>",
        )
