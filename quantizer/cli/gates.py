"""`--gate 'sqnr_db>=20'`: a comparison of a metric with a number that decides the exit code."""

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantizer.cli.options import Options
from quantizer.config.wording import closest
from quantizer.engine.output_figures import POOLED_FIGURE, ROWS_KEPT, metric_names
from quantizer.engine.scores import paired
from quantizer.errors import UsageError
from quantizer.graph.output_parts import Output

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
FIGURES = ("sqnr_db", "cosine", POOLED_FIGURE, "top1_agreement", "equal_outputs")
"""What test mode finds without an evaluate()."""
MEASURED = ("top1", "perplexity")
"""What is measured in place of an evaluate(), where the data have labels or are text."""
EXACT_EQUAL, INT8_SHARE = "exact_equal", "onnx_int8_share"
"""What `--exact` and `--deploy onnx` find besides."""
_GATE = re.compile(r"\s*([A-Za-z_][\w.]*(?:\[.+\])?)\s*(>=|<=|==|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True)
class Gate:
    """One parsed gate."""

    text: str
    metric: str
    comparison: str
    bound: float
    option: str = "--gate"

    @property
    def is_of_outputs(self) -> bool:
        """Whether it depends on the network's outputs if there is such a figure, as of `sqnr_db[0.boxes]`."""
        return "[" in self.metric or self.metric == ROWS_KEPT

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether the metric fulfils the gate.

        Raises:
            UsageError: there is no such metric.
        """
        require_known([self], metrics)
        return _COMPARE[self.comparison](metrics[self.metric], self.bound)


def parse_gate(text: str, option: str = "--gate") -> Gate:
    """The gate a text says, which an option was given.

    Raises:
        UsageError: it is not `metric>=number`.
    """
    found = _GATE.fullmatch(text)
    if found is None:
        remedy = "write metric>=number, for example 'sqnr_db>=20'"
        raise UsageError(f"{option} {text!r} is not a comparison", help=remedy)
    return Gate(text, found.group(1), found.group(2), float(found.group(3)), option)


def require_known(gates: Iterable[Gate], known: Collection[str]) -> None:
    """Refuse gates that ask for other metrics than `known`.

    Raises:
        UsageError: naming the closest one.
    """
    for gate in gates:
        if gate.metric not in known:
            near = closest(gate.metric, known)
            help_ = f'did you mean "{near}"?' if near else f"known here: {', '.join(sorted(known))}"
            raise UsageError(f"{gate.option} {gate.text!r}: there is no metric {gate.metric!r}", help=help_)


def require_known_parts(gates: Iterable[Gate], outputs: Sequence[Output]) -> None:
    """Refuse gates about outputs or parts that a network does not have.

    Raises:
        UsageError: naming the closest one.
    """
    require_known([gate for gate in gates if gate.is_of_outputs], metric_names(outputs))


def about_all(gates: Iterable[Gate]) -> list[Gate]:
    """Return the gates that are about no single output or part: their names are known without the network."""
    return [gate for gate in gates if not gate.is_of_outputs]


def names_in_test(metrics: Iterable[str], options: Options) -> set[str]:
    """What gates of test mode may ask for, where these metrics are measured on both networks."""
    both = {"float": 1.0, "quantized": 1.0}
    more = {EXACT_EQUAL: options.exact, INT8_SHARE: "onnx" in options.deploy}
    return {*FIGURES, *paired(dict.fromkeys(metrics, both)), *(name for name, is_found in more.items() if is_found)}


def failed(gates: Iterable[Gate], metrics: Mapping[str, float]) -> list[str]:
    """The gates that do not hold, of those on metrics that are known already."""
    return [gate.text for gate in gates if gate.metric in metrics and not gate.holds(metrics)]
