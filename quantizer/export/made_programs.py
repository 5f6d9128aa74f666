"""Makes the program that files of a target are written from, before anything is calibrated."""

import logging
from collections.abc import Callable, Iterable

import torch

from quantizer.calibration.solution import Solution
from quantizer.errors import ModelError
from quantizer.export.targets import CHECKED_TARGETS, EXPORTERS
from quantizer.graph.batch_axes import has_open_batch
from quantizer.graph.ir import Graph
from quantizer.sources.batches import Batch

_logger = logging.getLogger(__name__)


def exportable(
    graph: Graph, batch: Batch, targets: Iterable[str], trace_fixed: Callable[[], Graph]
) -> Graph:
    """Return the graph of a model, or one with a fixed batch if torch.export needs that.

    All targets share one program. A network whose weights stay in files has none: to make it
    takes all of them into memory.

    Args:
        graph: as traced.
        batch: that it was traced on.
        targets: of files.
        trace_fixed: traces the model with the number of samples of the batch.

    Raises:
        ModelError: torch.export refuses the network.
    """
    rows = [EXPORTERS[CHECKED_TARGETS[target].target] for target in targets]
    has_operators = any(not (row.by_tensor or row.for_transformers) for row in rows)
    if graph.is_deferred or not has_operators:
        return graph
    try:
        _make_program(graph, batch)
        return graph
    except ModelError as error:
        if not has_open_batch(graph):
            raise
        reason = error.message
    _logger.warning(
        "%s; its batch size is fixed at %d, and only such batches can run", reason, batch.size
    )
    fixed = trace_fixed()
    _make_program(fixed, batch)
    return fixed


def _make_program(graph: Graph, batch: Batch) -> None:
    """Make the program of a network in float.

    Raises:
        ModelError: torch.export refuses it.
    """
    # Only targets with operators need them; one imports torch.export, which is slow
    from quantizer.export.deployment import Deployment
    from quantizer.export.programs.program import float_program
    from quantizer.export.value_names import in_traced_order

    graph = graph.on(torch.device("cpu"))
    batch = batch.to("cpu")
    args, kwargs = in_traced_order(graph, batch.args, batch.kwargs)
    float_program(Deployment(graph, Solution({}), args, kwargs))
