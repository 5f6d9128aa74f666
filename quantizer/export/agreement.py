"""How far what a file computes is from test mode, over any number of batches. What of it is rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.config.wording import shortened
from quantizer.engine.exact import LayerCodes
from quantizer.engine.noise import Noise
from quantizer.export.speed import Speed

WITHIN = 0.999
"""The share of values that may be a step off at most: kernels of integers round ties and biases otherwise."""
CHUNK = 1 << 20
"""Values that are compared at once, in float64."""
EDGE = 1.001
"""One step of a scale, with room for the float arithmetic that multiplied it."""


@dataclass(frozen=True)
class Kernels:
    """How a runtime multiplies: the layers that it does in integers, and why not, of each of the others."""

    integer: tuple[str, ...]
    floating: dict[str, str]

    @property
    def count(self) -> int:
        """Of all multiplications."""
        return len(self.integer) + len(self.floating)

    @property
    def share(self) -> float:
        """Of those in integers; 1 where there are none at all."""
        return len(self.integer) / self.count if self.count else 1.0

    @property
    def lines(self) -> list[str]:
        """A sentence on all, and one for each reason."""
        reasons: dict[str, list[str]] = {}
        for layer, why in self.floating.items():
            reasons.setdefault(why, []).append(layer)
        texts = [f"in float: {shortened(layers)}: {why}" for why, layers in reasons.items()]
        return [f"{len(self.integer)} of {self.count} multiplications in int8", *texts]

    def to_json(self) -> dict[str, Any]:
        """The layers and the share."""
        return {"integer": list(self.integer), "floating": self.floating, "share": self.share}


@dataclass(frozen=True)
class Verification:
    """A file against test mode: `compared` says what of it; differences are absolute, shares go from 0 to 1.

    `equal` is the share of equal values; `within_step` of those at most one step of their scale away, None unless all
    have a scale or are integers; `sqnr_db` is of the floating-point tensors, infinite without a difference, None
    without such tensors; `top1_agreement` is the share of samples with the same class, None if the first tensor has no
    row of classes for each; `float_sqnr_db` is of the file against the float network, where that decides.
    `default_session` has the figures of a runtime as its users start it, where those beside it are of one without
    optimizations: also its `kernels`, the codes of its `layers`, each made of the same codes as in test mode, and its
    `speed` against the float network, None if it was not measured. `remarks` say how a file is read;
    `engines` are others that are installed and may read it.
    """

    compared: str
    max_difference: float
    mean_difference: float
    equal: float
    within_step: float | None = None
    sqnr_db: float | None = None
    top1_agreement: float | None = None
    float_sqnr_db: float | None = None
    default_session: Verification | None = None
    kernels: Kernels | None = None
    layers: tuple[LayerCodes, ...] = ()
    speed: Speed | None = None
    remarks: tuple[str, ...] = ()
    engines: tuple[EngineCheck, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The figures it has but the speed, infinite ones left out: without a difference there is no ratio to it."""
        left_out = (None, math.inf, -math.inf, ())
        found = {name: value for name, value in vars(self).items() if name != "speed" and value not in left_out}
        parts = {"default_session": self.default_session, "kernels": self.kernels}
        found |= {name: part.to_json() for name, part in parts.items() if part is not None}
        if self.engines:
            found["engines"] = [check.to_json() for check in self.engines]
        if self.layers:
            counted = [{name: value for name, value in vars(row).items() if value is not None} for row in self.layers]
            found |= {"layers": counted, "first_differing": self.first_differing and self.first_differing.layer}
        return found

    @property
    def first_differing(self) -> LayerCodes | None:
        """The first layer, in order of execution, whose codes are not those of test mode but for rounding."""
        return next((row for row in self.layers if row.equal < WITHIN or row.most_steps > 1), None)

    @property
    def lines(self) -> list[str]:
        """Sentences on the kernels and the layers."""
        found = [] if self.kernels is None else self.kernels.lines
        if found and self.speed is not None:
            found[0] += f"; {self.speed.text}"
        if codes := sum(row.codes for row in self.layers):
            equal = 1 - sum(row.differing for row in self.layers) / codes
            found.append(f"layer by layer, {equal:.4%} of {codes} codes are equal")
        if first := self.first_differing:
            found[-1] += f"; the first that differs: {first.layer}: {first.equal:.2%}, up to {first.most_steps} steps"
        return found

    def figures(self) -> str:
        """The figures as part of a sentence."""
        words = [f"{self.compared} differ by at most {self.max_difference:.3g}, {self.equal:.2%} are equal"]
        words += [] if self.within_step is None else [f"{self.within_step:.2%} are within one step"]
        words += [] if self.sqnr_db is None or self.sqnr_db == math.inf else [f"SQNR {self.sqnr_db:.1f} dB"]
        words += [] if self.top1_agreement is None else [f"{self.top1_agreement:.2%} keep their top-1 class"]
        words += [] if self.float_sqnr_db is None else [f"{self.float_sqnr_db:.1f} dB from the float network"]
        return ", ".join(words)


@dataclass(frozen=True)
class EngineCheck:
    """How another engine reads a file: `figures` against test mode over one call, or its `failure` to run it.

    `agrees` says whether they differ by no more than rounding; `layer` is the first that does, if that can be told.
    """

    engine: str
    agrees: bool
    figures: Verification | None = None
    failure: str = ""
    layer: str = ""

    @property
    def line(self) -> str:
        """A sentence on it."""
        if self.figures is None:
            return f"{self.engine} cannot run it: {self.failure}"
        if self.agrees:
            return f"in {self.engine}, {self.figures.figures()}"
        where = f"; the first layer that differs is {self.layer}" if self.layer else ""
        return f"{self.engine} computes something else: {self.figures.figures()}{where}"

    def to_json(self) -> dict[str, Any]:
        """All that is known."""
        figures = {} if self.figures is None else self.figures.to_json()
        others = {"failure": self.failure, "layer": self.layer}
        stated = {name: text for name, text in others.items() if text}
        return {"engine": self.engine, "agrees": self.agrees, **stated, **figures}


class Agreement:
    """Adds up differences; `steps` has the distance of two codes for each tensor, or None."""

    def __init__(self, compared: str, steps: Sequence[float | None] = ()) -> None:
        self.compared, self.steps = compared, steps
        self.noise = Noise()
        self.largest, self.total, self.floating = 0.0, 0.0, False
        self.count = self.equal = self.stepped = self.within = self.rows = self.agreeing = 0

    def add(self, expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Take in one batch, pairwise; NaN and infinity equal themselves, complex numbers are pairs of reals.

        Raises:
            ValueError: the number of tensors or a shape differs.
        """
        steps = self.steps if len(self.steps) == len(expected) else [None] * len(expected)
        pairs = zip(map(_in_reals, expected), map(_in_reals, found), steps, strict=True)
        for index, (want, got, step) in enumerate(pairs):
            if want.shape != got.shape:
                raise ValueError(f"The file gives shape {tuple(got.shape)} where test mode gives {tuple(want.shape)}.")
            if index == 0 and want.dim() == 2 and want.shape[1] > 1:
                self.rows += len(want)
                self.agreeing += int((want.argmax(1) == got.argmax(1)).sum())
            parts = (torch.split(tensor.reshape(-1), CHUNK) for tensor in (want, got))
            for part, other in zip(*parts, strict=True):
                self._add(part, other, step)

    def _add(self, want: Tensor, got: Tensor, step: float | None) -> None:
        if not want.is_floating_point():
            step = 0.0
        signal, got = want.double(), got.double()
        same = (signal == got) | (signal.isnan() & got.isnan())
        difference = torch.where(same, 0.0, (signal - got).abs())
        if difference.numel():
            self.largest = max(self.largest, float(difference.nan_to_num(math.inf).max()))
        self.total += float(difference.sum())
        self.equal += int(same.sum())
        self.count += want.numel()
        if step is not None:
            self.stepped += want.numel()
            self.within += int((difference <= EDGE * step).sum())
        if want.is_floating_point():
            self.floating = True
            self.noise.signal += float(torch.where(signal.isfinite(), signal, 0.0).square().sum())
            self.noise.error += float(difference.square().sum())

    def result(self) -> Verification:
        """The figures of all batches."""
        count = max(self.count, 1)
        sqnr = self.noise.sqnr_db if math.isfinite(self.noise.error) else -math.inf
        return Verification(
            self.compared,
            self.largest,
            self.total / count,
            self.equal / count if self.count else 1.0,
            self.within / count if self.stepped == self.count else None,
            sqnr if self.floating else None,
            self.agreeing / self.rows if self.rows else None,
        )


def _in_reals(values: Tensor) -> Tensor:
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def verify(compared: str, expected: Iterable[Tensor], found: Iterable[Tensor]) -> Verification:
    """Compare tensors that should be equal, pairwise; one pair is in memory at a time if they are made so.

    Raises:
        ValueError: the number of tensors or a shape differs.
    """
    agreement = Agreement(compared)
    for want, got in zip(expected, found, strict=True):
        agreement.add([want], [got])
    every = agreement.result()
    return Verification(compared, every.max_difference, every.mean_difference, every.equal)
