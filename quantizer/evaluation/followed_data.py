"""Reads the data of a test in several passes, which have to be alike. A stage of the run counts
the batches of the first one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantizer.calibration.events import RunStage
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches
from quantizer.sources.repeated_passes import RepeatedPasses


@dataclass
class FollowedBatches:
    """Batches on a device, whose first pass a stage counts."""

    batches: Iterable[Batch]
    stage: RunStage
    device: torch.device | str = "cpu"
    passes: int = 0

    def __iter__(self) -> Iterator[Batch]:
        moved = (batch.to(self.device) for batch in self.batches)
        self.passes += 1
        return moved if self.passes > 1 else self.stage.counted(moved)


@dataclass(frozen=True)
class UserItems:
    """The items of the user's data, as `evaluate(model, data)` gets them."""

    batches: FollowedBatches

    def __iter__(self) -> Iterator[Any]:
        return (batch.raw for batch in self.batches)


def same_in_each_pass(batches: Batches) -> RepeatedPasses:
    """Require that all passes over some data give the same batches, from now on. Return what
    watches them.
    """
    if batches.passes is None:
        batches.passes = RepeatedPasses(batches.label)
    return batches.passes


def judged_on(batches: Batches) -> Mapping[str, Any]:
    """Return which samples were compared, as report.json has it, after a pass; empty if nothing
    is known of them.
    """
    if batches.passes is None or batches.fingerprint is None:
        return {}
    return batches.passes.judged_on(batches.fingerprint["samples"], batches.skip_len or 0)
