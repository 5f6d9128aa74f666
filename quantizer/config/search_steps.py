"""Declares what plug-ins add to a search for a config that meets gates. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConfigChange:
    """A change of a config that may lose less. A search for gates tries it.

    Attributes:
        text: what it does, as part of a sentence.
        setting: the global setting that it turns on; empty if none.
        algorithm: the entry of an algorithm, which it adds; empty if it adds none.
        fast_finetune: the mode of finetuning that calibrations get; empty if they keep theirs.
        needs_activations: whether activations have to be quantized, or must not be; None if
            either may be.
        most_bits: how many bits the narrowest weights may have.
    """

    text: str
    setting: str = ""
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    fast_finetune: str = ""
    needs_activations: bool | None = None
    most_bits: int = 32


@dataclass(frozen=True)
class ConfigStep:
    """A step of a search for gates: it keeps the best of some changes. Steps of the same name
    are one.

    Attributes:
        name: in tables.
        cost: what it costs to measure and at run time, as words.
        place: in the order from cheap to dear; those of other packages come last.
        changes: in order.
    """

    name: str
    cost: str
    changes: tuple[ConfigChange, ...]
    place: int = 1000
