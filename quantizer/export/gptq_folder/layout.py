"""How a checkpoint of GPTQ stores a linear layer, and which weights it has no place for.

Source: `pack` of AutoGPTQ's qlinear_cuda.py; GPTQModel 7.7 for the settings.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantizer.config.model import QuantizationSpec
from quantizer.config.roles import is_parameter
from quantizer.export.compressed_tensors.placement import place_codes
from quantizer.export.compressed_tensors.schemes import as_unsigned, pack_words
from quantizer.export.exporter import Reason, Refusal
from quantizer.export.model_tensors import cannot_store
from quantizer.export.stored_weights import is_symmetric, scales_by_row
from quantizer.graph.ir import Graph, Node
from quantizer.nn.quantized_tensor import QuantizedTensor
from quantizer.plan.model import Key, TensorSpecs

TARGET_NAME = "gptq"
WHOLE_ROWS = -1
_WORD_BITS = 32
_WIDTHS = (2, 3, 4, 8)
_WEIGHT_ONLY = (
    "is quantized at run time, and checkpoints of GPTQ have only weights",
    "quantize only weights, or use <--deploy compressed-tensors>",
)
_EXPERTS = (
    "is of experts, which are not written in this form",
    "use <--deploy compressed-tensors>, or exclude experts",
)
_OTHER_SCHEME = (
    "has other bits, groups or symmetry than the first layer, and the form has one of each"
)
_ALIKE_HELP = "quantize all linear layers alike, or exclude some"


@dataclass(frozen=True)
class GptqScheme:
    """What all layers of a checkpoint have in common.

    Attributes:
        bits: the width of codes.
        group_size: how many inputs share a scale; -1 for whole rows.
        symmetric: whether all zero points are in the middle of the codes.
    """

    bits: int
    group_size: int
    symmetric: bool

    @classmethod
    def of(cls, spec: QuantizationSpec) -> "GptqScheme":
        """Return the scheme of a weight."""
        group_size = WHOLE_ROWS
        if spec.qscheme == "per_group" and spec.group_size is not None:
            group_size = spec.group_size
        return cls(spec.bit_width, group_size, is_symmetric(spec))


def gptq_refusals(graph: Graph, specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield what a checkpoint of GPTQ has no place for."""
    placement = place_codes(graph, specs)
    specs = {key: spec for key, spec in specs.items() if spec.dtype != "float32"}
    refused: set[Key] = set()
    for (layer, role), spec in specs.items():
        reason: Reason | None = None
        if not is_parameter(role):
            reason = _WEIGHT_ONLY
        elif layer in placement.experts:
            reason = _EXPERTS
        elif role == "weights" and layer in placement.linears:
            reason = _weight_refusal(graph, placement.linears[layer], spec)
        if reason is not None:
            refused.add((layer, role))
            yield Refusal(*reason, layer, role)
    for refusal in placement.refusals:
        if (refusal.layer, refusal.role) not in refused:
            yield refusal
    if not refused:
        yield from _other_schemes(placement.linears, specs)


def _weight_refusal(graph: Graph, node: Node, spec: QuantizationSpec) -> Reason | None:
    """Return why a weight has no place in the layout."""
    if spec.dtype != "int" or spec.bit_width not in _WIDTHS:
        name = f"int{spec.bit_width}" if spec.dtype == "int" else spec.dtype
        return f"is {name}, and the form has 2, 3, 4 or 8 bits", "set its dtype to int4"
    for name, length in zip(("outputs", "inputs"), graph.weight(node).shape, strict=True):
        if length * spec.bit_width % _WORD_BITS:
            return (
                f"has {length} {name}, which do not fill words of {_WORD_BITS} bits",
                "exclude the layer, or use <--deploy compressed-tensors>",
            )
    return None


def _other_schemes(linears: Mapping[str, Node], specs: TensorSpecs) -> Iterator[Refusal]:
    """Yield a refusal for each layer that has another scheme than the first."""
    first: GptqScheme | None = None
    for layer in linears:
        scheme = GptqScheme.of(specs[layer, "weights"])
        if first is None:
            first = scheme
        if scheme != first:
            yield Refusal(_OTHER_SCHEME, _ALIKE_HELP, layer, "weights")


def layer_tensors(path: str, weight: QuantizedTensor) -> dict[str, Tensor]:
    """Return what the file holds of a layer, by the names that follow its path.

    `qweight` is packed along the inputs, `qzeros` along the outputs. Zero points are stored
    minus one, as in the first version of the form.

    Args:
        path: of the layer.
        weight: with codes.

    Raises:
        UsageError: it has no codes, or a zero point of 0.
    """
    spec = weight.spec
    if weight.codes is None:
        why = f"no codes give the weight of {path} back exactly"
        raise cannot_store(TARGET_NAME, why, "leave it out of the algorithms")
    codes = as_unsigned(weight.codes, spec)
    scale = scales_by_row(weight.scale, codes)
    zero_point = scales_by_row(weight.zero_point, codes)
    if is_symmetric(spec):
        zero_point = torch.full_like(zero_point, 1 << (spec.bit_width - 1))
    if not zero_point.all():
        raise cannot_store(
            TARGET_NAME,
            f"{path} has a zero point of 0, and the form stores them minus one",
            "set symmetric to true for the weights, or use <--deploy compressed-tensors>",
        )
    zeros = (zero_point - 1).to(torch.uint8).t()
    inputs = codes.shape[1]
    group_size = inputs // scale.shape[1]
    return {
        "qweight": pack_words(codes, spec.bit_width).t().contiguous(),
        "qzeros": pack_words(zeros, spec.bit_width),
        "scales": scale.t().to(weight.dtype).contiguous(),
        "g_idx": (torch.arange(inputs) // group_size).int(),
    }


def with_stored_scales(weight: QuantizedTensor) -> QuantizedTensor:
    """Return a weight with the scales of the file, which are in the model's dtype."""
    return replace(weight, scale=weight.scale.to(weight.dtype).float())
