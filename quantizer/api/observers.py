"""The calibration methods by the names that a `QuantizationSpec` gives them. Names only: no
tensors, no instances.
"""

from quantizer.errors import UsageError


class ObserverBase:
    """How a tensor's range is found. A spec takes the class itself; `quantizer.observers` does
    what it names.
    """

    def __init__(self) -> None:
        name = type(self).__name__
        raise UsageError(
            f"{name} is given as a class", help=f"write {name}, without parentheses"
        )


class PerTensorMinMaxObserver(ObserverBase):
    """One range for the tensor: its smallest and its largest value."""


class PerChannelMinMaxObserver(ObserverBase):
    """A range for each channel along `ch_axis`, or for each group of its values: smallest and
    largest value.
    """


class PerGroupMinMaxObserver(ObserverBase):
    """A range for each group of `group_size` values along `ch_axis`: smallest and largest
    value.
    """


class PerTensorPercentileObserver(ObserverBase):
    """One range that leaves out the outermost values; the spec's `percentage` is kept."""


class PerTensorMSEObserver(ObserverBase):
    """The range with the least squared error."""


class PerBlockMXObserver(ObserverBase):
    """A shared exponent for each block of a microscaling format: the largest magnitude."""


class PerBlockBFPObserver(ObserverBase):
    """A shared exponent for each block of `bfp16`: the largest magnitude."""


class PlaceholderObserver(ObserverBase):
    """For formats without a scale, which need no range."""


OBSERVERS: dict[str, type[ObserverBase]] = {
    cls.__name__: cls for cls in ObserverBase.__subclasses__()
}
"""By the names that files use."""
