"""The checkpoint of an unfinished calibration: statistics of the batches so far, and what they belong to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantizer.config.model import Config
from quantizer.engine import fingerprint
from quantizer.engine.calibrate import Calibration
from quantizer.engine.files import read_json, read_tensors, write_json, write_tensors
from quantizer.errors import ResultError
from quantizer.graph.ir import Graph

EVERY_S = 30.0  # seconds of work that a kill may cost


class Checkpoint:
    """checkpoint.safetensors and checkpoint.json of one folder; the JSON is written last and names the batches."""

    def __init__(self, folder: Path, original: Graph, config: Config, run: Mapping[str, Any]) -> None:
        self._tensors, self._info = folder / "checkpoint.safetensors", folder / "checkpoint.json"
        self._saved = time.monotonic()
        self._key = {
            "weights": fingerprint.combined(fingerprint.weights(original)),
            "layers": fingerprint.combined(fingerprint.layers(original)),
            "config": fingerprint.config(config),
            **run,
        }

    def save_now_and_then(self, calibration: Calibration) -> None:
        """Save when the last time is long enough ago."""
        if time.monotonic() - self._saved >= EVERY_S:
            self.save(calibration)

    def save(self, calibration: Calibration) -> None:
        """Save now."""
        self._info.unlink(missing_ok=True)
        digest = write_tensors(self._tensors, calibration.state_dict())
        write_json(self._info, {"key": self._key, "batches": calibration.batches, "sha256": digest})
        self._saved = time.monotonic()

    def restore(self, calibration: Calibration) -> int:
        """Load the checkpoint, if there is one, and return how many batches it has seen.

        Raises:
            ResultError: it belongs to another model, config, seed or batch size.
        """
        if not self._info.exists():
            return 0
        info = read_json(self._info)
        for name, value in self._key.items():
            if info.get("key", {}).get(name) != value:
                raise ResultError(f"the checkpoint belongs to another run: {name} differs", help="run without --resume")
        calibration.load_state_dict(read_tensors(self._tensors))
        calibration.batches = int(info["batches"])
        return calibration.batches

    def remove(self) -> None:
        """The calibration is complete."""
        self._info.unlink(missing_ok=True)
        self._tensors.unlink(missing_ok=True)
