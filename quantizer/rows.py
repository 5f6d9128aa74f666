"""Declares what a range method and a number format are, for `tables` and plug-ins, and looks up
a row of a table. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeVar

_Row = TypeVar("_Row")


@dataclass(frozen=True)
class ObserverClass:
    """A class of the hierarchical form, which names a range method.

    Attributes:
        schemes: the granularities that it supports, the default first.
        meaning: a phrase, for the schema.
        selects: what it selects, for its docstring.
    """

    schemes: tuple[str, ...]
    meaning: str
    selects: str


@dataclass(frozen=True)
class RangeMethod:
    """A value of `method`: how the range of a tensor is found.

    Attributes:
        function: "module:name" of what gets `ObservedValues` of R rows and a
            `QuantizationSpec`, and returns the ends (R,) of each row's range.
        meaning: a phrase, for the schema.
        reads: what it needs of a batch: "extremes", a "histogram" or its "values".
        integers_only: whether it needs integer codes.
        symmetric_only: whether it finds one limit for both signs.
        powers_of_two_only: whether it compares powers of two, and needs such scales.
        device_ready: whether it makes its tensors on the device of what it gets, and waits for
            none. A device then runs it. Other methods run on the CPU.
        observers: the classes that name it in the hierarchical form, by name.
    """

    function: str
    meaning: str
    reads: str = "histogram"
    integers_only: bool = False
    symmetric_only: bool = False
    powers_of_two_only: bool = False
    device_ready: bool = False
    observers: Mapping[str, ObserverClass] = field(default_factory=dict)


@dataclass(frozen=True)
class NumberFormat:
    """A number format of `bits` bits a value, whose largest finite value is `largest`.

    Attributes:
        storage: the name of the smallest torch dtype that holds its codes, which are its values
            times `factor`.
        mantissa: the bits after the binary point; None for formats to which a cast to `storage`
            rounds, and for those with `levels`.
        least: the exponent of the smallest normal value, below which values are
            2^(least - mantissa) apart.
        levels: all values, ascending, of a format that lists them.
        has_minimum: whether a float of each group is subtracted from its values.
        scale_bits: those of a scale that is searched, with its minimum and its share of
            factors; 0 if the scale's type decides.
        group_size: how many values share a scale, for formats that always have groups.
        scale_type, scale_mode: of the scale of a group, where a file does not say.
        word: what files in the hierarchical form call it; empty if that is its name.
        meaning: a phrase, for the schema.
    """

    bits: int
    storage: str
    largest: float
    mantissa: int | None = None
    least: int = 0
    factor: float = 1.0
    levels: tuple[float, ...] = ()
    has_minimum: bool = False
    scale_bits: int = 0
    group_size: int = 0
    scale_type: str = "float"
    scale_mode: str = "floor"
    word: str = ""
    meaning: str = ""

    @property
    def is_cast(self) -> bool:
        """Return whether it needs no scale: a value is cast to it and back."""
        return self.mantissa is None and not self.levels

    @property
    def has_signed_scale(self) -> bool:
        """Return whether one more value is negative, so that scales may have either sign."""
        return bool(self.levels) and -self.levels[0] > self.levels[-1]

    @property
    def emax(self) -> int:
        """Return the exponent of the largest value, from which shared exponents count (OCP MX
        v1.0, table 1).
        """
        return math.frexp(self.largest)[1] - 1


def lookup(table: Mapping[str, _Row], name: str, kind: str) -> _Row:
    """Return the row called `name`. `kind` says in the error what a row is.

    Raises:
        ValueError: there is no such row. The message lists the known names and the closest
            one.

    >>> lookup({"half_even": 1, "half_up": 2}, "halfup", "mode")
    Traceback (most recent call last):
        ...
    ValueError: "halfup" is not a mode; known are half_even, half_up; did you mean "half_up"?
    """
    if name in table:
        return table[name]
    close = get_close_matches(name, table, n=1)
    hint = f'; did you mean "{close[0]}"?' if close else "."
    raise ValueError(f'"{name}" is not a {kind}; known are {", ".join(sorted(table))}{hint}')
