"""Compares the outputs of an exported file with those of test mode, over many batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantizer.comparison.noise import Noise
from quantizer.comparison.output_comparison import OutputComparison, Recorder
from quantizer.config.wording import counted
from quantizer.errors import VerificationError
from quantizer.evaluation.exact import LayerCodes
from quantizer.export.part_agreement import WITHIN, PartAgreement
from quantizer.export.performance import Kernels, Speed
from quantizer.graph.channels.output_parts import Output

_SHOWN_LINES = 1
"""Lines about kernels and layers that a verification shows."""


@dataclass(frozen=True, repr=False)
class Verification:
    """Holds the comparison of a file with test mode.

    Differences are absolute. Shares go from 0 to 1.

    Attributes:
        compared: what is compared, for sentences.
        equal: the share of equal values.
        within_step: the share of values that differ by at most one step of their scale; None
            unless all have a scale or are integers.
        sqnr_db: the SQNR of the worst floating-point tensor or part, infinite without a
            difference; None without such tensors. `sqnr_db_pooled` is of all together.
        top1_agreement: the share of samples with the same class; None if the first tensor has
            no row of classes for each sample.
        float_sqnr_db: the SQNR of the file against the float network, if the file is accepted
            because of that.
        default_session: the figures of a runtime in its default settings, with `kernels`,
            `layers` and `speed`. All other figures are those of the runtime without
            optimizations.
        layers: the codes of layers, each computed from the same codes as in test mode.
        speed: in comparison with the float network; None if it was not measured.
        remarks: notes about the file, for the user.
        asides: those notes that limit nothing: on speed, and the warnings of test mode.
        engines: the checks by other engines that are installed.
        uint8_weights: layers whose weights could be int8 only on some processors.
        processors: on which the file is right; empty if that does not depend on them.
        float_activations: layer and role of those that the file leaves in float for speed.
        activation_codes: the integer type of 8-bit activations in the file; empty for that of
            the config.
        choice_file: the file next to it that repeats which layers stay in float for speed.
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
    asides: tuple[str, ...] = ()
    engines: tuple[EngineCheck, ...] = ()
    uint8_weights: tuple[str, ...] = ()
    processors: str = ""
    float_activations: tuple[tuple[str, str], ...] = ()
    activation_codes: str = ""
    choice_file: str = ""
    sqnr_db_pooled: float | None = None
    parts: tuple[PartAgreement, ...] = ()

    def __repr__(self) -> str:
        lines = [f"Verification({self.figures()})"]
        session = self.default_session
        if session is not None:
            lines.append(f"  in a default session, {session.figures()}")
            lines += [f"  {line}" for line in session.summary_lines[:_SHOWN_LINES]]
        lines += [f"  {line}" for line in self.summary_lines[:_SHOWN_LINES]]
        if self.remarks:
            lines.append(f"  {counted(len(self.remarks), 'remark')}: see .remarks")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the figures except the speed, which differs from run to run.

        JSON has no infinity, so an infinite SQNR is left out.
        """
        content: dict[str, Any] = {}
        for name, value in vars(self).items():
            is_empty = value in (None, math.inf, -math.inf, (), "")
            if name not in ("speed", "parts", "asides") and not is_empty:
                content[name] = value
        if len(self.parts) > 1:
            content["parts"] = [part.to_json() for part in self.parts]
        if self.default_session is not None:
            content["default_session"] = self.default_session.to_json()
        if self.kernels is not None:
            content["kernels"] = self.kernels.to_json()
        if self.engines:
            content["engines"] = [check.to_json() for check in self.engines]
        if self.layers:
            content["layers"] = [
                {name: value for name, value in vars(row).items() if value is not None}
                for row in self.layers
            ]
            first = self.first_differing
            content["first_differing"] = first and first.layer
        return content

    @property
    def limits(self) -> tuple[str, ...]:
        """Return the notes on what limits the file."""
        return tuple(remark for remark in self.remarks if remark not in self.asides)

    @property
    def used_kernels(self) -> Kernels | None:
        """Return the kernels of the runtime as users run it; None if they are not known."""
        return (self.default_session or self).kernels

    @property
    def in_runtime(self) -> tuple[str, Mapping[str, str] | None]:
        """Return a sentence on kernels and speed, and what is multiplied in float, by layer
        with the reason. Where kernels are not known they are empty and None.
        """
        session = self.default_session or self
        if session.kernels is None:
            return "", None
        return session.summary_lines[0], session.kernels.floating

    @property
    def worst_part(self) -> PartAgreement | None:
        """Return the part with the lowest SQNR; None if none has one."""
        rated = [part for part in self.parts if part.sqnr_db is not None]
        return min(rated, key=lambda part: part.sqnr_db or 0.0, default=None)

    @property
    def first_differing(self) -> LayerCodes | None:
        """Return the first layer, in order of execution, that differs by more than rounding."""
        differing = (row for row in self.layers if row.equal < WITHIN or row.most_steps > 1)
        return next(differing, None)

    @property
    def summary_lines(self) -> list[str]:
        """Return sentences about the kernels and the layers."""
        lines: list[str] = []
        if self.kernels is not None:
            lines += self.kernels.summary_lines
        if lines and self.speed is not None:
            lines[0] += f"; {self.speed.text}"
        codes = sum(row.codes for row in self.layers)
        if codes:
            equal = 1 - sum(row.differing for row in self.layers) / codes
            lines.append(f"layer by layer, {equal:.4%} of {codes} codes are equal")
        first = self.first_differing
        if first is not None:
            lines[-1] += (
                f"; the first that differs: {first.layer}: {first.equal:.2%}, up to "
                f"{first.most_steps} steps"
            )
        return lines

    def figures(self) -> str:
        """Return the figures as part of a sentence."""
        phrases = [
            f"{self.compared} differ by at most {self.max_difference:.3g}",
            f"{self.equal:.2%} are equal",
        ]
        if self.within_step is not None:
            phrases.append(f"{self.within_step:.2%} are within one step")
        if self.sqnr_db is not None and self.sqnr_db != math.inf:
            phrase = f"SQNR {self.sqnr_db:.1f} dB"
            worst = self.worst_part
            if worst is not None and len(self.parts) > 1:
                phrase += f" in {worst.name}, the worst"
            phrases.append(phrase)
        if self.top1_agreement is not None:
            phrases.append(f"{self.top1_agreement:.2%} keep their top-1 class")
        if self.float_sqnr_db is not None:
            phrases.append(f"{self.float_sqnr_db:.1f} dB from the float network")
        return ", ".join(phrases)


@dataclass(frozen=True)
class EngineCheck:
    """How another engine reads a file.

    Attributes:
        engine: its name.
        agrees: whether the differences, in float32 and in default settings, are at most those
            that quantization makes.
        figures: the comparison with test mode over one call, with all that is not quantized in
            float32; None if the engine cannot run the file.
        failure: why it cannot.
        layer: the first layer that differs, if that is known.
        defaults: the comparison in the engine's default settings, which may compute less
            precisely.
        reads: whether the differences in float32 are at most those of rounding.
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
        """Return a sentence about the check."""
        if self.figures is None:
            return f"{self.engine} cannot run it: {self.failure}"
        figures = self.figures.figures()
        if not self.reads:
            where = f"; the first layer that differs is {self.layer}" if self.layer else ""
            return f"{self.engine} computes something else: {figures}{where}"
        if self.defaults is None:
            return f"in {self.engine}, {figures}"
        in_float32 = f"in {self.engine} in float32, {figures}"
        by_default = self.defaults.figures()
        if self.agrees:
            return f"{in_float32}; by its default settings, {by_default}"
        return (
            f"{self.engine} computes something else by its default settings: {by_default}; "
            f"{in_float32}: compile it with INFERENCE_PRECISION_HINT f32"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known."""
        content: dict[str, Any] = {"engine": self.engine, "agrees": self.agrees}
        if self.failure:
            content["failure"] = self.failure
        if self.layer:
            content["layer"] = self.layer
        if self.figures is not None:
            content |= self.figures.to_json()
        if self.defaults is not None:
            content["defaults"] = self.defaults.to_json()
        return content


class Agreement:
    """Sums the differences of tensors, each with its parts, over batches.

    Args:
        compared: what is compared.
        outputs: the tensors by name, with their parts; numbered if they are not given.
        steps: by name, the distance between two codes of each output and part with a scale.
    """

    def __init__(
        self,
        compared: str,
        outputs: Sequence[Output] = (),
        steps: Mapping[str, float] | None = None,
    ) -> None:
        self.compared = compared
        self.outputs = outputs
        self.steps: Mapping[str, float] = steps or {}
        self.parts: dict[str, PartAgreement] = {}
        self._rows = 0
        self._agreeing_rows = 0
        self._comparison = OutputComparison(outputs)

    def add(
        self,
        expected: Sequence[Tensor],
        actual: Sequence[Tensor],
        recorder: Recorder | None = None,
    ) -> None:
        """Add one batch: pairs of an expected and an actual tensor. With the record of a
        recorder in the expected network, the parts of tensors are distinguished.

        NaN and infinity equal themselves. Complex numbers are pairs of reals.

        Raises:
            ValueError: the number of tensors differs.
            VerificationError: a shape differs.
        """
        pairs = zip(map(_in_reals, expected), map(_in_reals, actual), strict=True)
        for index, (ours, theirs) in enumerate(pairs):
            if ours.shape != theirs.shape:
                names = dict(enumerate(output.name for output in self.outputs))
                raise VerificationError(
                    f"output {names.get(index, index)} has the shape {list(theirs.shape)}, and "
                    f"{list(ours.shape)} in test mode"
                )
            if index == 0 and ours.dim() == 2 and ours.shape[1] > 1:
                self._rows += len(ours)
                self._agreeing_rows += int((ours.argmax(1) == theirs.argmax(1)).sum())
            if recorder is None or len(self.outputs) != len(expected):
                self._part(str(index), None).add(ours, theirs)
                continue
            output = self.outputs[index]
            our_pieces = self._comparison.pieces(output, ours, recorder)
            their_pieces = self._comparison.pieces(output, theirs, recorder)
            pieces = zip(our_pieces, their_pieces, strict=True)
            for (part, our_piece), (_, their_piece) in pieces:
                self._part(part.name, part.index).add(our_piece, their_piece)

    def _part(self, name: str, index: str | None) -> PartAgreement:
        """Return the sums of a part, which are new for the first batch."""
        if name not in self.parts:
            self.parts[name] = PartAgreement(name, index, self.steps.get(name))
        return self.parts[name]

    def result(self) -> Verification:
        """Return the figures of all batches."""
        parts = tuple(part for part in self.parts.values() if part.count)
        count = sum(part.count for part in parts)
        equal = 1.0
        mean_difference = 0.0
        within_step: float | None = 0.0
        if count:
            equal = sum(part.equal for part in parts) / count
            mean_difference = sum(part.total for part in parts) / count
            within_step = sum(part.within for part in parts) / count
        if not all(part.is_stepped for part in parts):
            within_step = None
        sqnr_db: float | None = None
        if any(part.is_float for part in parts):
            rated = [part.sqnr_db for part in parts if part.sqnr_db is not None]
            sqnr_db = min(rated, default=math.inf)
        top1_agreement = self._agreeing_rows / self._rows if self._rows else None
        return Verification(
            self.compared,
            max((part.largest for part in parts), default=0.0),
            mean_difference,
            equal,
            within_step=within_step,
            sqnr_db=sqnr_db,
            top1_agreement=top1_agreement,
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


def verify(compared: str, expected: Iterable[Tensor], actual: Iterable[Tensor]) -> Verification:
    """Compare tensors that should be equal, pairwise.

    Only one pair is in memory at a time if the iterables are lazy.

    Raises:
        ValueError: the number of tensors differs.
        VerificationError: a shape differs.
    """
    agreement = Agreement(compared)
    for ours, theirs in zip(expected, actual, strict=True):
        agreement.add([ours], [theirs])
    every = agreement.result()
    return Verification(compared, every.max_difference, every.mean_difference, every.equal)
