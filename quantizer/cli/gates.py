"""`--gate 'sqnr_db>=20'`: a comparison of a metric with a number that decides the exit code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantizer.config.wording import closest
from quantizer.errors import UsageError

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_GATE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True)
class Gate:
    """One parsed gate."""

    text: str
    metric: str
    comparison: str
    bound: float

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric fulfils the gate.

        Raises:
            UsageError: there is no such metric.
        """
        if self.metric not in metrics:
            near = closest(self.metric, list(metrics))
            help_ = f'did you mean "{near}"?' if near else f"known here: {', '.join(sorted(metrics))}"
            raise UsageError(f"--gate {self.text!r}: there is no metric {self.metric!r}", help=help_)
        return _COMPARE[self.comparison](metrics[self.metric], self.bound)


def parse_gate(text: str) -> Gate:
    """The gate a text says.

    Raises:
        UsageError: it is not `metric>=number`.
    """
    found = _GATE.fullmatch(text)
    if found is None:
        raise UsageError(f"--gate {text!r} is not a comparison", help="write metric>=number, for example 'sqnr_db>=20'")
    return Gate(text, found.group(1), found.group(2), float(found.group(3)))
