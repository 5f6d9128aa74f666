"""The checkpoint of an unfinished fast finetuning: the layers settled so far, and what they belong to."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantizer.algorithms.fast_finetune import FinetunedLayer
from quantizer.engine import fingerprint
from quantizer.engine.checkpoint import AGAIN, EVERY_S
from quantizer.engine.result_files import read_json, read_tensors, write_json, write_tensors
from quantizer.engine.solution import Solution
from quantizer.errors import ResultError
from quantizer.graph.ir import Graph


class FinetuneCheckpoint:
    """checkpoint.finetune.safetensors and .json of one folder; the JSON is written last.

    `run` is what else the result depends on: the mode, the seed, the fingerprint of the data.
    """

    def __init__(self, folder: Path, graph: Graph, start: Solution, run: Mapping[str, Any]) -> None:
        self._tensors, self._info = folder / "checkpoint.finetune.safetensors", folder / "checkpoint.finetune.json"
        self._saved = time.monotonic()
        self._settled: Mapping[str, FinetunedLayer] = {}
        self._key = {
            "weights": fingerprint.combined(fingerprint.weights(graph)),
            "layers": fingerprint.combined(fingerprint.layers(graph)),
            "scales": fingerprint.combined(_scales(start)),
            **run,
        }

    @staticmethod
    def check_mode(folder: Path, mode: str | None) -> None:
        """Refuse to go on in another mode than the checkpoint's, before anything is computed again.

        Raises:
            ResultError: there is a checkpoint, and it is of another mode.
        """
        path = folder / "checkpoint.finetune.json"
        info = read_json(path) if path.exists() else None
        stored = info.get("key", {}).get("mode") if isinstance(info, dict) else None
        if stored and stored != mode:
            given = f"--fast_finetune {mode}" if mode else "no --fast_finetune"
            raise ResultError(
                f"the checkpoint in {folder} was finetuning with {stored}, and this run has {given}",
                help=f"add --fast_finetune {stored}, or run without --resume",
            )

    def layer_done(self, settled: Mapping[str, FinetunedLayer]) -> None:
        """Note what is settled so far, and save when the last time is long enough ago."""
        self._settled = settled
        if time.monotonic() - self._saved >= EVERY_S:
            self.save()

    def save(self) -> int:
        """Save now; returns how many layers are settled."""
        tensors: dict[str, Tensor] = {}
        for name, layer in self._settled.items():
            errors = torch.tensor([layer.before, layer.after], dtype=torch.float64)
            tensors |= {f"{name}|weight": layer.weight, f"{name}|scale": layer.scale, f"{name}|errors": errors}
        self._info.unlink(missing_ok=True)
        digest = write_tensors(self._tensors, tensors)
        write_json(self._info, {"key": self._key, "layers": list(self._settled), "sha256": digest})
        self._saved = time.monotonic()
        return len(self._settled)

    def restore(self) -> dict[str, FinetunedLayer]:
        """What an interrupted run had settled; nothing if there is no checkpoint.

        Raises:
            ResultError: it is damaged, or belongs to another run.
        """
        if not self._info.exists():
            return {}
        info = read_json(self._info)
        if not isinstance(info, dict) or not {"key", "layers", "sha256"} <= set(info):
            raise ResultError(f"{self._info} is damaged", help=AGAIN)
        for name, value in self._key.items():
            if info["key"].get(name) != value:
                raise ResultError(f"the finetuning's checkpoint belongs to another run: {name} differs", help=AGAIN)
        if not self._tensors.is_file() or hashlib.sha256(self._tensors.read_bytes()).hexdigest() != info["sha256"]:
            raise ResultError(f"{self._tensors} is damaged", help=AGAIN)
        tensors = read_tensors(self._tensors)
        self._settled = {
            name: FinetunedLayer(
                tensors[f"{name}|weight"], tensors[f"{name}|scale"], *tensors[f"{name}|errors"].tolist()
            )
            for name in info["layers"]
        }
        return dict(self._settled)


def _scales(solution: Solution) -> dict[str, str]:
    """A digest of each scale and zero point."""
    return {
        f"{layer}|{role}": fingerprint.tensor_digest(
            torch.cat([found.scale.flatten(), found.zero_point.flatten().to(found.scale)])
        )
        for (layer, role), found in solution.tensors.items()
    }
