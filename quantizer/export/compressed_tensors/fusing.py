"""The rules for layers that engines fuse, and the factor that they share.

Source: vLLM and SGLang, July to November 2026. They build query, key and value as one layer
with one scheme, and take the largest `weight_global_scale` for all of its rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch

from quantizer.config.wording import first_names
from quantizer.export.compressed_tensors.schemes import (
    NVFP4_FORMAT,
    CompressedLayer,
    engine_words,
)
from quantizer.export.exporter import Refusal
from quantizer.export.model_tensors import cannot_store
from quantizer.graph.ir import Graph, Node
from quantizer.numerics.two_level import split_global
from quantizer.plan.joining.tied_scales import fused_layers
from quantizer.plan.model import Key, TensorSpecs

_ENGINE_NAMES = {
    frozenset({"q_proj", "k_proj", "v_proj"}): "qkv_proj",
    frozenset({"gate_proj", "up_proj"}): "gate_up_proj",
    frozenset({"q_a_proj", "kv_a_proj_with_mqa"}): "fused_qkv_a_proj",
}
_WHOLE_BLOCKS = (
    "vLLM and SGLang fuse these layers with others, and refuse blocks of rows of two layers; "
    "transformers loads them"
)
_HELP = "quantize the layers alike, or exclude all of them"
_OTHER_FACTORS = "calibrate again: this version gives them one factor"


def fused_refusals(
    graph: Graph, specs: TensorSpecs, linears: Mapping[str, Node], inputs: Mapping[str, Key]
) -> Iterator[Refusal]:
    """Yield a refusal for each layer that an engine fuses with one of another scheme.

    Args:
        graph: the network.
        specs: of all quantized tensors.
        linears: the layers whose weights become codes.
        inputs: the key of the tensor that each of them quantizes as its input.
    """
    for group in fused_layers(graph):
        coded = {layer: _words(specs, inputs, layer) for layer in group if layer in linears}
        if not coded:
            continue
        first = next(iter(coded))
        path = graph.by_name[first].scope
        for layer in group:
            why = f"has another scheme than {path}"
            if layer not in coded:
                why = f"stays float, unlike {path}"
            if coded.get(layer) != coded[first]:
                yield Refusal(f"{why}, and engines fuse both", _HELP, layer, "weights")


def with_shared_factors(
    graph: Graph, layers: Mapping[str, CompressedLayer]
) -> dict[str, CompressedLayer]:
    """Return the layers, where those of nvfp4 that engines fuse have one factor.

    Args:
        graph: the network.
        layers: by path.

    Raises:
        UsageError: no factor gives the scales of fused layers.
    """
    shared = dict(layers)
    for group in fused_layers(graph):
        paths: list[str] = []
        for name in group:
            path = graph.by_name[name].scope
            if path in layers and layers[path].format == NVFP4_FORMAT:
                paths.append(path)
        if len(paths) < 2:
            continue
        scales = [layers[path].weight.scale.flatten() for path in paths]
        codes_and_factor = split_global(torch.cat(scales))
        if codes_and_factor is None:
            names = ", ".join(path.rpartition(".")[2] for path in paths)
            why = f"{names} of {paths[0].rpartition('.')[0]} have no common global scale"
            raise cannot_store("compressed-tensors", why, _OTHER_FACTORS)
        for path in paths:
            shared[path] = replace(layers[path], global_scale=codes_and_factor[1])
    return shared


def partial_block_remarks(graph: Graph, layers: Mapping[str, CompressedLayer]) -> Iterator[str]:
    """Yield a sentence on fused layers that end within a block, if there are any: the blocks
    of the next layer would begin there.
    """
    cut: list[str] = []
    for name in chain.from_iterable(fused_layers(graph)):
        node = graph.by_name[name]
        if node.scope in layers:
            spec = layers[node.scope].weight.spec
            rows = graph.weight(node).shape[0]
            if spec.qscheme == "per_block" and rows % (spec.group_size or 1):
                cut.append(node.scope)
    if cut:
        yield f"{first_names(cut)} end within a block: {_WHOLE_BLOCKS}"


def fused_names(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the paths that engines give to fused layers, each with the paths of its parts."""
    names: dict[str, tuple[str, ...]] = {}
    for group in fused_layers(graph):
        paths = tuple(graph.by_name[layer].scope for layer in group)
        parent = paths[0].rpartition(".")[0]
        parts = frozenset(path.rpartition(".")[2] for path in paths)
        if parts in _ENGINE_NAMES:
            prefix = f"{parent}." if parent else ""
            names[prefix + _ENGINE_NAMES[parts]] = paths
    return names


def _words(specs: TensorSpecs, inputs: Mapping[str, Key], layer: str) -> tuple[object, ...]:
    key = inputs.get(layer)
    input_spec = None if key is None else specs[key]
    return engine_words(specs[layer, "weights"], input_spec)
