"""The observer of one tensor: it sees batches and computes scale and zero point. It keeps no
values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantizer.config.model import POOLED, QuantizationSpec
from quantizer.numerics.formats import CodeRange, FloatRange, IntegerRange
from quantizer.numerics.granularity import scale_shape
from quantizer.numerics.qparams import (
    QParams,
    qparams_from_range,
    qparams_from_step,
    step_from_range,
)
from quantizer.observers.memory import Memory, compute_pending_ranges, memory_of
from quantizer.observers.methods import BATCH_STATISTICS, axis_of, code_range_of, reduce_batches
from quantizer.observers.observed_batch import ObservedBatch
from quantizer.rows import lookup
from quantizer.tables import RANGE_METHODS


class ObservationError(ValueError):
    """The values seen, or their absence, give no scale."""


class UnobservedError(ObservationError):
    """A scale was asked for before any value was seen."""


class NonFiniteError(ObservationError):
    """A batch held NaN or infinity.

    Attributes:
        nans, infinities: how many NaN and infinite values there were.
    """

    def __init__(self, batch: Tensor) -> None:
        self.nans = int(batch.isnan().sum())
        self.infinities = int(batch.isinf().sum())
        super().__init__(
            f"{self.nans} NaN and {self.infinities} infinite among {batch.numel()} values; a "
            "range needs finite ones."
        )


def require_finite(value: Tensor) -> None:
    """Raise an error if there is NaN or infinity.

    Raises:
        NonFiniteError: there is. It counts both.
    """
    if not value.is_floating_point() or not value.numel():
        return
    low, high = value.aminmax()
    is_finite = low.isfinite() & high.isfinite()
    if not bool(is_finite):
        raise NonFiniteError(value)


class NegativeValuesError(ObservationError):
    """A batch held negative values, which unsigned symmetric codes cannot represent."""


class Observer:
    """Observes activations batch by batch, or a weight once, for a `spec` with a scale.

    Every batch gives one range per tensor, channel or group by the spec's method. For a
    symmetric spec the statistic is taken over the batches' scales, for an asymmetric one over
    either end of their ranges, where "max" is the outermost. A statistic of powers of two is
    rounded up to one.

    With the statistic "pooled" all batches are counted in one histogram, which gives the range.
    It does not depend on the batches, on their order, or on merging observers.

    Raises:
        ValueError: no range exists for this spec.
    """

    def __init__(self, spec: QuantizationSpec) -> None:
        self._code_range = code_range_of(spec)
        method = lookup(RANGE_METHODS, spec.method, "calibration method")
        if method.integers_only and spec.dtype != "int":
            raise ValueError(
                f"The {spec.method} method needs integer codes, and dtype is {spec.dtype}."
            )
        if method.symmetric_only and not spec.symmetric:
            raise ValueError(f"The {spec.method} method needs a symmetric spec.")
        if method.powers_of_two_only and spec.scale_type != "poweroftwo":
            raise ValueError(
                f"The {spec.method} method tries powers of two, so it needs scale_type "
                "poweroftwo."
            )
        self._axis = axis_of(spec)
        if method.reads == "values" and spec.statistic == POOLED:
            raise ValueError(
                f"The {spec.method} method reads each batch's values, so its statistic is not "
                "pooled."
            )
        lookup({**BATCH_STATISTICS, POOLED: None}, spec.statistic, "statistic over batches")
        self.spec = spec
        # The shape of the scale, unknown until the first batch
        self._shape: tuple[int, ...] | None = None if self._axis is not None else ()
        self._memory = memory_of(spec)
        # A cached result, dropped with every new batch
        self._qparams: QParams | None = None

    @property
    def low(self) -> Tensor:
        """Return the smallest value seen, float64 of the scale's shape.

        Raises:
            UnobservedError: there was no batch yet.
        """
        return self._shaped(self._seen().extremes()[0])

    @property
    def high(self) -> Tensor:
        """Return the largest value seen, like `low`."""
        return self._shaped(self._seen().extremes()[1])

    @property
    def has_histogram(self) -> bool:
        """Return whether it keeps the distribution of all values of the tensor."""
        return self.spec.statistic == POOLED and self.spec.has_one_scale

    @torch.no_grad()
    def observe(self, x: Tensor, companion: Observer | None = None) -> None:
        """Add one batch, a floating-point tensor of any layout, on any device.

        Args:
            x: the batch.
            companion: another observer of the same values, which adds the batch as well. What
                both need is computed once.

        Raises:
            NonFiniteError: it holds NaN or infinity. Such a batch leaves no trace, nor do those
                below.
            NegativeValuesError: it holds negative values, and codes are unsigned and symmetric.
            ObservationError: it holds no values at all, or has another number of channels than
                the batches before.
        """
        batch = self._batch(x)
        shape = scale_shape(tuple(x.shape), self.spec.cut)
        if not self._memory.is_empty and self._shape not in (None, shape):
            raise ObservationError(
                f"There is a scale for each index of axis {self._axis}, and this batch has "
                f"{math.prod(shape)} of them where others have {math.prod(self._shape or ())}."
            )
        self._memory.add(x, batch)
        self.expect(tuple(x.shape))
        if companion is not None:
            if companion.spec.cut != self.spec.cut:
                batch = companion._batch(x)
            companion._memory.add(x, batch)
            companion.expect(tuple(x.shape))

    def qparams(self, shared_step: float | None = None) -> QParams:
        """Return scale and zero point for the batches so far, of `scale_shape`.

        Args:
            shared_step: the `largest_step` of all tensors that share a scale or its factor with
                this one. Only float formats share any.

        Raises:
            UnobservedError: there was no batch yet.
        """
        if shared_step is not None:
            assert isinstance(self._code_range, FloatRange)
            code_range = replace(self._code_range, shared_step=shared_step)
            return self._compute_qparams(code_range)
        if self._qparams is not None:
            return self._qparams
        qparams = self._compute_qparams(self._code_range)
        # Many scales would take memory for nothing
        if self.spec.has_one_scale:
            self._qparams = qparams
        return qparams

    def largest_step(self) -> float:
        """Return the largest distance between two codes, of a weight that was observed once.

        Raises:
            UnobservedError: there was no batch yet.
        """
        lows, highs = self._seen().ranges()
        return float(step_from_range(lows[0], highs[0], self._code_range).max())

    def _compute_qparams(self, code_range: CodeRange) -> QParams:
        statistic = self.spec.statistic
        lows, highs = self._seen().ranges()
        if len(lows) == 1:
            # Any statistic of one range is that range
            qparams = qparams_from_range(lows[0], highs[0], code_range)
        elif code_range.symmetric:
            steps = step_from_range(lows, highs, code_range)
            step = reduce_batches(steps, statistic)
            qparams = qparams_from_step(step, torch.zeros_like(step), code_range)
        else:
            # Negated, so that the statistic "max" gives the outermost low
            low = -reduce_batches(-lows, statistic)
            high = reduce_batches(highs, statistic)
            qparams = qparams_from_range(low, high, code_range)
        return QParams(self._shaped(qparams.scale), self._shaped(qparams.zero_point))

    def forget_after(self, batches: int) -> None:
        """Drop the batches after the first `batches`, so that an interrupted one leaves no
        trace.
        """
        self._memory.forget_after(batches)
        self._qparams = None

    def merge(self, *others: Observer) -> None:
        """Add the batches of other observers, one of each observer in turn.

        Raises:
            ValueError: an observer has another spec.
        """
        for other in others:
            if other.spec != self.spec:
                raise ValueError(
                    f"Only observers of one spec can be merged, not of {self.spec} and "
                    f"{other.spec}."
                )
            if self._shape is None:
                self._shape = other._shape
        self._memory.merge(*(other._memory for other in others))
        self._qparams = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild it in another process: from its state."""
        return _restored, (self.spec, self._shape, self.state_dict())

    def set_aside(self, keep: Callable[[Tensor], Tensor]) -> None:
        """Replace large tensors by what `keep` returns for them, which may load them from disk
        when they are needed.
        """
        self._memory.set_aside(keep)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that `load_state_dict` takes: a range for each batch, or a
        histogram.
        """
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace what was seen by a state of `state_dict`.

        Raises:
            ValueError: it is not such a state.
        """
        self._memory.load_state_dict(state)
        self._qparams = None

    def expect(self, shape: tuple[int, ...]) -> None:
        """Set the shape of the values, which a state does not contain."""
        self._shape = scale_shape(shape, self.spec.cut)
        self._qparams = None

    def _batch(self, x: Tensor) -> ObservedBatch:
        """Return `x` with its extremes, and check its values."""
        if not x.is_floating_point():
            raise TypeError(f"Only floating-point tensors can be observed, not {x.dtype}.")
        if x.numel() == 0:
            raise ObservationError(f"The tensor of shape {tuple(x.shape)} has no values.")
        batch = ObservedBatch.of(x, self.spec.cut)
        least = float(batch.low.min())
        # NaN shows in the extremes
        if not (math.isfinite(least) and math.isfinite(batch.high.max())):
            raise NonFiniteError(x)
        check_has_codes(least, self._code_range)
        return batch

    def _seen(self) -> Memory:
        """Return the memory, which must not be empty."""
        if self._memory.is_empty:
            raise UnobservedError("No values were observed, so there is no range and no scale.")
        return self._memory

    def _shaped(self, row: Tensor) -> Tensor:
        return row if self._shape is None else row.view(self._shape)


def check_has_codes(least: float, code_range: CodeRange) -> None:
    """Raise `NegativeValuesError` if the least of some values is negative and has no code."""
    if isinstance(code_range, IntegerRange) and code_range.nonnegative and least < 0:
        raise NegativeValuesError(
            f"The smallest value is {least:g}, and unsigned symmetric codes have no negative "
            "values; make it signed, or asymmetric."
        )


def find_ranges(observers: Iterable[Observer]) -> None:
    """Compute the pending ranges of the last batch, of all observers together.

    This takes a fraction of the time that it takes one by one.
    """
    compute_pending_ranges(observer._memory for observer in observers)


def _restored(
    spec: QuantizationSpec, shape: tuple[int, ...] | None, state: Mapping[str, Tensor]
) -> Observer:
    observer = Observer(spec)
    observer._shape = shape
    observer.load_state_dict(state)
    return observer
