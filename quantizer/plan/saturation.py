"""How far from zero a value still changes what is computed from it. A sigmoid of 8 and one of
24 are nearly the same.
"""

from quantizer.config.model import QuantizationSpec
from quantizer.graph.ir import Graph
from quantizer.plan.value_readers import outer_readers

_MOST_BITS = 8


def useful_magnitude(graph: Graph, source: str, spec: QuantizationSpec) -> float | None:
    """Return the magnitude beyond which all readers of a node saturate; None if some reader
    does not.

    With a power-of-two scale, the values beyond it would cost all others a bit or two. Other
    scales lose less, so they have no such limit. Wider codes have room for all values.
    """
    is_short = spec.dtype == "int" and spec.bit_width <= _MOST_BITS
    if not is_short or spec.scale_type != "poweroftwo":
        return None
    magnitudes = []
    for reader, _ in outer_readers(graph, source):
        # "" is the network's output
        row = graph.by_name[reader].row if reader else None
        if row is None or row.saturates is None:
            return None
        magnitudes.append(row.saturates)
    return max(magnitudes, default=None)
