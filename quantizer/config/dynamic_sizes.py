"""The sizes of inputs that `--dynamic` leaves open, besides batches and tokens of texts."""

from quantizer.errors import UsageError

AXES = {"height": (4, 2), "width": (4, 3), "length": (3, 2)}
"""By the name of a size: the number of axes of the inputs that have it, and its axis. Images
are [batch, channels, height, width], sounds [batch, channels, length].
"""
CHOICES = ("height,width", "height", "width", "length")
"""The values of `--dynamic`, that of the option alone first."""


def dynamic_sizes(value: str | None) -> tuple[str, ...]:
    """Return the names of the sizes that a value of `--dynamic` leaves open.

    Raises:
        UsageError: there is no such value.

    >>> dynamic_sizes("height,width"), dynamic_sizes(None)
    (('height', 'width'), ())
    """
    if value is None:
        return ()
    if value not in CHOICES:
        raise UsageError(
            f"dynamic={value!r} is not a size",
            help=f"it is {', '.join(map(repr, CHOICES))} or None",
        )
    return tuple(value.split(","))
