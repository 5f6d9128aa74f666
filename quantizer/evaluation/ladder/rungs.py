"""The values that a ladder of configs is made of: a rung, a trial of a changed one, and what
was measured on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from quantizer.config.document.document import Document
from quantizer.config.dpu_accuracy import with_finetuning
from quantizer.config.json_types import JsonMapping
from quantizer.config.load import check_document
from quantizer.config.model import Algorithm, Config
from quantizer.graph.ir import Graph
from quantizer.plan.model import Plan
from quantizer.results.calibrated import Calibrated
from quantizer.sources.batches import Batch

LEAST_GAIN = 0.01
"""A change gains something if it takes away this share of the distance from the gates. Less is
chance.
"""
TIE_DB = 0.1
"""If a change gains less than that, it has to raise the SQNR of the outputs by so many dB."""


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
    """A change of a config that may come nearer to the gates.

    Attributes:
        change: what it does to the config, as part of a sentence.
        apply: returns the changed rung. It raises `UsageError` if the config's form has no word
            for the change.
        undoes: the name of the earlier step whose change this one removes; empty if it removes
            none.
    """

    change: str
    apply: Callable[[Rung], Rung]
    undoes: str = ""


@dataclass(frozen=True)
class Judged:
    """What was measured on a rung.

    Attributes:
        metrics: all figures of a test, by name.
        shortfalls: for each gate the distance of its metric from the bound, as a share of the
            bound; 0 if the gate holds, infinity if nothing could be measured.
        weight_bytes: the bytes of all parameters, quantized.
        missed_by_float: the gates that do not hold for the float network either.
    """

    metrics: Mapping[str, float]
    shortfalls: tuple[float, ...]
    weight_bytes: int
    missed_by_float: tuple[str, ...] = ()

    @property
    def is_met(self) -> bool:
        """Return whether all gates hold."""
        return not any(self.shortfalls)

    @property
    def sqnr_db(self) -> float | None:
        """Return the SQNR of the worst output; None if no output has one."""
        return self.metrics.get("sqnr_db")

    def is_better_than(self, other: Judged) -> bool:
        """Return whether no metric is farther from its bound than in `other`, and something is
        gained: less distance in all, or else a higher SQNR of the outputs.

        >>> before = Judged({"sqnr_db": 20.0}, (0.5,), 100)
        >>> Judged({"sqnr_db": 20.0}, (0.4,), 100).is_better_than(before)
        True
        >>> Judged({"sqnr_db": 21.0}, (0.5,), 100).is_better_than(before)
        True
        """
        pairs = zip(self.shortfalls, other.shortfalls, strict=True)
        # Written with `not`, so that NaN is worse than any number
        if not all(after <= before for after, before in pairs):
            return False
        distance_before = math.fsum(other.shortfalls)
        if math.fsum(self.shortfalls) < distance_before * (1 - LEAST_GAIN):
            return True
        before_db = other.sqnr_db
        after_db = self.sqnr_db
        if before_db is None or after_db is None:
            return False
        return after_db > before_db + TIE_DB


@dataclass(frozen=True)
class Ground:
    """What all rungs of a ladder share: the model, its data, and how a rung is measured.

    Attributes:
        original: the traced model, before passes.
        judge: calibrates and tests a rung.
        calibrate: calibrates a rung in memory, and returns its plan, too.
        batches: begins a pass over the calibration data, on the model's device.
        refusal: returns why a target cannot hold a plan, or what its algorithms make of it. The
            text is empty if all can.
    """

    original: Graph
    judge: Callable[[Rung], Judged]
    calibrate: Callable[[Rung], tuple[Calibrated, Plan]]
    batches: Callable[[], Iterator[Batch]]
    refusal: Callable[[Plan, Iterable[Algorithm]], str]


@dataclass(frozen=True)
class Standing:
    """The best rung so far, from which the trials of a step start.

    Attributes:
        ground: what all rungs share.
        rung: the best rung so far.
        plan: the plan of its config, before algorithms.
        attempt: returns what is measured on a rung, which it measures once only. It raises
            `OutOfTimeError` after the time budget, and what calibration raises.
    """

    ground: Ground
    rung: Rung
    plan: Plan
    attempt: Callable[[Rung], Judged]


class OutOfTimeError(Exception):
    """A rung would be measured after the time budget."""
