"""Defines the names of calibration methods for `QuantizationSpec`, as classes."""

from quantizer.errors import UsageError


class ObserverBase:
    """Names how a range is found. A spec takes the class itself, never an instance."""

    def __init__(self) -> None:
        name = type(self).__name__
        raise UsageError(
            f"{name} has to be a class, not an instance",
            help=f"write {name}, without parentheses",
        )


class PerTensorMinMaxObserver(ObserverBase):
    """Selects one range for the tensor, from its smallest to its largest value."""


class PerChannelMinMaxObserver(ObserverBase):
    """Selects a range for each channel along `ch_axis`, or for each group of its values, from
    the smallest to the largest value.
    """


class PerGroupMinMaxObserver(ObserverBase):
    """Selects a range for each group of `group_size` values along `ch_axis`, from the smallest
    to the largest value.
    """


class PerTensorPercentileObserver(ObserverBase):
    """Selects one range that contains `percentage` percent of the values."""


class PerTensorMSEObserver(ObserverBase):
    """Selects the range with the least squared error."""


class PerGroupMSEObserver(ObserverBase):
    """Selects the range with the least squared error for each group of `group_size` values
    along `ch_axis`.
    """


class PerBlockMXObserver(ObserverBase):
    """Selects a shared exponent for each block of a microscaling format, from its largest
    magnitude.
    """


class PerBlockBFPObserver(ObserverBase):
    """Selects a shared exponent for each block of `bfp16`, from its largest magnitude."""


class PerBlock2DMinMaxObserver(ObserverBase):
    """Selects a range for each block of `block_size` rows and columns, from the smallest to the
    largest value.
    """


class PlaceholderObserver(ObserverBase):
    """Selects no range, for formats without a scale."""


OBSERVERS: dict[str, type[ObserverBase]] = {
    cls.__name__: cls for cls in ObserverBase.__subclasses__()
}
"""The classes by their names in config files."""
