"""Finds the metrics that a test cannot measure, before any network runs."""

from quantizer.comparison.output_figures import WORST_SAMPLES
from quantizer.graph.ir import Graph, Node, references
from quantizer.graph.output_parts import sample_axis
from quantizer.sources.batches import Batch

Reasons = dict[str, str]
"""For each metric that is not measured, the reason."""


def never_measured_metrics(graph: Graph) -> Reasons:
    """Return the metrics that no test of a model measures, with any data."""
    outputs = [graph.by_name[name] for name in dict.fromkeys(references(graph.output))]
    if any(node.dtype is None for node in outputs):
        return {}
    floats = [node for node in outputs if _is_floating(node)]
    reasons: Reasons = {}
    if not floats:
        why = "the model returns no floating-point values"
        reasons["sqnr_db"] = why
        reasons["cosine"] = why
        reasons[WORST_SAMPLES] = why
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


def _is_floating(node: Node) -> bool:
    """Return whether a value is compared as floating-point numbers, as complex ones are."""
    return node.is_float or (node.dtype is not None and node.dtype.is_complex)


def _is_ranking(node: Node) -> bool:
    """Return whether a value may have several classes for each sample."""
    if node.shape is None or not node.is_float:
        return True
    return len(node.shape) == 2 and node.shape[1] != 1
