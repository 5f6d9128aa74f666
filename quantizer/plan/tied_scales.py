"""Which layers share a scale, or the factor of their scales, because engines fuse them."""

from quantizer.config.model import QuantizationSpec
from quantizer.graph.fused import fused_layers
from quantizer.graph.ir import Graph
from quantizer.plan.model import TensorSpecs


def tied_layers(graph: Graph, specs: TensorSpecs) -> tuple[tuple[str, ...], ...]:
    """Return the groups of layers whose weights share a scale or a factor.

    These are fused layers with one spec, of a float format that has one number for the whole
    tensor. An engine takes the largest number of a group for all of its layers.
    """
    groups: list[tuple[str, ...]] = []
    for group in fused_layers(graph):
        by_spec: dict[QuantizationSpec, list[str]] = {}
        for layer in group:
            key = (layer, "weights")
            spec = specs.get(key)
            if spec is None:
                continue
            if has_tensor_scale(spec):
                members = by_spec.setdefault(spec, [])
                members.append(layer)
        for layers in by_spec.values():
            if len(layers) > 1:
                groups.append(tuple(layers))
    return tuple(groups)


def has_tensor_scale(spec: QuantizationSpec) -> bool:
    """Return whether a float format has one scale, or one factor of its scales, for a tensor.

    Integers of one scale are stored with a scale for each row, so engines need not share it.

    >>> has_tensor_scale(QuantizationSpec(dtype="fp8_e4m3"))
    True
    """
    if not spec.is_scaled or spec.dtype == "int":
        return False
    return spec.scale_type == "e4m3" or spec.qscheme == "per_tensor"
