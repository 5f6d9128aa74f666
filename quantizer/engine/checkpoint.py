"""The checkpoint of an unfinished calibration: statistics of the batches so far, and what they belong to."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.config.model import Config
from quantizer.engine import fingerprint
from quantizer.engine.calibrate import Calibration
from quantizer.engine.result_files import read_json, read_tensors, write_json, write_tensors
from quantizer.errors import ResultError
from quantizer.graph.ir import Graph

EVERY_S = 30.0  # seconds of work that a kill may cost
AGAIN = "run without --resume"


class Checkpoint:
    """checkpoint.safetensors and checkpoint.json of one folder; the JSON is written last and names the batches."""

    def __init__(self, folder: Path, original: Graph, config: Config, run: Mapping[str, Any]) -> None:
        self._tensors, self._info = folder / "checkpoint.safetensors", folder / "checkpoint.json"
        self._saved = time.monotonic()
        self._data: Mapping[str, Any] = {}
        self._key = {
            "weights": fingerprint.combined(fingerprint.weights(original)),
            "layers": fingerprint.combined(fingerprint.layers(original)),
            "config": fingerprint.config(config),
            **run,
        }

    def batch_done(self, calibration: Calibration, data: Mapping[str, Any]) -> None:
        """Note the fingerprint of the data so far, and save when the last time is long enough ago."""
        self._data = data
        if time.monotonic() - self._saved >= EVERY_S:
            self.save(calibration)

    def save(self, calibration: Calibration) -> None:
        """Save now; `calibration` holds whole batches."""
        self._info.unlink(missing_ok=True)
        digest = write_tensors(self._tensors, calibration.state_dict())
        content = {"key": self._key, "batches": calibration.batches, "data": self._data, "sha256": digest}
        write_json(self._info, content)
        self._saved = time.monotonic()

    def restore(self, calibration: Calibration) -> int:
        """Load the checkpoint, if there is one, and return how many batches it has seen.

        Raises:
            ResultError: it is damaged, or belongs to another model, config, seed or batch size.
        """
        if not self._info.exists():
            return 0
        info = read_json(self._info)
        if not isinstance(info, dict) or not {"key", "batches", "data", "sha256"} <= set(info):
            raise ResultError(f"{self._info} is damaged", help=AGAIN)
        for name, value in self._key.items():
            if info["key"].get(name) != value:
                raise ResultError(f"the checkpoint belongs to another run: {name} differs", help=AGAIN)
        if not self._tensors.is_file() or hashlib.sha256(self._tensors.read_bytes()).hexdigest() != info["sha256"]:
            raise ResultError(f"{self._tensors} is damaged", help=AGAIN)
        calibration.load_state_dict(read_tensors(self._tensors))
        calibration.batches = int(info["batches"])
        self._data = info["data"]
        return calibration.batches

    def check_data(self, data: Mapping[str, Any] | None) -> None:
        """Refuse data whose first batches are not those the checkpoint has seen; None: there are not even so many.

        Raises:
            ResultError: they differ.
        """
        if data != self._data:
            raise ResultError("the checkpoint belongs to another run: the data differ", help=AGAIN)

    def remove(self) -> None:
        """The calibration is complete, and so is what came after it."""
        for path in (self._info, *self._info.parent.glob("checkpoint.*")):
            path.unlink(missing_ok=True)
