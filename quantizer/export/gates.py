"""Parses and checks gates such as `--gate 'sqnr_db>=20'`, which decide the exit code. Finds the
metrics that a test cannot measure, before any network runs.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from quantizer.comparison.output_figures import ROWS_KEPT, WORST_SAMPLES, metric_names
from quantizer.declarations import DROP, FILE_SIZE, LATENCY, RISE
from quantizer.errors import UsageError
from quantizer.evaluation.scores import metrics_of_both, remark_on_samples
from quantizer.export.targets import EXPORTERS
from quantizer.graph.channels.output_parts import output_parts, sample_axis
from quantizer.graph.ir import Graph, Node, references
from quantizer.sources.batches import Batch
from quantizer.sources.directions import BY_NAME, Directions, how_to_declare
from quantizer.tables import METRICS, OF_FILES

_ANY_PAIR = {"float": 1.0, "quantized": 1.0}
"""Stands for the figures of both networks where only names count."""
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_OUTPUT_FIGURES = tuple(name for name, words in METRICS.items() if words.of)
"""Test mode measures these without an evaluate()."""
MEASURED = ("top1", "perplexity")
"""Measured without an evaluate(), if the data has labels or is text."""
EXACT_EQUAL = "exact_equal"
"""Measured by `--exact`."""
_MIN_DIGITS = 3
"""Significant digits of a metric next to its gate."""
_MAX_DIGITS = 17
"""Significant digits that identify a float."""
_GATE = re.compile(
    r"\s*([A-Za-z_][\w.]*(?:\[.+\])?)\s*(>=|<=|==|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)
Reasons = dict[str, str]
"""For each metric that is not measured, the reason."""


@dataclass(frozen=True)
class Gate:
    """One parsed gate.

    Attributes:
        text: as the user wrote it.
        metric: its name.
        comparison: one of >=, <=, ==, > and <.
        bound: the metric is compared with it.
        option: that the gate was given to.
    """

    text: str
    metric: str
    comparison: str
    bound: float
    option: str = "<--gate>"

    @property
    def measured(self) -> str:
        """Return the metric whose loss is bounded, or else the metric itself."""
        return self.metric.removesuffix(DROP).removesuffix(RISE)

    def of_unknown_direction(self) -> UsageError:
        """Return the error about a loss of a metric whose direction is not known."""
        name = self.measured
        return UsageError(
            f"{self.option} {self.text!r}: whether less or more of {name!r} is better is not "
            "known",
            help=how_to_declare(name),
        )

    @property
    def is_of_outputs(self) -> bool:
        """Return whether only the network's outputs show if the metric exists, as for
        `sqnr_db[0.boxes]`.
        """
        return "[" in self.metric or self.metric == ROWS_KEPT

    def figure(self, metrics: Mapping[str, float]) -> str:
        """Return the metric's value with enough digits to distinguish it from the bound.

        >>> parse_gate("sqnr_db>=20").figure({"sqnr_db": 37.2149})
        '37.2'
        >>> parse_gate("cosine>=0.9999").figure({"cosine": 0.999926})
        '0.99993'
        >>> parse_gate("cosine>=0.99").figure({"cosine": 0.999881})
        '0.9999'
        """
        value = metrics[self.metric]
        compare = _COMPARE[self.comparison]
        bound = f"{abs(self.bound):.15g}".replace(".", "")
        bound_digits = len(bound.lstrip("0"))
        for digits in range(max(_MIN_DIGITS, bound_digits + 1), _MAX_DIGITS):
            text = f"{value:.{digits}g}"
            shown = float(text)
            # A share that is nearly 1 is not all
            is_all = shown in (0.0, 1.0) and value != shown
            if not is_all and compare(shown, self.bound) == compare(value, self.bound):
                return text
        return repr(value)

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric fulfils the gate.

        Raises:
            UsageError: there is no such metric.
        """
        require_known([self], metrics)
        return _COMPARE[self.comparison](metrics[self.metric], self.bound)

    def is_missed_by_float(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the float network does not fulfil the gate either.

        >>> parse_gate("top1>=0.9").is_missed_by_float({"top1": 0.7, "top1_float": 0.8})
        True
        """
        value = metrics.get(f"{self.metric}_float")
        return value is not None and not self.holds({self.metric: value})


def parse_gate(text: str, option: str = "<--gate>") -> Gate:
    """Return the gate of a text.

    Args:
        text: of the gate.
        option: that it was given to.

    Raises:
        UsageError: it is not `metric>=number`.
    """
    match = _GATE.fullmatch(text)
    if match is None:
        remedy = "write metric>=number, for example 'sqnr_db>=20' or 'top1_drop<=0.01'"
        raise UsageError(f"{option} {text!r} is not a comparison", help=remedy)
    metric, comparison, bound = match.groups()
    return Gate(text, metric, comparison, float(bound), option)


def require_known(gates: Iterable[Gate], known: Collection[str]) -> None:
    """Raise `UsageError` for the first gate about a metric that is not in `known`.

    The help names the closest metric. For a `_drop` or `_rise` of unknown direction it says how
    to declare the direction.
    """
    for gate in gates:
        if gate.metric in known:
            continue
        base = gate.measured
        is_of_loss = base != gate.metric
        if is_of_loss and f"{base}_float" in known and f"{base}{DROP}" not in known:
            raise gate.of_unknown_direction()
        # Only this error needs it
        from quantizer.export.exporting import unknown_metric

        raise unknown_metric(f"{gate.option} {gate.text!r}", gate.metric, known)


def require_known_parts(gates: Iterable[Gate], graph: Graph) -> None:
    """Raise `UsageError` for the first gate about an output or part that the network does not
    have.
    """
    about_outputs = [gate for gate in gates if gate.is_of_outputs]
    require_known(about_outputs, metric_names(output_parts(graph)))


def about_all(gates: Iterable[Gate]) -> list[Gate]:
    """Return the gates whose metrics are known without the network's outputs."""
    return [gate for gate in gates if not gate.is_of_outputs]


def require_measured(gates: Iterable[Gate], not_measured: Mapping[str, str]) -> None:
    """Raise `UsageError` for the first gate about a metric that this run does not measure.

    Args:
        gates: all of them.
        not_measured: such metrics, each with the reason.
    """
    for gate in gates:
        for name, reason in not_measured.items():
            if gate.metric == name or gate.metric in metrics_of_both({name: _ANY_PAIR}):
                raise UsageError(
                    f"{gate.option} {gate.text!r} is not measured: {reason}",
                    help="use a metric that this run measures, or return this one from "
                    "evaluate()",
                )


def names_in_test(
    metrics: Iterable[str],
    targets: Iterable[str],
    directions: Directions = BY_NAME,
    *,
    exact: bool = False,
) -> set[str]:
    """Return the metrics that gates of test mode may use.

    Args:
        metrics: those that are measured on both networks.
        targets: of the files that are written.
        directions: of the metrics, as far as they are declared.
        exact: whether `--exact` is given.
    """
    pairs = dict.fromkeys(metrics, _ANY_PAIR)
    names = {*_OUTPUT_FIGURES, *metrics_of_both(pairs, directions)}
    if exact:
        names.add(EXACT_EQUAL)
    for target in targets:
        names.update(EXPORTERS[target].metrics)
    return names


def require_known_names(
    gates: Iterable[Gate],
    targets: Iterable[str],
    metrics: Iterable[str] = MEASURED,
    directions: Directions = BY_NAME,
    *,
    exact: bool = False,
) -> None:
    """Raise `UsageError` for the first gate about a metric that test mode does not have. Those
    about outputs are not checked. The arguments are those of `names_in_test`.
    """
    known = names_in_test(metrics, targets, directions, exact=exact)
    require_known(about_all(gates), known)


def require_products(gates: Iterable[Gate], graph: Graph) -> None:
    """Raise `UsageError` for the first gate about a share in int8 if nothing multiplies."""
    for node in graph.nodes:
        if node.row.kind == "mac" and not node.row.scales_channels:
            return
    why = "the network has no multiplications"
    require_measured(gates, dict.fromkeys(OF_FILES - {FILE_SIZE, LATENCY}, why))


def require_measurable(
    gates: Iterable[Gate], graph: Graph, first: Batch, *, has_evaluate: bool
) -> None:
    """Raise `UsageError` for the first gate about a metric that a test does not measure.

    Args:
        gates: all of them.
        graph: of the model.
        first: the first batch of the evaluation data.
        has_evaluate: whether the user's metrics take the place of those of targets.
    """
    require_measured(gates, never_measured_metrics(graph))
    require_products(gates, graph)
    if not has_evaluate:
        require_measured(gates, not_measured_by_targets(first, graph))


def about_networks(gates: Iterable[Gate]) -> list[Gate]:
    """Return the gates that are measured before files are written."""
    return [gate for gate in gates if gate.metric not in OF_FILES]


def held_gates(gates: Iterable[Gate], metrics: Mapping[str, float]) -> dict[str, bool]:
    """Return whether each gate holds, by its text, of those about `metrics`."""
    return {gate.text: gate.holds(metrics) for gate in gates if gate.metric in metrics}


def failed_gates(gates: Iterable[Gate], metrics: Mapping[str, float]) -> list[str]:
    """Return the gates that do not hold, of those about `metrics`."""
    return [text for text, holds in held_gates(gates, metrics).items() if not holds]


def not_met_gates(
    gates: Iterable[Gate], metrics: Mapping[str, float], *, is_complete: bool
) -> list[str]:
    """Return the gates that do not hold; if all metrics are there, also those whose metric was
    not measured.
    """
    not_met = failed_gates(gates, metrics)
    if is_complete:
        for gate in gates:
            if gate.metric not in metrics:
                not_met.append(f"{gate.text} (not measured)")
    return not_met


def gate_lines(gates: Iterable[Gate], metrics: Mapping[str, float]) -> list[str]:
    """Return a line for each gate about `metrics`, with the value: those that do not hold
    first.
    """
    lines: dict[bool, list[str]] = {False: [], True: []}
    for gate in gates:
        if gate.metric not in metrics:
            continue
        is_met = gate.holds(metrics)
        line = f"gate {gate.text}: {'met' if is_met else 'not met'} ({gate.figure(metrics)})"
        remark = remark_on_samples(gate.metric, metrics)
        if is_met and remark:
            line += f", but {remark}"
        lines[is_met].append(line)
    return lines[False] + lines[True]


def never_measured_metrics(graph: Graph) -> Reasons:
    """Return the metrics that no test of a model measures, with any data."""
    outputs = [graph.by_name[name] for name in dict.fromkeys(references(graph.output))]
    if any(node.dtype is None for node in outputs):
        return {}
    # Complex values are compared as floating-point numbers, too
    floats = [
        node for node in outputs if node.is_float or (node.dtype and node.dtype.is_complex)
    ]
    reasons: Reasons = {}
    if not floats:
        why = "the model returns no floating-point values"
        reasons |= {name: why for name, words in METRICS.items() if words.of == "floats"}
    elif all(sample_axis(graph, node) is None for node in floats):
        why = "no output has an axis whose size follows the batch"
        reasons[WORST_SAMPLES] = why
    if len(floats) == len(outputs):
        reasons["equal_outputs"] = "the model returns only floating-point values"
    if not floats or not _is_ranking(floats[0]):
        why = "the model's first output is not of shape (samples, classes)"
        reasons["top1_agreement"] = why
    return reasons


def not_measured_by_targets(first: Batch, graph: Graph | None = None) -> Reasons:
    """Return the metrics that the targets of the data do not allow, if there is no
    `evaluate()`.

    Args:
        first: the first batch of the evaluation data.
        graph: of the model; None if only the data is known.
    """
    # Only batches with targets need it
    from quantizer.comparison.perplexity import next_tokens

    target = first.target
    if target is None:
        why = "the data has no targets, and there is no evaluate()"
        return {"top1": why, "perplexity": why}
    reasons: Reasons = {}
    if target.is_floating_point() or target.dim() != 1:
        why = "the targets are not one class per sample, and there is no evaluate()"
        reasons["top1"] = why
    if next_tokens(first) is None:
        why = "the targets are not the tokens of a text, and there is no evaluate()"
        reasons["perplexity"] = why
    rank = None if graph is None else _rank_of_first_float(graph)
    for name, needed in (("top1", 2), ("perplexity", 3)):
        if rank is not None and rank != needed:
            why = f"{name} needs an output with {needed} axes, and the model's first has {rank}"
            reasons.setdefault(name, why)
    return reasons


def _rank_of_first_float(graph: Graph) -> int | None:
    """Return the number of axes of the first floating-point output; None if there is none, or
    it is unknown.
    """
    for name in references(graph.output):
        node = graph.by_name[name]
        if node.dtype is None or node.shape is None:
            return None
        if node.is_float:
            return len(node.shape)
    return None


def _is_ranking(node: Node) -> bool:
    """Return whether a value may have several classes for each sample."""
    if node.shape is None or not node.is_float:
        return True
    return len(node.shape) == 2 and node.shape[1] != 1
