"""`--gate 'sqnr_db>=20'`: a comparison of a metric with a number that decides the exit code."""

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from quantizer.cli.options import Options
from quantizer.comparison.output_figures import POOLED_FIGURE, ROWS_KEPT, metric_names
from quantizer.config.wording import closest
from quantizer.errors import UsageError
from quantizer.evaluation.scores import DROP, paired
from quantizer.graph.output_parts import Output
from quantizer.sources.directions import BY_NAME, Directions, how_to_declare

BOTH = {"float": 1.0, "quantized": 1.0}
"""Figures that stand for those of both networks where only names count."""
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
FIGURE_DIGITS, MOST_DIGITS = 3, 17
"""Digits of a metric beside its gate: at least, and so many that they are the number."""
_GATE = re.compile(
    r"\s*([A-Za-z_][\w.]*(?:\[.+\])?)\s*(>=|<=|==|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)


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
        """Whether it depends on the network's outputs if there is such a figure, as of
        `sqnr_db[0.boxes]`.
        """
        return "[" in self.metric or self.metric == ROWS_KEPT

    def figure(self, metrics: Mapping[str, float]) -> str:
        """Return the metric's value, with as many digits as tell it from the bound.

        >>> parse_gate("sqnr_db>=20").figure({"sqnr_db": 37.2149})
        '37.2'
        >>> parse_gate("cosine>=0.9999").figure({"cosine": 0.999926})
        '0.99993'
        """
        value = metrics[self.metric]
        compare = _COMPARE[self.comparison]
        bound_digits = len(f"{abs(self.bound):.15g}".replace(".", "").lstrip("0"))
        for digits in range(max(FIGURE_DIGITS, bound_digits + 1), MOST_DIGITS):
            text = f"{value:.{digits}g}"
            if compare(float(text), self.bound) == compare(value, self.bound):
                return text
        return repr(value)

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
        UsageError: naming the closest one; or, of a loss of quality, how to declare what is
            better.
    """
    for gate in gates:
        if gate.metric not in known:
            base = gate.metric.removesuffix(DROP)
            if gate.metric.endswith(DROP) and f"{base}_float" in known:
                text = (
                    f"{gate.option} {gate.text!r}: whether less or more of {base!r} is better "
                    "is not known"
                )
                raise UsageError(text, help=how_to_declare(base))
            near = closest(gate.metric, known)
            help_ = (
                f'did you mean "{near}"?' if near else f"known here: {', '.join(sorted(known))}"
            )
            raise UsageError(
                f"{gate.option} {gate.text!r}: there is no metric {gate.metric!r}", help=help_
            )


def require_known_parts(gates: Iterable[Gate], outputs: Sequence[Output]) -> None:
    """Refuse gates about outputs or parts that a network does not have.

    Raises:
        UsageError: naming the closest one.
    """
    require_known([gate for gate in gates if gate.is_of_outputs], metric_names(outputs))


def about_all(gates: Iterable[Gate]) -> list[Gate]:
    """Return the gates that are about no single output or part: their names are known without
    the network.
    """
    return [gate for gate in gates if not gate.is_of_outputs]


def require_measured(gates: Iterable[Gate], not_measured: Mapping[str, str]) -> None:
    """Refuse gates on what this run does not measure.

    Args:
        gates: all of them.
        not_measured: metrics, each with the reason why nothing has it.

    Raises:
        UsageError: with the reason.
    """
    for gate in gates:
        for name, reason in not_measured.items():
            if gate.metric in paired({name: BOTH}) or gate.metric == name:
                remedy = "gate a metric that this run measures, or let evaluate() give this one"
                raise UsageError(
                    f"{gate.option} {gate.text!r} is not measured: {reason}", help=remedy
                )


def names_in_test(
    metrics: Iterable[str], options: Options, directions: Directions = BY_NAME
) -> set[str]:
    """Return what gates of test mode may ask for.

    Args:
        metrics: what is measured on both networks.
        options: of the run.
        directions: which of the metrics are better when they are lower, as far as that is
            declared.
    """
    names = {*FIGURES, *paired(dict.fromkeys(metrics, BOTH), directions)}
    if options.exact:
        names.add(EXACT_EQUAL)
    if "onnx" in options.deploy:
        names.add(INT8_SHARE)
    return names


def failed(gates: Iterable[Gate], metrics: Mapping[str, float]) -> list[str]:
    """The gates that do not hold, of those on metrics that are known already."""
    return [gate.text for gate in gates if gate.metric in metrics and not gate.holds(metrics)]


def met(gates: Iterable[Gate], metrics: Mapping[str, float]) -> list[str]:
    """Return a line for each gate that holds, with the figure it was compared with."""
    holding = [gate for gate in gates if gate.metric in metrics and gate.holds(metrics)]
    return [f"gate {gate.text}: met ({gate.figure(metrics)})" for gate in holding]
