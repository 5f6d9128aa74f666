"""Find the parts of transformers that engines treat apart: keys and values of attentions, the
head with the logits, the routers of experts, and the layers of images or audio.

The latter are vision and audio towers, and the projectors behind them. Keys and values are kept
in a cache.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from quantizer.graph.channels.axis_rules import ATTENTION
from quantizer.graph.ir import Graph, Node, Ref, depending, derived, readers, walk_back

_SOFTMAX = "softmax"
_SCORE_KINDS = frozenset({"passthrough", "compute", "fusable", "nonlinear", "float", "join"})
"""The kinds of operators between the product of queries and keys and the softmax."""
_NO_LAYERS: frozenset[str] = frozenset()
_FEATURES = -1
_FEATURES_OF_TRANSPOSED = -2

Part = Literal["key", "value"]
_Operand = tuple[Part, Node, str, int]
"""Keys or values: the product, its argument for them, and the axis of a head's features."""


@dataclass(frozen=True)
class CachedValue:
    """The keys or the values of an attention, as it multiplies them.

    Attributes:
        part: which of the two it is.
        layer: the operator that multiplies them.
        role: of its input.
        value: the node that it reads.
        features: the axis of a head's features.
        is_fused: whether the operator is the whole attention, and transposes keys itself.
        sources: the layers with weights that compute them.
    """

    part: Part
    layer: str
    role: str
    value: str
    features: int
    is_fused: bool
    sources: frozenset[str]


@derived
def cached_values(graph: Graph) -> tuple[CachedValue, ...]:
    """Return the keys and values of all attentions, in execution order.

    An attention is one operator, or two products of values with a softmax between them. Keys
    are read after the rotary embedding.
    """
    sources = _sources(graph)
    values: list[CachedValue] = []
    for node in graph.nodes:
        for part, layer, argument, features in _operands_of(graph, node):
            value = layer.inputs.get(argument)
            if not isinstance(value, Ref):
                continue
            index = list(layer.inputs).index(argument)
            cached = CachedValue(
                part=part,
                layer=layer.name,
                role=f"input_{index}" if index else "input",
                value=value.name,
                features=features,
                is_fused=node.row.axes is ATTENTION,
                sources=sources.get(value.name, _NO_LAYERS),
            )
            values.append(cached)
    return tuple(values)


def _operands_of(graph: Graph, node: Node) -> list[_Operand]:
    """Return the keys and the values of an attention, if the node is one, or its softmax."""
    if node.row.axes is ATTENTION:
        return [("key", node, "key", _FEATURES), ("value", node, "value", _FEATURES)]
    if node.op == _SOFTMAX:
        return _operands_around(graph, node)
    return []


def _operands_around(graph: Graph, softmax: Node) -> list[_Operand]:
    """Return the keys and the values around a softmax, if it is that of an attention."""
    scores = list(_products_before(graph, softmax))
    weighted = list(_products_after(graph, softmax))
    if len(scores) != 1 or len(weighted) != 1:
        return []
    [(score, keys)] = scores
    [(product, values)] = weighted
    return [
        ("key", score, keys, _FEATURES_OF_TRANSPOSED),
        ("value", product, values, _FEATURES),
    ]


def _products_before(graph: Graph, softmax: Node) -> Iterator[tuple[Node, str]]:
    """Yield the products of two values that the argument of a softmax is computed from, each
    with the argument of its second factor.
    """

    def operands(node: Node) -> Iterable[str]:
        is_between = node.row.kind in _SCORE_KINDS and not node.params
        return node.refs() if is_between else ()

    for node in walk_back(graph, softmax.refs(), operands):
        factors = _factors(node)
        if factors and not _has_weight(graph, node):
            yield node, factors[1]


def _products_after(graph: Graph, softmax: Node) -> Iterator[tuple[Node, str]]:
    """Yield the products that read what a softmax returns, each with the argument of its other
    factor.
    """
    for reader, name in readers(graph, softmax.name):
        node = graph.by_name.get(reader)
        factors = None if node is None else _factors(node)
        if node is not None and factors and node.inputs[factors[0]] == Ref(name):
            yield node, factors[1]


def _factors(node: Node) -> tuple[str, str] | None:
    """Return the arguments of the two factors of a matrix product; None for other operators."""
    for factors in (("input", "other"), ("input", "mat2"), ("batch1", "batch2")):
        is_product = node.row.kind == "mac" and not node.row.weight
        if is_product and all(isinstance(node.inputs.get(name), Ref) for name in factors):
            return factors
    return None


def _has_weight(graph: Graph, node: Node) -> bool:
    """Return whether a node multiplies by a weight: its own, or a trained tensor."""
    if node.row.kind != "mac":
        return False
    reads_parameter = any(graph.by_name[name].op == "parameter" for name in node.refs())
    return node.row.weight or reads_parameter


def _sources(graph: Graph) -> Mapping[str, frozenset[str]]:
    """Return for each node the layers that its value comes from with no other product between.

    Norms change the outputs of such layers, and do not count.
    """
    sources: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        if _has_weight(graph, node) and not node.row.scales_channels:
            sources[node.name] = frozenset({node.name})
            continue
        if node.row.kind == "mac":
            continue
        read = [sources.get(name, _NO_LAYERS) for name in node.refs()]
        value = _NO_LAYERS.union(*read)
        if value:
            sources[node.name] = value
    return sources


_EXPERT_PATH = re.compile(r"(.*?)\.?experts\.(?:expert_?)?(\d+)\.")
"""The path of a layer of a single expert, as modules without a common tensor have it. Switch
Transformers and NLLB call them `experts.expert_0`.
"""
_BLOCK_PATH = re.compile(r"\.\d+\.")
"""What the path of a layer in one of several blocks contains."""
_WIDE_LAYERS = ("v_proj", "down_proj")
"""The last names of the layers of a block that mixtures of llama.cpp give more bits."""
_ONE_OUTPUT = 1
"""The outputs of the gate of a shared expert."""
_NO_MEDIA = re.compile("mask|embeds")
"""Parts of the names of other floating-point inputs."""
_DECODER_INPUT = "decoder_"
"""The beginning of a name of token ids that a model writes about what its encoder reads, as a
speech recognizer does. Its encoder does not only serve a language model.
"""
_MEDIA_NAMES = {
    "vision_tower",
    "vision_model",
    "vision_encoder",
    "vision_embed_tokens",
    "visual",
    "image_tower",
    "video_tower",
    "image_encoder",
    "image_embed",
    "audio_tower",
    "audio_encoder",
    "audio_embed",
    "multi_modal_projector",
    "mm_projector",
    "connector",
    "aligner",
    "qformer",
    "language_projection",
    "visual_projection",
    "image_to_text_projection",
    "perceiver_resampler",
    "embed_vision",
    "embed_audio",
}
"""The modules of these layers in the families of transformers."""
_LEAST_AXES = 2
"""Axes of an image that was cut into patches, as Qwen2-VL takes it."""


def language_head(graph: Graph) -> list[str]:
    """Return the layer that makes the logits, with the embedding if that has the same weight.

    It is the last layer that multiplies, and its weight is as large as the table of an
    embedding.
    """
    embeddings = vocabulary_embeddings(graph)
    last = _last_multiplying(graph)
    if last is None or not embeddings:
        return []
    names: list[str] = []
    for node in embeddings:
        if node.params["weight"] == last.params["weight"]:
            names.append(node.name)
    return [*names, last.name]


def layers_behind_blocks(graph: Graph) -> tuple[str, ...]:
    """Return the layers that multiply after the first numbered block and in no block, if they
    make no logits of tokens: poolers and classifiers.
    """
    if language_head(graph):
        return ()
    names: list[str] = []
    is_behind = False
    for node in graph.nodes:
        if not node.is_multiplying:
            continue
        if _BLOCK_PATH.search(node.scope):
            is_behind = True
        elif is_behind:
            names.append(node.name)
    return tuple(names)


def vocabulary_embeddings(graph: Graph) -> list[Node]:
    """Return the embeddings whose table is as large as the weight of the last layer that
    multiplies. A table may have up to a tenth more rows, for tokens that are read only.
    """
    last = _last_multiplying(graph)
    if last is None:
        return []
    weight = graph.weight(last)
    embeddings: list[Node] = []
    for node in graph.nodes:
        if not node.row.looks_up or not node.params:
            continue
        table = graph.weight(node)
        further_rows = len(table) - len(weight)
        is_as_wide = table.shape[1:] == weight.shape[1:]
        if is_as_wide and 0 <= further_rows <= len(table) // 10:
            embeddings.append(node)
    least_rows = _input_rows(graph)
    return [node for node in embeddings if len(graph.weight(node)) >= least_rows]


def _input_rows(graph: Graph) -> int:
    """Return the rows of the largest table that an input of the network chooses from. Smaller
    ones are of types of tokens, and a classifier may have as few classes.
    """
    rows = 0
    for node in graph.nodes:
        if node.row.looks_up and node.params:
            readings = [graph.by_name[name].op for name in node.refs()]
            if "input" in readings:
                rows = max(rows, len(graph.weight(node)))
    return rows


def _last_multiplying(graph: Graph) -> Node | None:
    return next((node for node in reversed(graph.nodes) if node.is_multiplying), None)


def wide_layers(graph: Graph) -> list[str]:
    """Return the layers to which llama.cpp gives more bits in Q4_K_M and Q5_K_M.

    They compute values of attentions, or end MLPs, in the first and last eighth of the blocks
    and in each third block between.

    Source: llama.cpp, `use_more_bits` in llama-quant.cpp.
    """
    names: list[str] = []
    for last_name in _WIDE_LAYERS:
        layers: list[str] = []
        for node in graph.nodes:
            if node.is_multiplying and node.scope.rpartition(".")[2] == last_name:
                layers.append(node.name)
        count = len(layers)
        for index, layer in enumerate(layers):
            after_first = index - count // 8
            is_at_end = after_first < 0 or index >= 7 * count // 8
            if is_at_end or after_first % 3 == 2:
                names.append(layer)
    return names


def router_layers(graph: Graph) -> list[str]:
    """Return the layers that choose experts, and those that weigh shared experts.

    They stand in the module around the experts, and have as many outputs as there are experts,
    or one.
    """
    counts = _experts_by_module(graph)
    names: list[str] = []
    for node in graph.nodes:
        if not node.is_multiplying or node.row.experts:
            continue
        if _EXPERT_PATH.match(node.scope):
            continue
        outputs = len(graph.weight(node))
        for module, count in counts.items():
            prefix = f"{module}." if module else ""
            is_inside = node.scope.startswith(prefix)
            if is_inside and outputs in (count, _ONE_OUTPUT):
                names.append(node.name)
                break
    return names


def _experts_by_module(graph: Graph) -> Mapping[str, int]:
    """Return how many experts a module has, by the path of the module around them."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.row.experts:
            module = node.outer_scope
            counts[module] = int(node.attrs["groups"])
            continue
        single_expert = _EXPERT_PATH.match(node.scope)
        if single_expert is not None:
            module, number = single_expert.groups()
            count = int(number) + 1
            counts[module] = max(count, counts.get(module, 0))
    return counts


def media_layers(graph: Graph) -> list[str]:
    """Return the layers of a language model that serve its images or audio, in execution order.

    On a trace they depend on such inputs, or on no input, and no token reaches them. Layers
    beside some that read tokens are not among them, as in an attention of tokens to an image.
    The graph of a module tree shows no inputs. There, the names of modules count.
    """
    embeddings = {node.name for node in vocabulary_embeddings(graph)}
    if not embeddings:
        return []
    layers = [node for node in graph.nodes if node.params and not node.is_tensor]
    if graph.is_of_modules:
        return [
            node.name for node in layers if not _MEDIA_NAMES.isdisjoint(node.scope.split("."))
        ]
    media, decoder_inputs = _inputs(graph)
    if not embeddings.isdisjoint(depending(graph, decoder_inputs)):
        return []
    of_text = depending(graph, embeddings)
    of_media = depending(graph, media) - of_text
    for node in reversed(graph.nodes):
        readers = graph.consumers[node.name]
        if node.op == "input" or node.name in of_text:
            continue
        if readers and of_media.issuperset(readers):
            of_media.add(node.name)
    modules_of_text: set[str] = set()
    for node in layers:
        if node.is_multiplying and node.name in of_text:
            modules_of_text.add(node.outer_scope)
    # The root has layers of all kinds
    modules_of_text.discard("")
    names: list[str] = []
    for node in layers:
        is_beside_text = node.outer_scope in modules_of_text
        if node.name in of_media and not is_beside_text:
            names.append(node.name)
    return names


def _inputs(graph: Graph) -> tuple[set[str], set[str]]:
    """Return the inputs that may be images or audio, and those of a decoder."""
    media: set[str] = set()
    of_decoder: set[str] = set()
    nodes = [node for node in graph.nodes if node.op == "input"]
    for node, path in zip(nodes, graph.input_paths, strict=True):
        name = str(path[1])
        if name.startswith(_DECODER_INPUT):
            of_decoder.add(node.name)
        elif node.is_float and node.rank >= _LEAST_AXES and not _NO_MEDIA.search(name):
            media.add(node.name)
    return media, of_decoder
