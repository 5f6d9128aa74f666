"""What can be wrong with observed values. The caller knows the layer and the batch and adds them; nothing here does."""

from __future__ import annotations


class ObservationError(ValueError):
    """The values seen, or their absence, give no scale."""


class UnobservedError(ObservationError):
    """A scale was asked for before any value was seen."""


class NonFiniteError(ObservationError):
    """A batch held NaN or infinity; `nans` and `infinities` count them, among `total` values."""

    def __init__(self, nans: int, infinities: int, total: int) -> None:
        super().__init__(f"{nans} NaN and {infinities} infinite among {total} values; a range needs finite ones.")
        self.nans, self.infinities, self.total = nans, infinities, total


class NegativeValuesError(ObservationError):
    """A batch held negative values, which unsigned symmetric codes cannot represent."""
