"""Holds which multiplications an engine computes in integers, with how much work each is, and
the speed of a file against the same network in float.

A file that runs while other programs take the processors has a wrong speed, and its rounds may
agree on it. Linux counts for each thread how long it waits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from quantizer.config.wording import first_names

Shape = Sequence[int]
_RUN = "in int8"
_NO_PRODUCTS = (
    "The network has no multiplications that integers make faster: use the float network where "
    "the device takes it"
)


@dataclass(frozen=True)
class Product:
    """A multiplication that an engine executes: a convolution, a matrix product or a recurrent
    layer.

    Attributes:
        name: of its layer, if it is known.
        operator: the engine's.
        is_integer: whether the engine multiplies integers.
        multiply_adds: how many it takes for the first batch; 0 if that is not known.
    """

    name: str
    operator: str
    is_integer: bool
    multiply_adds: int


@dataclass(frozen=True)
class Kernels:
    """The layers that an engine multiplies in integers, and by layer that it multiplies in
    float, the reason.

    Attributes:
        place: where the integers are, for sentences.
        multiply_adds: by layer, how many it takes for the first batch; 0 or missing if that is
            not known.
    """

    integer: tuple[str, ...]
    floating: dict[str, str]
    place: str = _RUN
    multiply_adds: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """Return whether a runtime has done this, and not only the file says so."""
        return self.place == _RUN

    @property
    def count(self) -> int:
        """Return the number of all multiplications."""
        return len(self.integer) + len(self.floating)

    @property
    def share(self) -> float | None:
        """Return the share of multiplications in integers; None if there are none."""
        return len(self.integer) / self.count if self.count else None

    @property
    def multiply_add_share(self) -> float | None:
        """Return the share of multiply-adds in integers; None if there are no layers, or if the
        number of one of them is not known.

        >>> Kernels(("a",), {"b": ""}, multiply_adds={"a": 30, "b": 10}).multiply_add_share
        0.75
        >>> Kernels(("a",), {"b": ""}, multiply_adds={"a": 30, "b": 0}).multiply_add_share
        """
        integer = [self.multiply_adds.get(name, 0) for name in self.integer]
        floating = [self.multiply_adds.get(name, 0) for name in self.floating]
        sizes = integer + floating
        if not sizes or 0 in sizes:
            return None
        return sum(integer) / sum(sizes)

    @property
    def shares(self) -> tuple[float | None, float | None]:
        """Return the shares of multiplications and of multiply-adds."""
        return self.share, self.multiply_add_share

    @property
    def counted(self) -> str:
        """Return the shares as part of a sentence.

        >>> Kernels(("a",), {"b": ""}, multiply_adds={"a": 30, "b": 10}).counted
        '1 of 2 multiplications in int8, 75 % of the multiply-adds'
        """
        text = f"{len(self.integer)} of {self.count} multiplications {self.place}"
        share = self.multiply_add_share
        if self.floating and share is not None:
            text += f", {_percent(share)} of the multiply-adds"
        return text

    @property
    def summary_lines(self) -> list[str]:
        """Return a sentence about all multiplications, and one for each reason."""
        if not self.count:
            return [_NO_PRODUCTS]
        layers_by_reason: dict[str, list[str]] = {}
        for layer, why in self.floating.items():
            layers_by_reason.setdefault(why, []).append(layer)
        lines = [
            f"in float: {first_names(layers)}: {why}"
            for why, layers in layers_by_reason.items()
        ]
        return [self.counted, *lines]

    def to_json(self) -> dict[str, Any]:
        """Return the layers and the shares."""
        return {
            "integer": list(self.integer),
            "floating": self.floating,
            "share": self.share,
            "multiply_adds": dict(self.multiply_adds),
            "multiply_add_share": self.multiply_add_share,
        }


def _percent(share: float) -> str:
    """Return a share in percent; that of a part is never rounded to all or nothing.

    >>> _percent(0.0142), _percent(0.9999), _percent(0.25), _percent(0.0)
    ('1.4 %', '99.9 %', '25 %', '0 %')
    """
    percent = 100 * share
    if 0 < percent < 0.1:
        return "less than 0.1 %"
    if 99.9 < percent < 100:
        return "99.9 %"
    return f"{percent:.2g} %" if percent < 99 else f"{percent:.3g} %"


def numbered(products: Iterable[Product]) -> list[Product]:
    """Return the products with names of their own: further ones of a layer get a number."""
    counts: dict[str, int] = {}
    named: list[Product] = []
    for product in products:
        count = counts.get(product.name, 0) + 1
        counts[product.name] = count
        name = product.name if count == 1 else f"{product.name}#{count}"
        named.append(replace(product, name=name))
    return named


def einsum_multiply_adds(equation: str, shapes: Sequence[Shape | None]) -> int:
    """Return the multiply-adds of an Einsum, which are the product of the sizes of all its
    indices; 0 if a shape is not known.

    >>> einsum_multiply_adds("btd,edh->ebth", [[4, 12, 32], [2, 32, 48]])
    147456
    >>> einsum_multiply_adds("...ij,...jk", [[5, 2, 3], [5, 3, 4]])
    120
    """
    operands = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    others = 1
    for indices, shape in zip(operands, shapes, strict=True):
        if shape is None:
            return 0
        before, _, after = indices.partition("...")
        count = len(shape) - len(before) - len(after)
        others = max(others, prod(shape[len(before) : len(before) + count]))
        named = [*shape[: len(before)], *shape[len(before) + count :]]
        sizes.update(zip(before + after, named, strict=True))
    return others * prod(sizes.values())


# With fewer rounds there is no spread to judge by.
MIN_ROUNDS = 3
# The largest ratio of upper to lower quartile. Beyond it another run would give another speed.
MAX_SPREAD = 1.25
# The largest speed-up that kernels can give. Beyond it something else has slowed float down.
MAX_SPEEDUP = 20.0
# The largest share of the time in which threads may wait for a processor that others use.
MAX_WAITED = 0.25
# Below this share of float's speed, the text says how many times slower the file is.
MUCH_SLOWER = 0.1
# A call of fewer seconds is mostly what each call costs.
_LONG_CALL = 1e-4
BUSY = "no speed is given: the machine is too busy to measure it"


@dataclass(frozen=True)
class Speed:
    """The speed of a file as a multiple of the float network's.

    Attributes:
        ratio: the median over rounds of float's time divided by the file's.
        low, high: the lower and upper quartile of these ratios.
        rounds: their number.
        waited: how long threads waited for processors that other programs used, as a share of
            the time that was measured.
        faster: a setting, and the speed that the file would have with it; None if there is no
            such setting on this processor.
        remedy: the setting that keeps a file from being slower than float; empty if there is
            none, or the file is not slower.
        float_seconds: of a run of the float network, as the median; 0 if they are not known.
        seconds: of a run of the file, as the median.
        threads: that ran both; 0 if they are those of a default session.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    waited: float = 0.0
    faster: tuple[str, Speed] | None = None
    remedy: str = ""
    float_seconds: float = 0.0
    threads: int = 0
    seconds: float = 0.0

    @classmethod
    def of(
        cls, ours: Sequence[float], floats: Sequence[float], *, waited: float = 0.0
    ) -> Speed | None:
        """Return the speed, or None if there are too few rounds.

        Args:
            ours: seconds of the file, one for each round.
            floats: seconds of the float network, in the same rounds.
            waited: the share of the time in which threads waited for processors.

        >>> speed = Speed.of([1.0, 1.0, 1.0], [1.5, 2.0, 2.5])
        >>> speed.ratio, speed.low, speed.high, speed.rounds, speed.float_seconds
        (2.0, 1.75, 2.25, 3, 2.0)
        """
        times = zip(ours, floats, strict=True)
        ratios = [theirs / our for our, theirs in times if our > 0 and theirs > 0]
        if len(ratios) < MIN_ROUNDS:
            return None
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        return cls(
            median(ratios),
            low,
            high,
            len(ratios),
            waited,
            float_seconds=median(floats),
            seconds=median(ours),
        )

    @property
    def asks_for_floats(self) -> bool:
        """Return whether the file is slower than float, in calls that take longer than what
        each call costs in any file.
        """
        return bool(self.remedy) and self.float_seconds >= _LONG_CALL

    @property
    def is_clear(self) -> bool:
        """Return whether rounds agree, and had the processors, so that a speed is stated."""
        do_agree = self.high <= MAX_SPREAD * self.low and self.ratio < MAX_SPEEDUP
        return do_agree and self.waited <= MAX_WAITED

    @property
    def text(self) -> str:
        """Return the speed with its spread in words, or why there is none.

        >>> Speed(1.8, 1.75, 1.86, 7).text
        '1.8x the speed of float (1.8 to 1.9 in 7 rounds)'
        >>> Speed(0.04, 0.0399, 0.0401, 7).text
        '25 times slower than float (24.9 to 25.1 in 7 rounds)'
        >>> Speed(1.8, 0.9, 3.1, 7).text
        'no speed is given: the machine is too busy to measure it'
        >>> fastest = Speed(2.5, 2.4, 2.6, 7)
        >>> Speed(1.2, 1.1, 1.2, 7, faster=("--onnx_weights int8", fastest)).text
        '1.2x the speed of float (1.1 to 1.2 in 7 rounds); 2.5x with --onnx_weights int8'
        >>> Speed(1.8, 1.75, 1.86, 7, threads=1).text
        '1.8x the speed of float (1.8 to 1.9 in 7 rounds, one thread)'
        >>> Speed(0.6, 0.58, 0.61, 7, remedy="--onnx_profile tuned").text
        '0.60x the speed of float (0.58 to 0.61 in 7 rounds); slower: use --onnx_profile tuned'
        """
        if not self.is_clear:
            return BUSY
        text = self._ratio_text()
        if self.faster is not None:
            setting, speed = self.faster
            text += f"; {speed.ratio:.1f}x with {setting}"
        if self.remedy:
            text += f"; slower: use {self.remedy}"
        return text

    def _ratio_text(self) -> str:
        rounds = f"{self.rounds} rounds"
        if self.threads == 1:
            rounds += ", one thread"
        if self.ratio < MUCH_SLOWER:
            spread = f"{1 / self.high:.1f} to {1 / self.low:.1f} in {rounds}"
            return f"{1 / self.ratio:.0f} times slower than float ({spread})"
        digits = 1 if self.ratio >= 1 else 2
        spread = f"{self.low:.{digits}f} to {self.high:.{digits}f}"
        return f"{self.ratio:.{digits}f}x the speed of float ({spread} in {rounds})"


_NANOSECONDS = 1e9


def waited_seconds(process: int | None = None) -> float:
    """Return for how many seconds the threads of a process were ready and did not run.

    The waits of all threads since their start are added up. Source: Linux,
    Documentation/scheduler/sched-stats.rst. Other systems do not count them: there it is 0.

    Args:
        process: its number; None for this one.
    """
    number = os.getpid() if process is None else process
    nanoseconds = 0
    for path in Path(f"/proc/{number}/task").glob("*/schedstat"):
        try:
            _, waited, _ = path.read_text("ascii").split()
        except (OSError, ValueError):
            # A thread has ended, or the kernel does not count
            continue
        nanoseconds += int(waited)
    return nanoseconds / _NANOSECONDS
