"""Reuse the graph in a result folder instead of a new trace, if it is certain that the module
still computes the same.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantizer.graph.ir import Graph, Node
from quantizer.graph.names import Namer
from quantizer.graph.stored import StoredGraph, short_class, with_output
from quantizer.results.graph_run import GraphRun, SharedProducts
from quantizer.results.small_calls import DifferentError, SmallCalls, are_nearly_equal
from quantizer.results.unchanged_code import bind_unchanged
from quantizer.seeding import seed_everything
from quantizer.sources.batches import Batch
from quantizer.sources.module_state import preserve_module_state

_logger = logging.getLogger(__name__)

_SAMPLES = 2
"""The number of samples that module and graph are compared on, if the batch size is not fixed.
"""


def reused_graph(
    stored: StoredGraph,
    constants: Mapping[str, Tensor],
    module: nn.Module,
    batch: Batch,
) -> Graph | None:
    """Return the stored graph with the tensors of the module, or None if it is not certain that
    a trace of the module would give the same graph.

    It is certain if four conditions hold. The submodules have the classes that were traced. The
    module and the graph give the same outputs. Every node gives a tensor of the dtype and shape
    in the graph. Its sizes follow the batch size and the input lengths where the graph says so.

    A model whose weights stay in files does not run. Its code and its config must be those that
    were traced.
    """
    graph = stored.bound(module, constants)
    if graph is None:
        return None
    with torch.no_grad(), preserve_module_state(module):
        try:
            graph = _with_classes(graph, module)
            if graph.is_deferred:
                return bind_unchanged(graph, module, batch)
            return _verify_graph(graph, module, batch)
        except KeyboardInterrupt:
            raise
        # Code of the user's may raise anything. A trace of it gives a better message
        except BaseException as error:  # noqa: BLE001
            _logger.debug("the stored graph is not used: %s", error)
            return None


def _with_classes(graph: Graph, module: nn.Module) -> Graph:
    """Return the graph with the full class names of the modules instead of short ones.

    Raises:
        DifferentError: a node was traced in a module of another class.
    """
    namer = Namer(module)
    if namer.model != graph.model:
        raise DifferentError(f"the model is {namer.model}")
    nodes: list[Node] = []
    for node in graph.nodes:
        classes = node.classes
        if classes:
            classes = namer.classes(node.scope)
        if tuple(map(short_class, classes)) != node.classes:
            raise DifferentError(f"{node.name} is in another module")
        nodes.append(replace(node, classes=classes))
    return graph.replaced(nodes=tuple(nodes))


def _verify_graph(graph: Graph, module: nn.Module, batch: Batch) -> Graph:
    """Return the graph with the output type of the module, after checking that both compute the
    same.

    Raises:
        DifferentError: they do not.
    """
    calls = SmallCalls(graph, batch)
    samples = _SAMPLES
    if graph.lengths:
        # Several samples are compared at another length, which costs less
        samples = 1
    whole, structure = _run_both(graph, module, calls, samples)
    several = whole
    if graph.lengths:
        several, _ = _run_both(graph, module, calls, _SAMPLES, at_other_lengths=True)
    fewer = several
    if calls.are_open:
        call = calls.of(_SAMPLES - 1, at_other_lengths=bool(graph.lengths))
        fewer = GraphRun(graph, call)
        fewer.finish()
    for node in graph.nodes:
        if node.shape is not None:
            whole.check_sizes(node, several, fewer)
    return with_output(graph, graph.output, structure)


def _run_both(
    graph: Graph,
    module: nn.Module,
    calls: SmallCalls,
    samples: int,
    *,
    at_other_lengths: bool = False,
) -> tuple[GraphRun, Any]:
    """Run the graph and the module on the same call; return the run of the graph, and the
    structure of the module's output.

    Args:
        graph: the stored graph.
        module: the user's model.
        calls: small calls of both.
        samples: of the call.
        at_other_lengths: whether its lengths are others than those of the batch.

    Raises:
        DifferentError: the outputs differ.
    """
    call = calls.of(samples, at_other_lengths=at_other_lengths)
    run = GraphRun(_with_copied_buffers(graph, module), call)
    # Tensors of their own, as both may write into their inputs
    args, kwargs = calls.of(samples, at_other_lengths=at_other_lengths)
    if graph.device.type != "cpu":
        # Both would draw from one generator of the device in turns
        run.finish()
    seed_everything(0)
    with _without_fast_paths(), SharedProducts(run):
        returned = module(*args, **kwargs)
    run.finish()
    expected, structure = pytree.tree_flatten(returned)
    _check_outputs(expected, run.leaves)
    return run, structure


def _with_copied_buffers(graph: Graph, module: nn.Module) -> Graph:
    """Return the graph with copies of all tensors except parameters. The module may change its
    own in place while the graph runs along with it.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    tensors = dict(graph.tensors)
    for path, tensor in graph.tensors.items():
        if path not in parameters:
            tensors[path] = tensor.clone()
    return graph.replaced(tensors=tensors)


def _check_outputs(expected: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Check that the graph returns what the module returns.

    Raises:
        DifferentError: it does not.
    """
    if len(expected) != len(leaves):
        raise DifferentError("the module returns another number of values")
    for value, leaf in zip(expected, leaves, strict=True):
        if not are_nearly_equal(value, leaf):
            raise DifferentError("the outputs differ")


@contextmanager
def _without_fast_paths() -> Iterator[None]:
    """Disable torch's fused kernel for attention, which traces do not contain, inside the
    `with` block.
    """
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)
