"""What a trace of a model lacks, as where no data reach a part of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from quantizer.graph.ir import Graph


@dataclass(frozen=True)
class Untraced:
    """The parameters of a model that no node of a graph reads.

    Attributes:
        size: in bytes.
        reasons: why their layers stay in float, by path.
    """

    size: int = 0
    reasons: Mapping[str, str] = field(default_factory=dict)


def untraced_part(model: nn.Module, graph: Graph) -> Untraced:
    """Return the parameters that no node of a trace reads.

    Args:
        model: in float.
        graph: its trace before all passes.
    """
    traced_ids = _traced_ids(model, graph)
    size = 0
    reasons: dict[str, str] = {}
    for path, parameter in model.named_parameters():
        if id(parameter) in traced_ids:
            continue
        size += parameter.nbytes
        if parameter.dim() > 1:
            layer, _, _ = path.rpartition(".")
            reasons[layer] = "not reached by the data"
    return Untraced(size, reasons)


def _traced_ids(model: nn.Module, graph: Graph) -> set[int]:
    """Return the ids of the parameters that a node reads, by any of their paths."""
    traced_paths: set[str] = set()
    for node in graph.nodes:
        traced_paths.update(node.params.values())
    traced_ids: set[int] = set()
    parameters = model.named_parameters(remove_duplicate=False)
    for path, parameter in parameters:
        if path in traced_paths:
            traced_ids.add(id(parameter))
    return traced_ids
