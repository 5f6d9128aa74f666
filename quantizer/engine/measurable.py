"""What test mode can measure of a model on its data, known before anything is run.

Reads the graph's outputs and the targets of the first batch.
"""

from __future__ import annotations

from quantizer.engine.perplexity import next_tokens
from quantizer.graph.ir import Graph, Node, references
from quantizer.sources.batches import Batch

Reasons = dict[str, str]
"""Why a figure is not measured, by its name."""


def not_measured(graph: Graph) -> Reasons:
    """Return the figures that no test of a model gives, whatever its data, each with the reason."""
    outputs = [graph.by_name[name] for name in dict.fromkeys(references(graph.output))]
    unknown = [node for node in outputs if node.dtype is None]
    if unknown:
        return {}
    floats = [node for node in outputs if node.is_float or node.dtype.is_complex]  # type: ignore[union-attr]
    reasons: Reasons = {}
    if not floats:
        why = "the model returns no floating-point values"
        reasons |= {"sqnr_db": why, "cosine": why}
    if len(floats) == len(outputs):
        reasons["equal_outputs"] = "all that the model returns are floating-point values"
    if not floats or not _is_ranking(floats[0]):
        reasons["top1_agreement"] = "the model's first output has no row of classes for each sample"
    return reasons


def not_measured_by_targets(first: Batch, graph: Graph | None = None) -> Reasons:
    """Return the metrics that targets do not give in place of an `evaluate()`, each with the reason.

    Args:
        first: the first batch of the evaluation data.
        graph: what returns the outputs; None if only data are known.
    """
    target = first.target
    if target is None:
        why = "the data have no targets, and there is no evaluate()"
        return {"top1": why, "perplexity": why}
    reasons: Reasons = {}
    if target.is_floating_point() or target.dim() != 1:
        reasons["top1"] = "the targets are no classes, one for each sample, and there is no evaluate()"
    if next_tokens(first) is None:
        reasons["perplexity"] = "the targets are no tokens of a text, and there is no evaluate()"
    rank = None if graph is None else _rank_of_first_float(graph)
    for name, needed in (("top1", 2), ("perplexity", 3)):
        if rank is not None and rank != needed:
            reasons.setdefault(name, f"the model's first output has {rank} axes, which gives no {name}")
    return reasons


def _rank_of_first_float(graph: Graph) -> int | None:
    """How many axes the first floating-point output has; None if that is unknown, or there is none."""
    for name in references(graph.output):
        node = graph.by_name[name]
        if node.dtype is None or node.shape is None:
            return None
        if node.is_float:
            return len(node.shape)
    return None


def _is_ranking(node: Node) -> bool:
    """Whether a value has a row of several classes for each sample, as far as its shape is known."""
    if node.shape is None or not node.is_float:
        return True
    return len(node.shape) == 2 and node.shape[1] != 1
