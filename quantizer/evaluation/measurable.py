"""Tells which metrics a test can measure, before any network runs.

Reads the graph's outputs and the targets of the first batch.
"""

from __future__ import annotations

from quantizer.comparison.perplexity import next_tokens
from quantizer.graph.ir import Graph, Node, references
from quantizer.sources.batches import Batch

Reasons = dict[str, str]
"""Why a figure is not measured, by its name."""


def not_measured(graph: Graph) -> Reasons:
    """Return the figures that no test of a model gives, whatever its data, with the reasons."""
    outputs = [graph.by_name[name] for name in dict.fromkeys(references(graph.output))]
    if any(node.dtype is None for node in outputs):
        return {}
    floats = [node for node in outputs if _is_floating(node)]
    reasons: Reasons = {}
    if not floats:
        why = "the model returns no floating-point values"
        reasons |= {"sqnr_db": why, "cosine": why}
    if len(floats) == len(outputs):
        reasons["equal_outputs"] = "all that the model returns are floating-point values"
    if not floats or not _is_ranking(floats[0]):
        why = "the model's first output has no row of classes for each sample"
        reasons["top1_agreement"] = why
    return reasons


def not_measured_by_targets(first: Batch, graph: Graph | None = None) -> Reasons:
    """Return the metrics that targets do not give in place of an `evaluate()`, with the
    reasons.

    Args:
        first: the first batch of the evaluation data.
        graph: of the model; None if only data are known.
    """
    target = first.target
    if target is None:
        why = "the data have no targets, and there is no evaluate()"
        return {"top1": why, "perplexity": why}
    reasons: Reasons = {}
    if target.is_floating_point() or target.dim() != 1:
        why = "the targets are no classes, one for each sample, and there is no evaluate()"
        reasons["top1"] = why
    if next_tokens(first) is None:
        why = "the targets are no tokens of a text, and there is no evaluate()"
        reasons["perplexity"] = why
    rank = None if graph is None else _rank_of_first_float(graph)
    for name, needed in (("top1", 2), ("perplexity", 3)):
        if rank is not None and rank != needed:
            why = f"the model's first output has {rank} axes, which gives no {name}"
            reasons.setdefault(name, why)
    return reasons


def _rank_of_first_float(graph: Graph) -> int | None:
    """The number of axes of the first floating-point output; None if it is unknown, or there is
    none.
    """
    for name in references(graph.output):
        node = graph.by_name[name]
        if node.dtype is None or node.shape is None:
            return None
        if node.is_float:
            return len(node.shape)
    return None


def _is_floating(node: Node) -> bool:
    """Whether a value is compared as floating-point numbers, as the parts of complex ones
    are.
    """
    return node.is_float or (node.dtype is not None and node.dtype.is_complex)


def _is_ranking(node: Node) -> bool:
    """Whether a value may have a row of several classes for each sample."""
    if node.shape is None or not node.is_float:
        return True
    return len(node.shape) == 2 and node.shape[1] != 1
