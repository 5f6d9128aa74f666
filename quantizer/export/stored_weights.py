"""What files with the weights of a model of transformers have no place for, and the form in
which they hold scales.
"""

from collections.abc import Iterator

from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.targets import offered
from quantizer.graph.ir import Graph
from quantizer.graph.names import is_operator_name
from quantizer.plan.model import TensorSpecs

INSERTION_REASON = (
    "was inserted by an algorithm, and the model of the checkpoint has no such operator",
    "let the algorithm fold it into a layer (no online rotations), or use "
    f"{offered('program')}",
)
_COMPUTED = (
    "is computed from other tensors of the model, which has no place for a rounded one",
    f"use {offered('program')}, or exclude it",
)
_SHARING_HELP = "quantize both alike, or neither: kind:head and kind:embedding name them"


def is_symmetric(spec: QuantizationSpec) -> bool:
    """Return whether zero is the code in the middle, so that no zero point is stored."""
    return spec.dtype != "int" or (spec.signed and spec.symmetric)


def scales_by_row(values: Tensor, codes: Tensor) -> Tensor:
    """Return scales or zero points as [outputs, groups]; one of a tensor is repeated."""
    if values.dim():
        groups = values.reshape(len(codes), -1)
    else:
        groups = values.expand(len(codes), 1)
    return groups.contiguous()


def value_refusal(graph: Graph, specs: TensorSpecs, layer: str, role: str) -> Reason | None:
    """Return why a rounded weight cannot be stored as values: the model computes it from other
    tensors, or another layer quantizes it otherwise.
    """
    path = graph.by_name[layer].params.get("weight", "")
    # A weight that is computed has the name of the operator that computes it
    if role == "weights" and is_operator_name(path):
        return _COMPUTED
    for node in graph.nodes:
        if path not in node.params.values() or node.name == layer:
            continue
        if specs.get((node.name, role)) != specs[layer, role]:
            why = f"is the weight of {node.name}, too, and is quantized differently there"
            return why, _SHARING_HELP
    return None


def insertion_refusals(graph: Graph) -> Iterator[Refusal]:
    """Yield a refusal for each operator that an algorithm has put before a layer."""
    for node in graph.nodes:
        if node.target.startswith("rescale."):
            yield Refusal(*INSERTION_REASON, node.name)
