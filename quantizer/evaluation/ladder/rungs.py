"""The values that a ladder of configs is made of: a rung, a trial of a changed one, and what
was measured on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from quantizer.calibration.finetuning import with_finetuning
from quantizer.config.document.document import Document
from quantizer.config.json_types import JsonMapping
from quantizer.config.load import check_document
from quantizer.config.model import Config
from quantizer.graph.ir import Graph
from quantizer.plan.model import Plan
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch

LEAST_GAIN = 0.01
"""The share of the distance from the gates that counts as a gain; less is chance."""
TIE_DB = 0.1
"""If the gates gain less, a higher SQNR of the outputs decides, by so many dB."""


@dataclass(frozen=True)
class Rung:
    """A config, and the mode of finetuning that it is calibrated with.

    Attributes:
        document: the config, in its form's words.
        fast_finetune: "adaround", "adaquant" or None.
    """

    document: JsonMapping
    fast_finetune: str | None = None

    @property
    def config(self) -> Config:
        """Return the checked config.

        Raises:
            ConfigError: it has errors.
            UsageError: it cannot be finetuned so.
        """
        document = Document.of(self.document, "the changed config")
        config = check_document(document).require()
        config, _ = with_finetuning(config, None, self.fast_finetune)
        return config

    @property
    def key(self) -> str:
        """Return a text that is the same for equal rungs only."""
        return json.dumps([self.document, self.fast_finetune], default=str)


@dataclass(frozen=True)
class Trial:
    """A change that may lose less.

    Attributes:
        change: what it does to the config, as part of a sentence.
        apply: returns the changed rung; it may raise `UsageError` if the form has no word for
            it.
        undoes: the name of the step whose change does not last; empty if all do.
    """

    change: str
    apply: Callable[[Rung], Rung]
    undoes: str = ""


@dataclass(frozen=True)
class Judged:
    """What was measured on a rung.

    Attributes:
        metrics: all figures of a test.
        shortfalls: for each gate its distance from the bound, relative to it; 0 if it holds.
        weight_bytes: the size of all parameters.
    """

    metrics: Mapping[str, float]
    shortfalls: tuple[float, ...]
    weight_bytes: int

    @property
    def is_met(self) -> bool:
        """Return whether all gates hold."""
        return not any(self.shortfalls)

    @property
    def sqnr_db(self) -> float | None:
        """Return the SQNR of the worst output; None if no output has one."""
        return self.metrics.get("sqnr_db")

    def is_better_than(self, other: Judged) -> bool:
        """Return whether no gate falls shorter than before, and together they come nearer to
        their bounds; or they are as near, with a higher SQNR.
        """
        pairs = zip(self.shortfalls, other.shortfalls, strict=True)
        # NaN is worse than any number
        if not all(after <= before for after, before in pairs):
            return False
        distance = math.fsum(other.shortfalls)
        if math.fsum(self.shortfalls) < distance * (1 - LEAST_GAIN):
            return True
        before_db = other.sqnr_db
        after_db = self.sqnr_db
        if before_db is None or after_db is None:
            return False
        return after_db > before_db + TIE_DB


@dataclass(frozen=True)
class Ground:
    """What all rungs of a ladder share.

    Attributes:
        original: the model as traced.
        judge: calibrates and tests a rung.
        calibrate: calibrates a rung, in memory.
        batches: opens a pass over the calibration data, on the model's device.
        refusal: returns why the targets cannot hold a plan; empty if they can.
    """

    original: Graph
    judge: Callable[[Rung], Judged]
    calibrate: Callable[[Rung], tuple[Calibrated, Plan]]
    batches: Callable[[], Iterator[Batch]]
    refusal: Callable[[Plan], str]


@dataclass(frozen=True)
class Standing:
    """The best rung so far, from which the trials of a step start.

    Attributes:
        ground: of the ladder.
        rung: the best one so far.
        plan: of its config, before algorithms.
        attempt: measures a changed rung; the result of an earlier trial is not measured again.
            It may raise `OutOfTimeError`, and what calibration raises.
    """

    ground: Ground
    rung: Rung
    plan: Plan
    attempt: Callable[[Rung], Judged]


class OutOfTimeError(Exception):
    """A trial would begin after the time budget."""
