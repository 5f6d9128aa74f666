"""Says what works for a model that cannot be traced."""

from quantizer.errors import UntraceableError
from quantizer.export.destinations import DESTINATIONS


def with_remedy(error: UntraceableError, reason: str = "") -> UntraceableError:
    """Return the error with the way that needs no trace in its help.

    Args:
        error: of the trace.
        reason: why this run cannot go that way, if it is known.
    """
    options: list[str] = []
    for name, row in DESTINATIONS.items():
        if row.wider:
            options += [f"`quantizer run MODEL --to {name}`", f"`--to {row.wider}`"]
    if not options:
        return error
    commands = " or ".join(options)
    way = f"{commands} needs no trace: it quantizes the weights of layers as modules"
    if reason:
        way += f"; this run cannot: {reason}"
    lines = [] if error.help is None else error.help.splitlines()
    return UntraceableError(error.message, help=[*lines, way])
