"""Functions that watch a value for an observer."""

from collections.abc import Callable

from torch import Tensor

from quantizer.observers import NonFiniteError

Watch = Callable[[Tensor], None]


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
        nan = int(value.isnan().sum())
        inf = int(value.isinf().sum())
        raise NonFiniteError(nan, inf, value.numel())


def watch_channels(watch: Watch, channels: tuple[int, int, int], value: Tensor) -> None:
    """Show a watcher the channels (axis, first, length) of a value."""
    watch(value.narrow(*channels))


def watch_useful(watch: Watch, most: float, value: Tensor) -> None:
    """Show a watcher a value whose readers do the same for all magnitudes beyond `most`.

    Raises:
        NonFiniteError: NaN or infinity in the value.
    """
    require_finite(value)
    watch(value.clamp(-most, most))
