"""What a calibration is asked to do, and what its steps have found so far. Each step of the
pipeline fills in more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from quantizer.algorithms.adjustment import Adjustment
from quantizer.calibration import fingerprint
from quantizer.calibration.absorption import Record
from quantizer.calibration.events import Events, Logged, Snapshot, Stage
from quantizer.calibration.level_channels import Exponents
from quantizer.calibration.observing import Calibration
from quantizer.calibration.snapshots import CheckpointStore, shared
from quantizer.calibration.solution import Solution
from quantizer.calibration.target import Target
from quantizer.config.diagnostics import Diagnostic
from quantizer.config.model import Config
from quantizer.distributed import ALONE, Ranks
from quantizer.errors import DataError
from quantizer.plan.model import JoinDecision, Plan
from quantizer.sources.batches import Batch
from quantizer.sources.data import Batches


@dataclass(frozen=True)
class Statistics:
    """The state of a calibration that has seen so many `batches`."""

    state: Mapping[str, Tensor]
    batches: int


@dataclass
class Job:
    """One calibration.

    Args:
        target: what is quantized.
        config: how.
        batches: the calibration data, or an example input where no data are needed.
        events: who follows the run.
        checkpoints: where interrupted stages leave what they found; None to leave nothing.
        seed: of all randomness.
        fast_finetune: "adaround", "adaquant" or None.
        dpu_accuracy: the level that the config and `fast_finetune` were raised to, or None.
        facts: what else the results depend on, for checkpoints.
        findings: on the config, from reading it.
        ranks: the processes that share the work.
        memory: bytes of the network's values that may stay in memory; None for half of what is
            free.
        statistics: what calibrations before have seen, in their order, instead of data.
        absorption: which layers take up high biases, as `calibration.absorption` records it;
            None until data have decided.
        levels: by how much channels are levelled, as `calibration.level_channels` records it;
            None until data have decided.
        confirm: called when the plan is made and nothing is changed yet; it may raise.
        plan, adjustment, calibration, joins, solution, is_finetuned: found by the steps.
    """

    target: Target
    config: Config
    batches: Batches
    events: Events = field(default_factory=Logged)
    checkpoints: CheckpointStore | None = None
    seed: int = 0
    fast_finetune: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Diagnostic, ...] = ()
    confirm: Callable[[Job], None] = lambda job: None
    ranks: Ranks = ALONE
    memory: int | None = None
    dpu_accuracy: str | None = None
    statistics: tuple[Statistics, ...] = ()
    absorption: Record | None = None
    levels: Exponents | None = None
    plan: Plan = field(init=False)
    adjustment: Adjustment | None = None
    calibration: Calibration = field(init=False)
    joins: Mapping[str, JoinDecision] = field(default_factory=dict)
    solution: Solution = field(init=False)
    is_finetuned: bool = False

    @property
    def algorithms_need_data(self) -> bool:
        """Whether an algorithm of the config looks at values."""
        return any(settings.needs_data for settings in self.config.algorithms)

    @property
    def needs_data(self) -> bool:
        """Whether batches are read for their values, and not only the first one for its
        shape.
        """
        return (
            self.plan.needs_data or self.fast_finetune is not None or self.algorithms_need_data
        )

    @property
    def header(self) -> dict[str, Any]:
        """What results say of the run: the model, the seed, the data, and whether weights are
        finetuned.
        """
        return {
            **self.made_of,
            "seed": self.seed,
            "data": self.batches.fingerprint if self.needs_data else None,
            "stamp": self.batches.stamp if self.needs_data else None,
            "fast_finetune": self.fast_finetune if self.is_finetuned else None,
            "dpu_accuracy": self.dpu_accuracy,
        }

    def stage(self, name: str, total: int | None, unit: str = "batches", **more: Any) -> Stage:
        """A part of this run, reported to its followers."""
        return Stage(self.events, name, total, unit, **more)

    @cached_property
    def made_of(self) -> dict[str, dict[str, str]]:
        """Of what model: a second for each GB."""
        return fingerprint.model(self.target.original)

    @cached_property
    def key(self) -> Mapping[str, Any]:
        """What every checkpoint of this run belongs to."""
        return {
            **{name: fingerprint.digest(digests) for name, digests in self.made_of.items()},
            "config": fingerprint.config(self.config),
            **self.facts,
        }

    def restored(self, saved_as: str, **more: Any) -> Snapshot | None:
        """What a stopped run has left of a stage, where this one resumes it; `more` is what
        else that depends on.

        Raises:
            ResultError: it is damaged, or belongs to another run.
        """
        found = (
            self.checkpoints.restore(saved_as, {**self.key, **more})
            if self.checkpoints
            else None
        )
        place = f"the checkpoint of {saved_as}"
        if not self.ranks.broadcast(found is not None, place):
            return None
        return shared(found or Snapshot({}, {}), self.ranks, place)

    def first_batch(self) -> Batch:
        """On the target's device.

        Raises:
            DataError: there is none.
        """
        return self.batches.first().to(self.target.original.device)

    def read(self) -> Iterator[Batch]:
        """A pass over the calibration data, on the target's device."""
        device = self.target.original.device
        return (batch.to(device) for batch in self.batches)

    def read_again(self, step: str, remedy: str) -> Iterator[Batch]:
        """Another pass for a step that needs the same batches.

        Raises:
            DataError: they are others than calibration saw.
        """
        seen = self.batches.fingerprint
        yield from self.read()
        if seen is not None and self.batches.fingerprint != seen:
            raise DataError(
                f"{self.batches.label} gives other batches when it is read again, and {step} "
                "reads it more than once",
                help=f"draw random crops and orders from a fixed seed, or {remedy}",
            )
