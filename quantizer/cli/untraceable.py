"""Says what works for a model that cannot be traced."""

from quantizer.errors import UntraceableError


def with_remedy(error: UntraceableError, reason: str = "") -> UntraceableError:
    """Return the error with the way that needs no trace in its help.

    Args:
        error: of the trace.
        reason: why this run cannot go that way, if it is known.
    """
    way = (
        "`quantizer run MODEL --to w4` or `--to w8` needs no trace: it quantizes the weights "
        "of layers as modules"
    )
    if reason:
        way += f"; this run cannot: {reason}"
    lines = [] if error.help is None else error.help.splitlines()
    return UntraceableError(error.message, help=[*lines, way])
