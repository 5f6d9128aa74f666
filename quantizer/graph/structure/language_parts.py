"""Find the parts of language models that engines treat apart: the head with the logits, the
routers of experts, and the layers that read images or audio only. These are vision and audio
towers, and the projectors behind them.
"""

import re
from collections.abc import Mapping

from quantizer.graph.ir import Graph, Node, depending

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
    last: Node | None = None
    for node in graph.nodes:
        if node.is_multiplying:
            last = node
    return last


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
        return [node.name for node in layers if _has_media_name(node)]
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


def _has_media_name(node: Node) -> bool:
    parts = node.scope.split(".")
    return not _MEDIA_NAMES.isdisjoint(parts)


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
