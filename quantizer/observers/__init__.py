"""Range methods, statistics over batches, and the observer that applies them to one tensor. Importing fills METHODS."""

from quantizer.observers import diffs, entropy, maxmin, mse, percentile
from quantizer.observers.errors import NegativeValuesError, NonFiniteError, ObservationError, UnobservedError
from quantizer.observers.methods import METHODS, axis_of, code_range_of, kernel_of
from quantizer.observers.observer import Observer
from quantizer.observers.statistic import STATISTICS

__all__ = [
    "METHODS",
    "STATISTICS",
    "NegativeValuesError",
    "NonFiniteError",
    "ObservationError",
    "Observer",
    "UnobservedError",
    "axis_of",
    "code_range_of",
    "diffs",
    "entropy",
    "kernel_of",
    "maxmin",
    "mse",
    "percentile",
]
