"""How far what a file computes is from test mode, over any number of batches. What of it is
rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_comparison import OutputComparison, Recorder
from quantizer.config.wording import shortened
from quantizer.evaluation.exact import LayerCodes
from quantizer.export.part_agreement import WITHIN, PartAgreement
from quantizer.export.speed import Speed
from quantizer.graph.output_parts import Output


@dataclass(frozen=True)
class Kernels:
    """How a runtime multiplies: the layers that it does in integers, and why not, of each of
    the others.
    """

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
    """A file against test mode: `compared` says what of it; differences are absolute, shares go
    from 0 to 1.

    `equal` is the share of equal values; `within_step` of those at most one step of their scale
    away, None unless all have a scale or are integers; `sqnr_db` is of the worst of the
    floating-point tensors and their `parts`, infinite without a difference, None without such
    tensors, `sqnr_db_pooled` of all together; `top1_agreement` is the share of samples with the
    same class, None if the first tensor has no row of classes for each; `float_sqnr_db` is of
    the file against the float network, where that decides. `default_session` has the figures of
    a runtime as its users start it, where those beside it are of one without optimizations:
    also its `kernels`, the codes of its `layers`, each made of the same codes as in test mode,
    and its `speed` against the float network, None if it was not measured. `remarks` say how a
    file is read; `engines` are others that are installed and may read it.
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
    sqnr_db_pooled: float | None = None
    parts: tuple[PartAgreement, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The figures it has but the speed, infinite ones left out: without a difference there
        is no ratio to it.
        """
        left_out = (None, math.inf, -math.inf, ())
        apart = ("speed", "parts")
        found = {
            name: value
            for name, value in vars(self).items()
            if name not in apart and value not in left_out
        }
        if len(self.parts) > 1:
            found["parts"] = [part.to_json() for part in self.parts]
        parts = {"default_session": self.default_session, "kernels": self.kernels}
        found |= {name: part.to_json() for name, part in parts.items() if part is not None}
        if self.engines:
            found["engines"] = [check.to_json() for check in self.engines]
        if self.layers:
            counted = [
                {name: value for name, value in vars(row).items() if value is not None}
                for row in self.layers
            ]
            found |= {
                "layers": counted,
                "first_differing": self.first_differing and self.first_differing.layer,
            }
        return found

    @property
    def worst_part(self) -> PartAgreement | None:
        """The part with the lowest SQNR, None if none has one."""
        rated = [part for part in self.parts if part.sqnr_db is not None]
        return min(rated, key=lambda part: part.sqnr_db or 0.0, default=None)

    @property
    def first_differing(self) -> LayerCodes | None:
        """The first layer, in order of execution, whose codes are not those of test mode but
        for rounding.
        """
        return next(
            (row for row in self.layers if row.equal < WITHIN or row.most_steps > 1), None
        )

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
            found[-1] += (
                f"; the first that differs: {first.layer}: {first.equal:.2%}, up to "
                f"{first.most_steps} steps"
            )
        return found

    def figures(self) -> str:
        """The figures as part of a sentence."""
        words = [
            f"{self.compared} differ by at most {self.max_difference:.3g}, {self.equal:.2%} "
            "are equal"
        ]
        words += (
            [] if self.within_step is None else [f"{self.within_step:.2%} are within one step"]
        )
        if self.sqnr_db is not None and self.sqnr_db != math.inf:
            worst = self.worst_part
            where = (
                "" if worst is None or len(self.parts) == 1 else f" in {worst.name}, the worst"
            )
            words.append(f"SQNR {self.sqnr_db:.1f} dB{where}")
        words += (
            []
            if self.top1_agreement is None
            else [f"{self.top1_agreement:.2%} keep their top-1 class"]
        )
        words += (
            []
            if self.float_sqnr_db is None
            else [f"{self.float_sqnr_db:.1f} dB from the float network"]
        )
        return ", ".join(words)


@dataclass(frozen=True)
class EngineCheck:
    """How another engine reads a file: `figures` against test mode over one call, or its
    `failure` to run it.

    These are computed in float32 wherever nothing is quantized, and `reads` says whether they
    differ by no more than rounding; `layer` is the first that does, if that can be told.
    `defaults` are the figures of the engine's own settings, which may be coarser. `agrees` says
    whether neither differs by more than quantization costs.
    """

    engine: str
    agrees: bool
    figures: Verification | None = None
    failure: str = ""
    layer: str = ""
    defaults: Verification | None = None
    reads: bool = True

    @property
    def line(self) -> str:
        """A sentence on it."""
        if self.figures is None:
            return f"{self.engine} cannot run it: {self.failure}"
        if not self.reads:
            where = f"; the first layer that differs is {self.layer}" if self.layer else ""
            return f"{self.engine} computes something else: {self.figures.figures()}{where}"
        if self.defaults is None:
            return f"in {self.engine}, {self.figures.figures()}"
        in_float32 = f"in {self.engine} in float32, {self.figures.figures()}"
        if self.agrees:
            return f"{in_float32}; by its default settings, {self.defaults.figures()}"
        return (
            f"{self.engine} computes something else by its default settings: "
            f"{self.defaults.figures()}; {in_float32}: compile it with "
            "INFERENCE_PRECISION_HINT f32"
        )

    def to_json(self) -> dict[str, Any]:
        """All that is known."""
        figures = {} if self.figures is None else self.figures.to_json()
        others = {"failure": self.failure, "layer": self.layer}
        stated = {name: text for name, text in others.items() if text}
        found = {"engine": self.engine, "agrees": self.agrees, **stated, **figures}
        return found if self.defaults is None else found | {"defaults": self.defaults.to_json()}


class Agreement:
    """Adds up the differences of tensors, each with its parts.

    Args:
        compared: what is compared.
        outputs: the tensors by name, with their parts; numbered if they are not given.
        steps: the distance of two codes for each output and part that has a scale, by name.
    """

    def __init__(
        self,
        compared: str,
        outputs: Sequence[Output] = (),
        steps: Mapping[str, float] | None = None,
    ) -> None:
        self.compared, self.outputs = compared, outputs
        self.steps: Mapping[str, float] = {} if steps is None else steps
        self.parts: dict[str, PartAgreement] = {}
        self.rows = self.agreeing = 0
        self._comparison = OutputComparison(outputs)

    def recorder(self) -> Recorder:
        """Return what has to watch the network whose tensors are expected, to tell their parts
        apart.
        """
        return Recorder(self.outputs)

    def add(
        self,
        expected: Sequence[Tensor],
        found: Sequence[Tensor],
        recorder: Recorder | None = None,
    ) -> None:
        """Take in one batch, pairwise; NaN and infinity equal themselves, complex numbers are
        pairs of reals.

        Raises:
            ValueError: the number of tensors or a shape differs.
        """
        pairs_of_reals = zip(map(_in_reals, expected), map(_in_reals, found), strict=True)
        for index, (want, got) in enumerate(pairs_of_reals):
            if want.shape != got.shape:
                raise ValueError(
                    f"The file gives shape {tuple(got.shape)} where test mode gives "
                    f"{tuple(want.shape)}."
                )
            if index == 0 and want.dim() == 2 and want.shape[1] > 1:
                self.rows += len(want)
                self.agreeing += int((want.argmax(1) == got.argmax(1)).sum())
            if recorder is None or len(self.outputs) != len(expected):
                self._part(str(index), None).add(want, got)
                continue
            output = self.outputs[index]
            pairs = zip(
                self._comparison.pieces(output, want, recorder),
                self._comparison.pieces(output, got, recorder),
                strict=True,
            )
            for (part, piece), (_, other) in pairs:
                self._part(part.name, part.index).add(piece, other)

    def _part(self, name: str, index: str | None) -> PartAgreement:
        if name not in self.parts:
            self.parts[name] = PartAgreement(name, index, self.steps.get(name))
        return self.parts[name]

    @property
    def count(self) -> int:
        """How many values were compared."""
        return sum(part.count for part in self.parts.values())

    def result(self) -> Verification:
        """The figures of all batches."""
        parts = tuple(part for part in self.parts.values() if part.count)
        count = max(self.count, 1)
        rated = [part.sqnr_db for part in parts if part.sqnr_db is not None]
        within: float | None = sum(part.within for part in parts) / count
        if not all(part.is_stepped for part in parts):
            within = None
        return Verification(
            self.compared,
            max((part.largest for part in parts), default=0.0),
            sum(part.total for part in parts) / count,
            sum(part.equal for part in parts) / count if self.count else 1.0,
            within,
            min(rated, default=math.inf) if any(part.is_float for part in parts) else None,
            self.agreeing / self.rows if self.rows else None,
            sqnr_db_pooled=_pooled(parts),
            parts=parts,
        )


def _in_reals(values: Tensor) -> Tensor:
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _pooled(parts: Iterable[PartAgreement]) -> float | None:
    """Return the SQNR of all floating-point values together; None if there are none."""
    noise = Noise()
    for part in parts:
        noise.merge(part.noise)
    if not noise.signal:
        return None
    return noise.sqnr_db if math.isfinite(noise.error) else -math.inf


def verify(compared: str, expected: Iterable[Tensor], found: Iterable[Tensor]) -> Verification:
    """Compare tensors that should be equal, pairwise; one pair is in memory at a time if they
    are made so.

    Raises:
        ValueError: the number of tensors or a shape differs.
    """
    agreement = Agreement(compared)
    for want, got in zip(expected, found, strict=True):
        agreement.add([want], [got])
    every = agreement.result()
    return Verification(compared, every.max_difference, every.mean_difference, every.equal)
