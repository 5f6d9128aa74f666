"""Range methods, statistics over batches, and the observer that applies them to one tensor."""

from quantizer.observers.methods import (
    BATCH_STATISTICS,
    axis_of,
    code_range_of,
    kernel_of,
    searched_format,
)
from quantizer.observers.observed_batch import largest_by_index
from quantizer.observers.observer import (
    NegativeValuesError,
    NonFiniteError,
    ObservationError,
    Observer,
    UnobservedError,
    check_has_codes,
    find_ranges,
    require_finite,
)

__all__ = [
    "BATCH_STATISTICS",
    "NegativeValuesError",
    "NonFiniteError",
    "ObservationError",
    "Observer",
    "UnobservedError",
    "axis_of",
    "check_has_codes",
    "code_range_of",
    "find_ranges",
    "kernel_of",
    "largest_by_index",
    "require_finite",
    "searched_format",
]
