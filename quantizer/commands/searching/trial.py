"""The values that a search is made of: a config to try, a change of one, and what was measured
on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from quantizer.config.document.document import Document
from quantizer.config.json_types import JsonMapping
from quantizer.config.load import check_document
from quantizer.config.model import ResolvedConfig
from quantizer.config.run_options import with_finetuning

LEAST_GAIN = 0.01
"""A change gains something if it takes away this share of the distance from the gates. Less is
chance.
"""
TIE_DB = 0.1
"""If a change gains less than that, it has to raise the SQNR of the outputs by so many dB."""


@dataclass(frozen=True)
class Trial:
    """A config, and the mode of finetuning that it is calibrated with.

    Attributes:
        document: the config, in its form's words.
        fast_finetune: "adaround", "adaquant" or None.
    """

    document: JsonMapping
    fast_finetune: str | None = None

    @cached_property
    def config(self) -> ResolvedConfig:
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
        """Return a text that is the same for equal trials only."""
        return json.dumps([self.document, self.fast_finetune], default=str)


@dataclass(frozen=True)
class Change:
    """A change of a config that may come nearer to the gates.

    Attributes:
        text: what it does to the config, as part of a sentence.
        apply: returns the changed trial. It raises `UsageError` if the config's form has no
            word for the change.
        undoes: the name of the earlier step whose change this one removes; empty if it removes
            none.
    """

    text: str
    apply: Callable[[Trial], Trial]
    undoes: str = ""


@dataclass(frozen=True)
class Figures:
    """What was measured on a trial.

    Attributes:
        metrics: the figures of a test, by name.
        shortfalls: for each gate the distance of its metric from the bound, as a share of the
            bound; 0 if the gate holds, infinity if nothing could be measured.
        weight_bytes: the bytes of all parameters, quantized.
        missed_by_float: the gates that do not hold for the float network either.
        parts: the figures of single outputs and parts.
    """

    metrics: Mapping[str, float]
    shortfalls: tuple[float, ...]
    weight_bytes: int
    missed_by_float: tuple[str, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def gated(self) -> Mapping[str, float]:
        """Return all figures, by the names that gates use."""
        return {**self.metrics, **self.parts}

    @property
    def is_met(self) -> bool:
        """Return whether all gates hold."""
        return not any(self.shortfalls)

    def is_better_than(self, other: Figures) -> bool:
        """Return whether no metric is farther from its bound than in `other`, and something is
        gained: less distance in all, or else a higher SQNR of the outputs.

        >>> before = Figures({"sqnr_db": 20.0}, (0.5,), 100)
        >>> Figures({"sqnr_db": 20.0}, (0.4,), 100).is_better_than(before)
        True
        >>> Figures({"sqnr_db": 21.0}, (0.5,), 100).is_better_than(before)
        True
        """
        pairs = zip(self.shortfalls, other.shortfalls, strict=True)
        # Written with `not`, so that NaN is worse than any number
        if not all(after <= before for after, before in pairs):
            return False
        distance_before = math.fsum(other.shortfalls)
        if math.fsum(self.shortfalls) < distance_before * (1 - LEAST_GAIN):
            return True
        before_db = other.metrics.get("sqnr_db")
        after_db = self.metrics.get("sqnr_db")
        if before_db is None or after_db is None:
            return False
        return after_db > before_db + TIE_DB
